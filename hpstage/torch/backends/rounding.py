"""Training steps with other rounding. Their difference from the original step shows how far the results of two orders
of operations may differ."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hpstage.training.identity.torch_settings import read, torch_settings

_LEAST = 1 << 16
"""Minimum number of changes drawn at once, of which each operation uses a part."""


class OtherwiseRounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes the last bit of all results of operations, up or down at random, in the dtype of each result.

    Small whole numbers stay: they are masks, counts and indices, and mostly exact. Tensors that an operation changes in
    place, and views that it returns, stay as well.

    Reference: D. S. Parker, *Monte Carlo arithmetic*, Technical Report CSD-970002, UCLA, 1997.

    Args:
        seed: seed of the changes; the generators of training are not used.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._drawn: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._places = random.Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func._schema.is_mutable:
            given = {_memory(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if _stays(leaf)}
            for leaf in pytree.tree_leaves(result):
                if _is_rounded(leaf) and _memory(leaf) not in given:
                    self._round(leaf)
        return result

    def _round(self, tensor: Tensor) -> None:
        size, kind = tensor.numel(), (tensor.dtype, tensor.device)
        drawn = self._drawn.get(kind)
        if drawn is None or len(drawn) < 2 * size:
            drawn = self._drawn[kind] = _factors(max(1 << (2 * size).bit_length(), _LEAST), *kind, self._seed)
        place = self._places.randrange(len(drawn) - size + 1)  # drawing new numbers takes longer than operations
        whole = tensor == tensor.round()
        whole &= tensor.abs() < 1 / torch.finfo(tensor.dtype).eps
        tensor.mul_(drawn[place : place + size].view(tensor.shape).masked_fill(whole, 1.0))


def _factors(size: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return ``size`` numbers, each one bit above or below 1 at random."""
    last = torch.finfo(dtype).eps
    up = torch.randint(2, (size,), device=device, generator=torch.Generator(device).manual_seed(seed))
    return (up.to(torch.promote_types(dtype, torch.float32)) * (2 * last) + (1 - last)).to(dtype)


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute without TF32 and sums of reduced precision. If they are allowed, whether an operation of a GPU uses them
    depends on the algorithm that it picks, and so on the layout of its inputs."""
    with ExitStack() as restored:
        for name, (ask, put) in torch_settings(torch).items():
            if name.startswith("fp32 precision") or name.endswith(("tf32", "reduced precision reduction")):
                with suppress(RuntimeError):  # an older name of a setting cannot be read once the newer one was used
                    known = read(ask)
                    full = {str: "ieee", bool: False}.get(type(known), (False, False))
                    if known not in (full, "none"):
                        restored.callback(put, known)
                        put(full)
        yield


def _stays(value: Any) -> bool:
    """Return whether views of a value stay unchanged. Views of trained parameters do not: they are rounded."""
    return isinstance(value, Tensor) and (type(value) is Tensor or not value.requires_grad)


def _is_rounded(value: Any) -> bool:
    return type(value) is Tensor and value.is_floating_point() and value.layout is torch.strided and value.numel() > 0


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
