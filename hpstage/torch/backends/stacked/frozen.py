"""Inputs that members have in common: tensors that no step changes, the batch, and the stream of random numbers.

Inputs are in common if their bytes are equal. A value that depends only on such inputs is computed once, by the
operations that each member would use. So a member's bits do not depend on the inputs that it has in common with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from torch import Tensor

from hpstage.checkpoints import lazy_copies, leaves
from hpstage.torch.backends.stacked.cleaning import is_random
from hpstage.torch.backends.stacked.planning import STREAM, is_heavy, once_of
from hpstage.torch.backends.stacked.tracing import Trace


class Frozen:
    """Holds one copy of each tensor that steps do not change, for all members whose own tensor is equal to it."""

    def __init__(self) -> None:
        self._copies: WeakValueDictionary[str, Tensor] = WeakValueDictionary()  # members keep the copies alive

    def copy_of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the common copy of a tensor. The copy must not be changed."""
        tensor = tensor.detach()
        known = self._copies.get(name)
        if known is None or not same_bytes(known, tensor.contiguous()):
            known = self._copies[name] = lazy_copies.clone(tensor.contiguous())
        return known


class Common:
    """Determines which inputs of the rest of a step are the same tensor for all members.

    Args:
        kept: for each of ``trace.kept``, the members' tensors.
        width: number of members; a single one shares nothing.
    """

    def __init__(self, trace: Trace, kept: Sequence[Sequence[Tensor]], width: int) -> None:
        first = len(trace.trained)
        self._shared = frozenset(
            first + index
            for index, (name, parts) in enumerate(zip(trace.kept, kept, strict=True))
            if width > 1 and name in trace.unchanged and all(part is parts[0] for part in parts)
        )
        end = len(trace.inputs) - len(trace.constants)
        self._with_batch = self._shared | set(range(end - trace.batch, end))
        # Batches may be equal in one step and differ in another, and each case has a program of its own.
        self._with_all = self._with_batch | ({STREAM} if any(map(is_random, trace.graph.nodes)) else set())
        more = once_of(trace, self._with_all) - once_of(trace, self._shared)
        self._batch_matters = width > 1 and any(map(is_heavy, more))
        """Whether heavy operations depend only on the batch, random numbers and tensors in common. (Operations that
        need no random numbers are mostly in the prefix already.)"""

    def of(self, batch: Sequence[Sequence[Tensor]], streams: Sequence[Tensor]) -> frozenset[int]:
        """Return the indices of the inputs in common in a step on this batch, with :data:`STREAM` if the members'
        streams are equal.

        Args:
            batch: for each tensor of the batch, those of all members.
            streams: the members' states of torch's generator.
        """
        if not self._batch_matters or not all(map(_is_one, batch)):
            return self._shared
        return self._with_all if _is_one(streams) else self._with_batch


def _is_one(tensors: Sequence[Tensor]) -> bool:
    return all(same_bytes(tensor, tensors[0]) for tensor in tensors[1:])


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors have the same bytes. False for other kinds of tensors."""
    return a is b or (a.shape == b.shape and leaves.same_bytes(a.reshape(-1), b.reshape(-1)))
