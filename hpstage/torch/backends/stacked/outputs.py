"""What frozen operations have given on the batches of earlier steps: a second epoch, or another trial, has it at once.

Values are kept with a digest of the batch that they were computed of. Together, those of a kind of step take an eighth
of what the frozen tensors take that they depend on, or 32 MiB; the last eight kinds are kept. (Nautilus, SIGMOD 2022,
keeps outputs of frozen layers on the disk.)
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpstage.torch.backends.stacked.planning import ALIGNMENT, STREAM
from hpstage.torch.backends.stacked.program import Program
from hpstage.torch.backends.stacked.tracing import Trace
from hpstage.training.identity import accelerators

Values = tuple[Tensor, ...]

_LEAST = 32 << 20
_SHARE = 8
_KINDS = 8
_TIMED = 8
"""The first of a kind's computations are timed, for which a GPU has to be waited for."""


class Ahead(NamedTuple):
    """The values of a prefix; whether they were there, and the seconds in which they are computed."""

    values: Values = ()
    found: bool = False
    seconds: float = 0.0


class Outputs:
    """The values of the prefixes of one trainable's programs."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Trace, frozenset[int]], _Kept] = {}
        self.found = self.computed = 0
        """Steps whose values were there, and those that computed them."""

    def of(self, trace: Trace, program: Program, inputs: Sequence[Tensor]) -> Ahead:
        """Return what ``program.prefix`` gives on these inputs, whatever the number of members."""
        prefix = program.prefix
        if prefix is None:
            return Ahead()
        frozen = [inputs[index] for index in prefix.frozen]
        key = trace, program.shared - {STREAM}  # no random number is in them
        kept = self._kept.pop(key, None)
        if kept is None or any(mine is not its for mine, its in zip(kept.frozen, frozen, strict=True)):
            kept = _Kept(frozen)
        self._kept[key] = kept  # the last one used at the end
        if len(self._kept) > _KINDS:
            del self._kept[next(iter(self._kept))]
        before = kept.computed
        values = kept.of([inputs[index] for index in prefix.batch], lambda: prefix.run(inputs))
        found = before == kept.computed
        self.computed += not found
        self.found += found
        return Ahead(values, found, kept.seconds)


class _Kept:
    """Values by the digest of a batch: those that came first, since batches come again in the same order."""

    def __init__(self, frozen: list[Tensor]) -> None:
        self.frozen = frozen
        self.computed = 0
        self.seconds = math.inf
        """Of the fastest computation that was timed: the first ones fetch memory."""
        self._budget = max(_LEAST, sum(tensor.nbytes for tensor in frozen) // _SHARE)
        self._values: dict[bytes, Values] = {}
        self._nbytes = 0
        self._missed = 0  # since a batch last came again

    def of(self, batch: list[Tensor], compute: Callable[[], Values]) -> Values:
        key = _digest(batch)
        values = None if key is None else self._values.get(key)
        if values is not None:
            self._missed = 0
            return values
        values = self._timed(compute, batch[0].device) if self.computed < _TIMED else compute()
        self.computed += 1
        self._missed += 1
        if key is None or not _own_memory(values, [*self.frozen, *batch]):
            return values
        storages = {value.untyped_storage()._cdata: value.untyped_storage() for value in values}
        nbytes = sum(storage.nbytes() for storage in storages.values())
        if self._nbytes + nbytes > self._budget and self._missed > 2 * len(self._values):
            self._values.clear()  # none of them came again
            self._nbytes = 0
        if self._nbytes + nbytes <= self._budget:
            self._values[key] = values
            self._nbytes += nbytes
        return values

    def _timed(self, compute: Callable[[], Values], device: torch.device) -> Values:
        accelerators.synchronize(device)
        began = time.perf_counter()
        values = compute()
        accelerators.synchronize(device)
        self.seconds = min(self.seconds, time.perf_counter() - began)
        return values


def _own_memory(values: Values, others: list[Tensor]) -> bool:
    """Return whether no value is in memory of others, which may change: a batch is perhaps a part of the data."""
    taken = {other.untyped_storage()._cdata for other in others}
    return all(value.untyped_storage()._cdata not in taken for value in values)


def _digest(batch: list[Tensor]) -> bytes | None:
    """Return a digest of all of a batch that a kernel may depend on; None of tensors that are not plain."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in batch:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        place = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT
        digest.update(repr(place).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.digest()
