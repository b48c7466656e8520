"""Cached results of a step's prefix on earlier batches, for later epochs and other trials.

Values are cached by sample if that is exact and all samples fit into the budget, else by batch, under a digest of the
inputs. The budget for one kind of step is the largest of an eighth of the bytes of its frozen tensors, 64 MiB and, on
the CPU, a 64th of a worker's share of the host's memory. The last eight kinds are kept, as long as their frozen tensors
take at most twice the bytes of those of the last kind. (Nautilus, SIGMOD 2022, keeps outputs of frozen layers on the
disk.)

A sample must give the same bits at each position in a batch, among any other samples. This follows from the operations
(:mod:`hpstage.torch.backends.stacked.samples`), except for the rounding of kernels, which is tried out on the first
batch.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpstage.checkpoints.host_memory import HostMemory
from hpstage.errors import StateError
from hpstage.torch.backends.stacked.frozen import same_bytes
from hpstage.torch.backends.stacked.planning import ALIGNMENT
from hpstage.torch.backends.stacked.prefix import Prefix, Samples
from hpstage.training.identity import accelerators

_LEAST = 64 << 20
_SHARE = 8
_OF_HOST = 64
_KINDS, _BACKBONES = 8, 2
_OF_SAMPLE = 5e-6
"""Seconds for looking up a sample's cached values. Values that are computed faster are cached by batch."""
_TIMED = 8
"""Number of computations of a kind that are timed, each of which waits for the GPU."""
_OBJECT = 512
"""Overhead of a tensor in bytes."""

Values = tuple[Tensor, ...]


class Ahead(NamedTuple):
    """The values of a prefix, whether they were cached, and the seconds that computing them takes."""

    values: Values
    found: bool
    seconds: float


class Outputs:
    """The cached values of the prefixes of one trainable's steps."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Prefix, tuple[int, ...]], _Kept] = {}
        self.found = self.computed = 0
        """Number of batches whose values were cached, and of batches whose values were computed."""
        self.seconds = 0.0
        """Estimated seconds spent on computing values."""

    def of(
        self, prefix: Prefix, frozen: Sequence[Sequence[Tensor]], batches: Sequence[Sequence[Tensor]]
    ) -> list[Ahead]:
        """Return the values of a prefix on each member's batch. Those of equal batches are computed once.

        Args:
            frozen: each member's tensors of :attr:`Prefix.frozen`, where equal tensors are the same object.
            batches: each member's tensors of :attr:`Prefix.batch`.
        """
        of_step: dict[object, Ahead] = {}
        found = []
        for tensors, batch in zip(frozen, batches, strict=True):
            kept = self._of(prefix, tensors, batch)
            digest = _digest(batch)
            key = None if digest is None else (kept, digest)
            if key in of_step:
                found.append(of_step[key]._replace(found=True))
                continue
            before = kept.computed
            values = kept.of(digest, batch)
            there = before == kept.computed
            self.computed += not there
            self.found += there
            self.seconds += 0.0 if there else kept.seconds
            found.append(Ahead(values, there, kept.seconds))
            if key is not None:
                of_step[key] = found[-1]
        return found

    def _of(self, prefix: Prefix, frozen: Sequence[Tensor], batch: Sequence[Tensor]) -> _Kept:
        key = prefix, tuple(map(id, frozen))
        known = self._kept.pop(key, None)
        kept = self._kept[key] = known or _Kept(prefix, frozen, batch)  # the last one used at the end
        if known is None:
            most = _BACKBONES * max(_LEAST, kept.nbytes_frozen)
            while len(self._kept) > _KINDS or (len(self._kept) > 1 and self._nbytes_frozen() > most):
                del self._kept[next(iter(self._kept))]
        return kept

    def _nbytes_frozen(self) -> int:
        distinct = {id(tensor): tensor.nbytes for kept in self._kept.values() for tensor in kept.frozen}
        return sum(distinct.values())


class _Kept:
    """The cached values of one prefix and its frozen tensors. When the budget is spent, the first values stay, since
    batches come again in the same order."""

    def __init__(self, prefix: Prefix, frozen: Sequence[Tensor], batch: Sequence[Tensor]) -> None:
        self.frozen = frozen  # held, since their ids identify these values
        self.nbytes_frozen = sum(tensor.nbytes for tensor in frozen)
        self.computed = 0
        self.seconds = math.inf
        """Seconds of the fastest timed computation; the first ones also allocate memory."""
        on_host = all(tensor.device.type == "cpu" for tensor in (*frozen, *batch))
        self._budget = max(
            _LEAST,
            self.nbytes_frozen // _SHARE,
            HostMemory().part(_OF_HOST, 0) if on_host else 0,
        )
        self._prefix = prefix
        self._by_sample = None if prefix.samples is None else SampleStore(prefix.samples, self._run)
        self._last: tuple[bytes, Values] | None = None  # for siblings at the same step, even if the budget is spent
        self._values: dict[bytes, Values] = {}
        self._nbytes = 0
        self._missed = 0  # number of batches computed since one came again

    def of(self, key: bytes | None, batch: Sequence[Tensor]) -> Values:
        if key is not None and key in self._values:
            self._missed = 0
            return self._values[key]
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        of_samples, values = None, None
        if self._by_sample is not None and (of_samples := self._by_sample.keys_of(batch)) is not None:
            values = self._by_sample.find(of_samples)
        if values is None:
            values = self._timed(batch) if self.computed < _TIMED else self._run(batch)
            self.computed += 1
            self._missed += 1
            if not self._keep(of_samples, batch, values):
                self._by_sample = None
        if key is not None and _own_memory(values, [*self.frozen, *batch]):
            if self._by_sample is None or not self._by_sample.is_tried:
                self._keep_batch(key, values)
            self._last = key, values
        return values

    def _run(self, batch: Sequence[Tensor]) -> Values:
        return self._prefix.run(*self.frozen, *batch)

    def _keep(self, keys: Sequence[bytes] | None, batch: Sequence[Tensor], values: Values) -> bool:
        """Cache values by sample; return whether to do so for later batches."""
        if self._by_sample is None or keys is None or self.seconds < len(keys) * _OF_SAMPLE:
            return False
        return self._by_sample.add(keys, batch, values) and self._by_sample.nbytes + self._nbytes <= self._budget

    def _keep_batch(self, key: bytes, values: Values) -> None:
        storages = {value.untyped_storage()._cdata: value.untyped_storage() for value in values}
        nbytes = sum(storage.nbytes() for storage in storages.values())
        if self._nbytes + nbytes > self._budget and self._missed > 2 * len(self._values):
            self._values.clear()  # none of them came again
            self._nbytes = 0
        if self._nbytes + nbytes <= self._budget:
            self._values[key] = values
            self._nbytes += nbytes

    def _timed(self, batch: Sequence[Tensor]) -> Values:
        device = batch[0].device
        accelerators.synchronize(device)
        began = time.perf_counter()
        values = self._run(batch)
        accelerators.synchronize(device)
        self.seconds = min(self.seconds, time.perf_counter() - began)
        return values


def _own_memory(values: Values, others: Sequence[Tensor]) -> bool:
    """Return whether no value shares memory with other tensors, which may change: a batch may be a part of the data."""
    taken = {other.untyped_storage()._cdata for other in others}
    return all(value.untyped_storage()._cdata not in taken for value in values)


def _digest(batch: Sequence[Tensor]) -> bytes | None:
    """Return a digest of everything in a batch that a kernel may depend on; None if its tensors are not plain."""
    found = digests([tensor.unsqueeze(0) for tensor in batch], 1)
    return None if found is None else found[0]


class SampleStore:
    """The cached values of a prefix, by sample.

    Args:
        samples: the rows of each sample in the values.
        run: returns the values on a batch.
    """

    def __init__(self, samples: Samples, run: Callable[[Sequence[Tensor]], Values]) -> None:
        self._samples, self._run = samples, run
        self._parts: dict[bytes, Values] = {}
        self._forms: list[Tensor] | None = None  # shapes and strides of the values on a batch
        self.nbytes = 0

    @property
    def is_tried(self) -> bool:
        """Whether samples are known to be cacheable."""
        return self._forms is not None

    def keys_of(self, batch: Sequence[Tensor]) -> list[bytes] | None:
        return digests(batch, self._samples.number)

    def find(self, keys: Sequence[bytes]) -> Values | None:
        """Return the values on the batch of these samples, if all samples are cached."""
        if self._forms is None or not all(key in self._parts for key in keys):
            return None
        columns = zip(*(self._parts[key] for key in keys), strict=True)
        return tuple(map(self._joined, columns, self._forms, self._samples.rows))

    def add(self, keys: Sequence[bytes], batch: Sequence[Tensor], values: Values) -> bool:
        """Cache a batch's values by sample. Return ``False`` if a sample's bits depend on its batch.

        Raises:
            StateError: the values of a sample differ from the cached ones.
        """
        if self._forms is None:
            if len({*keys}) < len(keys):
                return True  # equal samples show nothing: the next batch shows whether it is exact
            if not all(map(_is_plain, values)) or not self._is_exact(batch, values):
                return False
            self._forms = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in values]
        for index, key in enumerate(keys):
            parts = tuple(
                value.narrow(rows.dim, index * rows.of_sample, rows.of_sample)
                for value, rows in zip(values, self._samples.rows, strict=True)
            )
            if key not in self._parts:
                self._parts[key] = kept = tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
                self.nbytes += sum(part.nbytes + _OBJECT for part in kept)
            elif not all(map(_same, parts, self._parts[key])):
                raise StateError(
                    "frozen layers have given other bits for a sample than in an earlier batch: their kernels round "
                    "differently at different positions in a batch. Give numerics = 'eager'"
                )
        return True

    def _joined(self, parts: Sequence[Tensor], form: Tensor, rows: tuple[int, int]) -> Tensor:
        made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=parts[0].device)
        return torch.cat([*parts], rows[0], out=made)

    def _is_exact(self, batch: Sequence[Tensor], values: Values) -> bool:
        """Return whether each sample gives the same bits in reordered and resampled batches."""
        count = self._samples.number
        draw = random.Random(0)
        orders = [[*range(1, count), 0], [*reversed(range(count))], [i if i % 2 else 0 for i in range(count)]]
        orders += [draw.choices(range(count), k=count) for _ in range(2)]
        for order in orders:
            moved = []
            for tensor in batch:
                other = torch.empty_like(tensor)
                moved.append(other.copy_(tensor[order]))
                if other.stride() != tensor.stride():
                    return False
            for before, after, (dim, of_sample) in zip(values, self._run(moved), self._samples.rows, strict=True):
                rows = [index * of_sample + row for index in order for row in range(of_sample)]
                if before.stride() != after.stride() or not _same(
                    before.index_select(dim, torch.tensor(rows, device=before.device)), after
                ):
                    return False
        return True


def _same(a: Tensor, b: Tensor) -> bool:
    return same_bytes(a.contiguous(), b.contiguous())


def _is_plain(value: Tensor) -> bool:
    """Return whether a new tensor can have the same form: no two entries share a memory location, and the memory is
    aligned."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return False
    end = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < end:
            return False
        end = max(end, stride * size)
    return value.data_ptr() % ALIGNMENT == 0


def digests(batch: Sequence[Tensor], samples: int) -> list[bytes] | None:
    """Return, for each sample, a digest of everything that a kernel may depend on; None if tensors are not plain."""
    base = hashlib.blake2b(digest_size=16)
    columns = []
    for tensor in batch:
        if (
            type(tensor) is not Tensor
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or not tensor.numel()
        ):
            return None
        place = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % ALIGNMENT
        base.update(repr(place).encode())
        columns.append(tensor.contiguous().reshape(samples, -1).view(torch.uint8).cpu().numpy())
    found = []
    for rows in zip(*columns, strict=True):
        digest = base.copy()
        for row in rows:
            digest.update(row.data)
        found.append(digest.digest())
    return found
