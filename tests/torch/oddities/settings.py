"""Settings of torch by both of its interfaces, modes, and hooks that torch keeps in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch.oddities.oddity import Odd, odd

# --- settings of torch


@odd("the precision of matmuls, by the newer interface")
def _(kept: Any, self: Odd) -> float:
    was = torch.backends.mkldnn.matmul.fp32_precision
    if self.steps == 2:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    return float(was == "bf16")


@odd("the precision of all, by the newer interface")
def _(kept: Any, self: Odd) -> float:
    was = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    if self.steps in (2, 5):
        torch.backends.fp32_precision = "ieee" if self.steps == 2 else "tf32"
    return float(was[0] == "ieee") + 2 * float(was[1] == "ieee") + 4 * float(was[1] == "tf32")


@odd("the precision of matmuls, by the older interface and then by the newer one")
def _(kept: Any, self: Odd) -> float:
    was = torch.backends.mkldnn.matmul.fp32_precision
    if self.steps == 2:
        torch.set_float32_matmul_precision("medium")
    if self.steps == 4:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    return float(("none", "bf16", "ieee").index(was))


@odd("precision that is allowed to be less, in parts")
def _(kept: Any, self: Odd) -> float:
    was = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    if self.steps == 2:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)  # type: ignore[assignment]
    return float(was)


@odd("a fast path that Python keeps a flag of")
def _(kept: Any, self: Odd) -> float:
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(self.steps % 2 == 0)
    return float(was)


@odd("how sums of products are ordered")
def _(kept: Any, self: Odd) -> float:
    was = torch.backends.opt_einsum.strategy
    if self.steps == 2:
        torch.backends.opt_einsum.strategy = "optimal"
    return float(was == "optimal")


@odd("the engine of quantized layers")
def _(kept: Any, self: Odd) -> float:
    was = torch.backends.quantized.engine
    if self.steps == 2:
        torch.backends.quantized.engine = "onednn"
    return float(was == "onednn")


@odd("whether memory is filled, and sparse tensors are checked")
def _(kept: Any, self: Odd) -> float:
    was = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    if self.steps == 2:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.sparse.check_sparse_tensor_invariants.enable()
    return float(was) + 2 * checked


@odd("whether gradients that are NaN are looked for")
def _(kept: Any, self: Odd) -> float:
    was = torch.is_anomaly_check_nan_enabled()
    if self.steps == 2:
        torch.autograd.set_detect_anomaly(False, check_nan=False)
    return float(was)


@odd("autocast to numbers of 16 bits on GPUs")
def _(kept: Any, self: Odd) -> float:
    was = torch.get_autocast_dtype("cuda") is torch.bfloat16
    if self.steps == 2:
        torch.set_autocast_dtype("cuda", torch.bfloat16)
    return float(was)


# --- modes


class Counted(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


@odd("a mode of functions that is entered and left in each step", Counted)
def _(kept: Any, self: Odd) -> float:
    with kept:
        torch.ones(2).sum()
    return float(kept.calls)


@odd("a mode of operators that is entered and left in each step", Dispatched)
def _(kept: Any, self: Odd) -> float:
    with kept:
        torch.ones(2).sum()
    return float(kept.calls)


# --- hooks that torch keeps in C++


def accumulator(tensor: torch.Tensor) -> Any:
    return tensor.expand_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class Fading(nn.Module):
    """The gradient of its weight fades with the number of times that it was added."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 3)
        seen = [0]

        def fade(gradients: Any, *more: Any) -> Any:
            seen[0] += 1
            return (gradients[0] / seen[0],) if before else None

        node = accumulator(self.inner.weight)
        (node.register_prehook if before else node.register_hook)(fade)
        self.node, self.seen = node, lambda: seen[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(1))


@odd("a hook before a gradient is added", network=lambda: Fading(before=True))
def _(kept: Any, self: Odd) -> float:
    return 0.0


@odd("a hook after a gradient is added, that counts", network=lambda: Fading(before=False))
def _(kept: Any, self: Odd) -> float:
    return float(self.net.seen())


class Held(nn.Module):
    """A hook is called by a function of torch's, which closes over it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 3)
        self.factor = 1.0
        totals: list[float] = []

        def note(gradients: Any) -> None:
            totals.append(float(gradients[0].sum()))
            self.factor = 1 + 0.1 * len(totals)

        self.handle = register_multi_grad_hook([self.inner.weight, self.inner.bias], note)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(1)) * self.factor


@odd("a hook of several gradients", network=Held)
def _(kept: Any, self: Odd) -> float:
    return 0.0


@odd("a hook where a gradient is added, placed in training", refused=r"net\.1\.weight|model\.1\.weight")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        node = accumulator(self.net[1].weight)
        node.register_hook(lambda *gradients: None)
        self.node = node
    return 0.0


class Stepping(nn.Module):
    """Its weight steps as soon as its gradient is there, with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 3)
        own = torch.optim.SGD([self.inner.weight], lr=0.01, momentum=0.9)

        def step(tensor: torch.Tensor) -> None:
            own.step()
            own.zero_grad()

        self.inner.weight.register_post_accumulate_grad_hook(step)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(1))


@odd("an optimizer in a hook of a gradient", network=Stepping)
def _(kept: Any, self: Odd) -> float:
    return 0.0
