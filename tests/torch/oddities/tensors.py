"""Tensors and arrays of every kind, their attributes and hooks, and memory that they share."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.torch.oddities.oddity import Odd, odd

# --- tensors and arrays


@odd("an array of objects", lambda: np.array([[0], {"a": 1}, None], dtype=object))
def _(kept: Any, self: Odd) -> float:
    kept[0].append(1)
    kept[2] = self.steps
    return len(kept[0]) + kept[2]


@odd("arrays of texts, dates and records", lambda: [np.array(["a", "b"]), np.zeros(2, "M8[s]"), np.zeros(2, "f4,i8")])
def _(kept: Any, self: Odd) -> float:
    texts, dates, records = kept
    texts[0] = "b" if texts[0] == "a" else "a"
    dates += np.timedelta64(1, "s")
    records["f1"] += 1
    return float(texts[0] == "a") + float(dates[0].astype("i8")) + float(records["f1"][0])


@odd("a masked array", lambda: np.ma.masked_array([0.0, 1.0, 2.0], [False, True, False]))
def _(kept: Any, self: Odd) -> float:
    kept.data[:] += 1
    kept.mask[0] = self.steps > 2
    return float(kept.sum())


@odd("arrays with steps of their own", lambda: [np.zeros((4, 4))[::2, ::2], np.arange(4.0)[::-1]])
def _(kept: Any, self: Odd) -> float:
    for values in kept:
        values += 1
    return float(kept[0][0, 0] + kept[1][0])


def mapped() -> Any:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        made = np.memmap(file.name, dtype="f8", mode="w+", shape=(3,))
    made[:] = 0
    return made


@odd("a memmap that is written to", mapped, refused=r"self\.kept is a numpy\.memmap .* has changed in training")
def _(kept: Any, self: Odd) -> float:
    kept += 1
    return float(kept[0])


@odd("a memmap that is read", mapped)
def _(kept: Any, self: Odd) -> float:
    return float(kept[0])


@odd("an empty tensor that grows", lambda: torch.zeros(0))
def _(kept: Any, self: Odd) -> float:
    self.kept = torch.cat([kept, torch.ones(1)])
    return len(self.kept)


@odd("a tensor that is resized", lambda: torch.zeros(1))
def _(kept: Any, self: Odd) -> float:
    kept.resize_(len(kept) + 1).fill_(0.1)
    return float(kept.sum())


@odd("sparse tensors that training makes", lambda: torch.eye(3).to_sparse())
def _(kept: Any, self: Odd) -> float:
    self.kept = (kept * 1.1).coalesce()
    return float(self.kept.to_dense().sum())


@odd("a sparse tensor that is written to", lambda: torch.eye(3).to_sparse(), refused=r"self\.kept .*sparse_coo")
def _(kept: Any, self: Odd) -> float:
    kept.mul_(1.1)
    return float(kept.to_dense().sum())


@odd("sparse, quantized and meta tensors that never change", lambda: Untouched())
def _(kept: Any, self: Odd) -> float:
    return float(kept.rows.to_dense().sum()) + float(kept.small.dequantize().sum())


class Untouched:
    def __init__(self) -> None:
        self.rows = torch.eye(3).to_sparse_csr()
        self.small = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        self.form = torch.zeros(3, device="meta")


@odd("complex tensors, conjugated and not", lambda: [torch.ones(3, dtype=torch.complex64).conj(), torch.zeros(2, 2)])
def _(kept: Any, self: Odd) -> float:
    kept[0].add_(1j)
    return float(kept[0].imag.sum())


@odd("one value under many indices", lambda: torch.zeros(1).expand(3))
def _(kept: Any, self: Odd) -> float:
    kept.data[0].add_(1)
    return float(kept.sum())


@odd("attributes of tensors", lambda: torch.zeros(1))
def _(kept: Any, self: Odd) -> float:
    kept.n = getattr(kept, "n", 0) + 1
    weight = self.net[1].weight
    weight.seen = [*getattr(weight, "seen", []), 1]
    return kept.n + len(weight.seen)


class Marked(torch.Tensor):
    pass


class OwnParameter(nn.Parameter):
    pass


@odd("tensors of classes of their own", lambda: [torch.zeros(2).as_subclass(Marked), OwnParameter(torch.ones(2))])
def _(kept: Any, self: Odd) -> float:
    kept[0].add_(1)
    kept[1].data.add_(1)
    return float(kept[0].sum()) + float(kept[1].sum())


@odd("hooks of tensors, with a closure", lambda: Hooked())
def _(kept: Any, self: Odd) -> float:
    (kept.weight * 2).sum().backward()
    return float(kept.weight.grad.sum())


class Hooked:
    def __init__(self) -> None:
        self.weight = torch.ones(2, requires_grad=True)
        calls: list[int] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return gradient * len(calls)

        self.weight.register_hook(hook)


@odd("a hook that a tensor is given in training", lambda: torch.ones(2, requires_grad=True), refused=r"a hook")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept.register_hook(lambda gradient: gradient * 2)
    return 0


@odd("a graph of gradients", refused=r"self\.loss_kept is a tensor that is part of a graph of gradients")
def _(kept: Any, self: Odd) -> float:
    self.loss_kept = self.net[1].weight.sum()
    return float(self.loss_kept)


# --- memory that is shared


@odd("weights that become parts of one vector, and an attribute named as NumPy's base", network=lambda: Based())
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        vector = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        nn.utils.vector_to_parameters(0.9 * vector, self.net.parameters())
    return 0


class Based(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        return result


@odd("memory that two come to share", lambda: [torch.zeros(2), torch.zeros(2)])
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept[1].data = kept[0].data
    kept[0].add_(1)
    return float(kept[1].sum())


def sharing() -> Any:
    one = torch.zeros(2)
    return [one, one.detach()]


@odd("memory that two share no more", sharing)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept[1].data = kept[1].data.clone()
    kept[0].add_(1)
    return float(kept[1].sum())


@odd("memory that is exchanged", lambda: [torch.zeros(2), torch.ones(2)])
def _(kept: Any, self: Odd) -> float:
    kept[0].data, kept[1].data = kept[1].data, kept[0].data
    kept[0].add_(1)
    return float(kept[0].sum())


@odd("views that training makes of what was there", lambda: torch.ones(4))
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.part, self.bits, self.outside = kept[1:], kept.view(torch.int32), kept.numpy()
    if self.steps > 2:
        self.part.add_(1)
        self.bits[0] += 1 << 20
        self.outside += 0.5
    return min(float(kept.sum()), 50)


@odd("views that training makes of what it has made")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.whole = torch.zeros(4)
        self.part, self.outside = self.whole[1:], self.whole.numpy()
    if self.steps > 2:
        self.part.add_(1)
        self.outside += 0.5
    return float(self.whole.sum()) if self.steps >= 2 else 0


@odd("a view that training makes of an array", lambda: np.zeros(3))
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.part = kept[1:]
    if self.steps > 2:
        self.part += 1
    return float(kept.sum())


@odd("gradients in one piece of memory")
def _(kept: Any, self: Odd) -> float:
    weight, bias = self.net[2].weight, self.net[2].bias
    if self.steps == 2:
        self.flat = torch.zeros(weight.numel() + bias.numel())
        self.views = [self.flat[: weight.numel()].view_as(weight), self.flat[weight.numel() :]]
    if self.steps > 2:
        self.flat.add_(0.1)
    return float(self.views[1].sum()) if self.steps >= 2 else 0


class Counted(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@odd("a tensor whose class counts the calls of its functions", lambda: torch.ones(3).as_subclass(Counted))
def _(kept: Any, self: Odd) -> float:
    return float(kept.sum()) + Counted.calls


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@odd("a nested tensor that is read", nested)
def _(kept: Any, self: Odd) -> float:
    return float(kept.unbind()[0].sum())


@odd("a nested tensor that is written to", nested, refused="keep ordinary tensors")
def _(kept: Any, self: Odd) -> float:
    kept.mul_(1.1)
    return float(kept.unbind()[0].sum())
