"""Reduction: gradients, buffers and losses of virtual nodes are combined in one fixed binary tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hpstage.errors import UsageError


class Rows(NamedTuple):
    """A sparse gradient: ``indices`` of shape [sparse dimensions, n], ``values`` of shape [n, ...]. An index may occur
    several times."""

    indices: Tensor
    values: Tensor


Gradient = Tensor | Rows | None
"""The gradient of one parameter; ``None`` if the loss did not depend on it."""


@dataclass(slots=True)
class Share:
    """The sum over some neighbouring virtual nodes: a subtree of the reduction.

    Attributes:
        loss: the sum of their losses.
        gradients: one for each parameter: the sum of dense gradients, or all rows of sparse ones, in the order of the
            nodes.
        buffers: one for each buffer: the mean of floats, or whole numbers that are equal in all nodes.
        unequal: indices of buffers of whole numbers in which nodes differ.
        logged: by name, the sum and the number of logged values.
    """

    loss: float
    gradients: list[Gradient]
    buffers: list[Tensor]
    unequal: frozenset[int] = frozenset()
    logged: dict[str, tuple[float, int]] = field(default_factory=dict)


def combine(left: Share, right: Share, *, into_right: bool = False) -> Share:
    """Return the share of two neighbouring subtrees of equal size, in the tensors of ``left``, or of ``right`` if
    ``into_right``."""
    gradients = [_sum(one, other, into_right) for one, other in zip(left.gradients, right.gradients, strict=True)]
    unequal = set(left.unequal | right.unequal)
    buffers = []
    for index, (one, other) in enumerate(zip(left.buffers, right.buffers, strict=True)):
        if one.is_floating_point() or one.is_complex():
            # Halves are exact and cannot overflow. Equal values stay, also infinite ones.
            buffers.append(torch.where(one == other, one, one / 2 + other / 2))
            continue
        buffers.append(other if into_right else one)
        if not torch.equal(one, other):
            unequal.add(index)
    logged = left.logged | right.logged
    for name in left.logged.keys() & right.logged.keys():
        (one_sum, one_count), (other_sum, other_count) = left.logged[name], right.logged[name]
        logged[name] = one_sum + other_sum, one_count + other_count
    return Share(left.loss + right.loss, gradients, buffers, frozenset(unequal), logged)


def _sum(one: Gradient, other: Gradient, into_other: bool) -> Gradient:
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, Rows) and isinstance(other, Rows):
        return Rows(torch.cat([one.indices, other.indices], 1), torch.cat([one.values, other.values]))
    if isinstance(one, Rows) or isinstance(other, Rows):
        raise UsageError(
            "a parameter has a sparse gradient in one virtual node and a dense one in another: let the loss use it in "
            "the same way for all samples"
        )
    return torch.add(one, other, out=other if into_other else one)


class Tree:
    """Combines shares that are added in the order of their nodes, in one fixed binary tree."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, Share]] = []  # (number of leaves, share), each larger than the next

    def add(self, share: Share) -> None:
        size = 1
        while self._pending and self._pending[-1][0] == size:
            size, share = 2 * size, combine(self._pending.pop()[1], share)
        self._pending.append((size, share))

    def root(self) -> Share:
        """Return the share of all leaves. Their number must be a power of two."""
        ((_, share),) = self._pending
        return share


def mean(gradient: Gradient, like: Tensor, nodes: int) -> Tensor | None:
    """Return the mean of a gradient that was summed over ``nodes`` virtual nodes, a power of two. It has the layout of
    the parameter ``like``, so that it does not depend on where it was summed. A sparse gradient is coalesced."""
    if gradient is None:
        return None
    if isinstance(gradient, Rows):
        summed = torch.sparse_coo_tensor(gradient.indices, gradient.values, like.shape, check_invariants=False)
        summed = summed.coalesce()
        return torch.sparse_coo_tensor(
            summed.indices(), summed.values() / nodes, like.shape, is_coalesced=True, check_invariants=False
        )
    if (gradient.stride(), gradient.dtype) != (like.stride(), like.dtype):
        gradient = torch.empty_like(like, requires_grad=False).copy_(gradient)
    return gradient.div_(nodes)
