"""Memory that a tensor, an array or a view shares and does not show, and how values lie in it."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import numpy as np
import torch

from tests.torch.oddities.oddity import Odd, odd


@odd("memory around a tensor", lambda: torch.zeros(10)[2:5])
def _(kept: Any, self: Odd) -> float:
    whole = kept.as_strided((10,), (1,), 0)
    whole[7:] += 1
    return float(whole.sum())


@odd("memory around a tensor, by its storage", lambda: torch.zeros(10)[2:5])
def _(kept: Any, self: Odd) -> float:
    kept += 1
    kept.untyped_storage()[0] = self.steps
    return float(kept.untyped_storage()[0])


@odd(
    "memory that resize_ shows again",
    lambda: torch.zeros(10),
    refused=r"self\.kept\.untyped_storage\(\) has memory that",
)
def _(kept: Any, self: Odd) -> float:
    kept.resize_(10)
    kept += self.steps
    shown = float(kept.sum()) / 100
    kept.resize_(3)
    return shown


@odd("memory around a tensor that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.kept = torch.full((10,), 0.1)[2:5]
    if self.steps > 2:
        whole = kept.as_strided((10,), (1,), 0)
        whole[7:] += 1
        return float(whole.sum())
    return 0


@odd("the base of an array", lambda: np.zeros(10)[2:5])
def _(kept: Any, self: Odd) -> float:
    kept.base[7:] += 1
    return float(kept.base.sum())


@odd("the base of an array that training makes", refused=r"self\.kept is a view .* `base`")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.kept = np.full((10,), 0.1)[2:5]
    if self.steps > 2:
        kept.base[7:] += 1
        return float(kept.base.sum()) + float(kept.base.shape[0])
    return 0


@odd("the base of a view that training makes", lambda: np.zeros(10))
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.part = kept[5:2:-1]
    if self.steps > 2:
        self.part.base[4:] += 1
        self.part *= 1.5
        return float(kept.sum()) + self.part.base.shape[0]
    return 0


@odd(
    "a view of an array of objects that training makes",
    lambda: np.array([0.0, None, 0.0], object),
    refused=r"self\.part is an array of objects .* as a view, of the memory of self\.kept",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.part = kept[:2]
    if self.steps > 2:
        self.part[0] += 1
    return float(kept[0])


@odd("a view of an array of objects that nothing else shows")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.part = np.array([0.0, None, 0.0, None], object).reshape(2, 2)[:, :1]
    if self.steps > 2:
        self.part[0, 0] += 1
        return float(self.part[0, 0])
    return 0


@odd("a view of an array of objects, as it was made", lambda: [whole := np.array([0.0, None], object), whole[:1]])
def _(kept: Any, self: Odd) -> float:
    kept[1][0] += 1
    return float(kept[0][0])


@odd("bytes below an array", lambda: np.frombuffer(bytearray(16), "f8"))
def _(kept: Any, self: Odd) -> float:
    kept += 1
    memoryview(kept.base)[8:16] = bytes(8)
    return float(kept.sum())


@odd("a memoryview of an array", lambda: memoryview(np.zeros(4)))
def _(kept: Any, self: Odd) -> float:
    kept[1] += 1
    return kept[1]


@odd("part of a bytearray", lambda: memoryview(bytearray(8))[2:4])
def _(kept: Any, self: Odd) -> float:
    kept[1] += 1
    kept.obj[7] += 1
    return kept[1] + kept.obj[7]


NOISE = np.random.default_rng(0).normal(size=(37, 53)).astype("f4")


def spread(values: Any) -> float:
    """A sum whose last bits hang on the order in memory."""
    return float(values.sum() * 1e6 % 1) + float(values.strides[0] / 100)


@odd("the order of an array that training makes")
def _(kept: Any, self: Odd) -> float:
    self.kept = np.asfortranarray(NOISE * self.steps) if kept is None else kept * np.float32(1.1)
    return spread(self.kept)


@odd("an array with gaps that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.kept = NOISE[:, ::2].copy().transpose()[::-1, ::3]
    if self.steps > 2:
        kept *= np.float32(1.1)
        return spread(kept)
    return 0


@odd("an array of three axes in an order of its own")
def _(kept: Any, self: Odd) -> float:
    self.kept = NOISE.reshape(37, 53, 1).repeat(3, 2).transpose(1, 2, 0).copy("K") if kept is None else kept * 2
    return spread(self.kept) + self.kept.strides[2] / 100


@odd("the order of an array of texts")
def _(kept: Any, self: Odd) -> float:
    self.kept = np.array([["a", "b"], ["c", "d"]], order="F") if kept is None else np.char.add(kept, "x").copy("F")
    return float(self.kept.strides[0])


@odd("tensors with steps of their own that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.last = torch.rand(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        self.gaps, self.spread = torch.rand(31, 17)[:, ::2], torch.zeros(1, 3).expand(4, 3)
    if self.steps > 2:
        self.spread[0].add_(1)
        self.gaps.mul_(1.1)
        strides = (*self.last.stride(), *self.gaps.stride(), *self.spread.stride())
        return sum(strides) / 10 + float(self.spread.sum()) + float(self.gaps.sum() * 1e5 % 1)
    return 0


def fixed(values: Any) -> Any:
    values.flags.writeable = False
    return values


@odd("an array that becomes read-only", lambda: np.zeros(3))
def _(kept: Any, self: Odd) -> float:
    if self.steps <= 2:
        kept += 1
    if self.steps == 2:
        kept.flags.writeable = False
    return float(kept.sum()) + kept.flags.writeable


@odd("a read-only array that is opened to be written", lambda: fixed(np.zeros(3)))
def _(kept: Any, self: Odd) -> float:
    kept.flags.writeable = True
    kept += 1
    kept.flags.writeable = False
    return float(kept.sum())


@odd("a read-only array that training makes")
def _(kept: Any, self: Odd) -> float:
    self.kept = fixed(np.full(3, float(self.steps)))
    return float(kept.flags.writeable) + float(kept[0]) if kept is not None else 0


@odd("a read-only view of what is written", lambda: [whole := np.zeros(4), fixed(whole[1:])])
def _(kept: Any, self: Odd) -> float:
    kept[0] += 1
    if self.steps == 2:
        kept.append(fixed(kept[0][2:]))
    return float(kept[-1].sum()) + kept[-1].flags.writeable


@odd("an array and a view of it that become read-only", lambda: [whole := np.zeros(4), whole[1:]][::-1])
def _(kept: Any, self: Odd) -> float:
    whole = kept[-1]
    if self.steps <= 2:
        whole += 1
    if self.steps == 2:
        whole.flags.writeable = kept[0].flags.writeable = False
    return float(kept[0].sum()) + whole.flags.writeable + kept[0].flags.writeable


@odd("an array of objects that becomes read-only", lambda: [whole := np.array([1, "a"], object), whole[1:]][::-1])
def _(kept: Any, self: Odd) -> float:
    if self.steps <= 2:
        kept[0][0] += "a"
    if self.steps == 3:
        kept[1].flags.writeable = kept[0].flags.writeable = False
    return len(kept[0][0]) + kept[0].flags.writeable


@odd("an array of bytes that never change", lambda: np.frombuffer(b"abcdefgh", "u1"))
def _(kept: Any, self: Odd) -> float:
    self.kept = np.frombuffer(bytes([self.steps] * 8), "u1")
    return float(self.kept.sum()) + self.kept.flags.writeable


@odd("an attribute of an array of the user's", lambda: np.zeros(2).view(Own))
def _(kept: Any, self: Odd) -> float:
    kept.n = getattr(kept, "n", 0) + 1
    return kept.n


class Own(np.ndarray[Any, Any]):
    n: int


@odd(
    "a tensor in a Python array's memory",
    lambda: array.array("f", [0.0] * 4),
    refused=r"memory of self\.kept",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.seen = torch.frombuffer(kept, dtype=torch.float32)
    kept[self.steps % 4] += 0.1
    return float(self.seen.sum()) if self.steps > 2 else 0


@odd("an array in the memory of bytes", lambda: bytearray(8), refused=r"memory of self\.kept")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.seen = np.frombuffer(kept, np.uint8)[2:]
    kept[self.steps % 8] += 1
    return float(self.seen.sum()) if self.steps > 2 else 0


@odd(
    "weights that change places with their averages, by data",
    lambda: [torch.zeros(4, 16), torch.zeros(3, 4)],
    refused=r"has given the memory of model\.1\.weight to another tensor",
)
def _(kept: Any, self: Odd) -> float:
    weights = [self.net[1].weight, self.net[2].weight]
    for number, weight in enumerate(weights):
        kept[number].lerp_(weight.detach(), 0.3)
        if self.steps % 2:
            kept[number], weight.data = weight.data, kept[number]
    return float(kept[0].sum() + weights[0].sum())


@odd("a field of a record", lambda: np.zeros(2, [("n", "i8"), ("m", "f8")])[0], refused=r"self\.kept")
def _(kept: Any, self: Odd) -> float:
    kept["n"] += 1
    return float(kept["n"])


@odd("a long array of Python's", lambda: array.array("d", bytes(1_600_000)))
def _(kept: Any, self: Odd) -> float:
    kept[self.steps] = self.steps
    return sum(kept[:10])


@odd("a long array of C", lambda: (ctypes.c_double * 200_000)())
def _(kept: Any, self: Odd) -> float:
    kept[self.steps] = self.steps
    return sum(kept[:10])
