"""What is frozen in a model: it has the memory of its copies, and of equal models in this process, until it is written
to.

Whether anything writes to it later need not be known, and changes no value: see :mod:`hpstage.checkpoints.lazy_copies`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpstage.checkpoints import lazy_copies, leaves


def frozen_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the optimizer does not have, by name: buffers, and parameters that nobody trains yet."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, tensor in tensors_of(model).items():
        if id(tensor) not in trained:
            yield name, tensor


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers()) | dict(model.named_parameters())


def share(tensor: Tensor, *others: Tensor) -> None:
    """Let copies of a tensor be lazy; it becomes one itself if one of the others is equal to it."""
    if not lazy_copies.allow_copies(tensor):
        return
    for other in others:
        if lazy_copies.allow_copies(other) and leaves.same_bytes(tensor, other):
            tensor.data = torch._lazy_clone(other.detach())
            return
