"""Made-up members for checks: like a real one, with other values in every tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def probe(
    example: Sequence[Tensor], generator: torch.Generator, states: int, batch: int, *, moved: bool
) -> list[Tensor]:
    """Return inputs of a made-up member, near a real one's.

    Numbers of the model are changed in their ratio, so that what is positive stays so. The batch keeps its values,
    since others may not be allowed; its samples change places.

    Args:
        example: a member's inputs: ``states`` tensors of its model, hyperparameters, ``batch`` tensors of its batch.
        moved: whether samples change places.
    """
    first = len(example) - batch
    made = [_near(tensor, generator) for tensor in example[:states]]
    made += [tensor.clone() for tensor in example[states:first]]
    tensors = example[first:]
    samples = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
    order = torch.randperm(samples, generator=generator)
    for tensor in tensors:
        if moved and tensor.dim() and tensor.shape[0] == samples:
            tensor = tensor[order.to(tensor.device)]
        made.append(tensor.contiguous().clone())
    return made


def _near(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    # In place: a frozen tensor may be large, and each copy of it counts.
    factor = torch.rand(tensor.shape, generator=generator).mul_(0.4).add_(0.8)
    return factor.to(tensor).mul_(tensor)
