"""Made-up members for checks: like a real one, with other values in every tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

_SEEN = 4096


def probe(
    example: Sequence[Tensor],
    generator: torch.Generator,
    states: int,
    batch: int,
    *,
    moved: bool,
    given: Collection[int] = (),
) -> list[Tensor]:
    """Return inputs of a made-up member, near a real one's.

    Numbers of the model are changed in their ratio, so that what is positive stays so. The batch keeps its values,
    since others may not be allowed; its samples change places.

    Args:
        example: a member's inputs: ``states`` tensors of its model, hyperparameters, ``batch`` tensors of its batch.
        moved: whether samples change places.
        given: indices of tensors of the model that are not changed, and not copied.
    """
    first = len(example) - batch
    made = [tensor if index in given else _near(tensor, generator) for index, tensor in enumerate(example[:states])]
    made += [tensor.clone() for tensor in example[states:first]]
    tensors = example[first:]
    samples = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
    order = torch.randperm(samples, generator=generator)
    for tensor in tensors:
        if moved and tensor.dim() and tensor.shape[0] == samples:
            tensor = tensor[order.to(tensor.device)]
        made.append(tensor.contiguous().clone())
    return made


def is_varied(tensor: Tensor) -> bool:
    """Return whether most numbers of a tensor differ, so that ways to compute that differ show it as well as of made-up
    ones."""
    if not tensor.is_floating_point() or not tensor.is_contiguous():
        return False
    some = tensor.view(-1)[:: max(1, tensor.numel() // _SEEN)]
    return len(torch.unique(some)) > len(some) // 2


def _near(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    # In place: a frozen tensor may be large, and each copy of it counts.
    factor = torch.rand(tensor.shape, generator=generator).mul_(0.4).add_(0.8)
    return factor.to(tensor).mul_(tensor)
