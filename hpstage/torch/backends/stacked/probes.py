"""Members that are made up for checks: like a real one, with other values in every tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpstage.torch.backends.stacked.tracing import Trace


def probes(trace: Trace, example: Sequence[Tensor], width: int, seed: int) -> list[list[Tensor]]:
    """Return inputs of ``width`` made-up members, near a member's, ``example``.

    Numbers are changed by up to a fifth, in their ratio, so that what is positive stays so; whole numbers, which may be
    indices, stay in their range: they change places.
    """
    generator = torch.Generator().manual_seed(seed)
    batch_begins = len(trace.trained) + len(trace.kept) + len(trace.values)
    return [
        [_near(tensor, generator, moved=index >= batch_begins) for index, tensor in enumerate(example)]
        for _ in range(width)
    ]


def _near(tensor: Tensor, generator: torch.Generator, *, moved: bool) -> Tensor:
    if tensor.is_floating_point():
        factor = 0.8 + 0.4 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
        noise = (
            torch.zeros(()) if not moved else 0.05 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        )
        return (tensor * factor.to(tensor.device) + noise.to(tensor)).contiguous()
    if moved and tensor.dim():
        order = torch.randperm(tensor.shape[0], generator=generator)
        return tensor[order.to(tensor.device)].contiguous()
    return tensor.clone()
