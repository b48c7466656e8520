"""Cached outputs of the prefix of a step on earlier samples, for later epochs, which draw other batches of them.

That a sample gives the same bits wherever it lies in a batch, and whatever the others are, follows from the operations
(:mod:`hpstage.torch.backends.stacked.samples`) up to how kernels round, and that is tried out on the first batch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpstage.errors import StateError
from hpstage.torch.backends.stacked.frozen import same_bytes
from hpstage.torch.backends.stacked.planning import ALIGNMENT
from hpstage.torch.backends.stacked.prefix import Samples

Values = tuple[Tensor, ...]

_OBJECT = 512
"""Overhead of a tensor in bytes."""


class SampleStore:
    """The values of a prefix by sample.

    Args:
        samples: where the values have their samples.
        run: returns the values on a batch.
    """

    def __init__(self, samples: Samples, run: Callable[[Sequence[Tensor]], Values]) -> None:
        self._samples, self._run = samples, run
        self._parts: dict[bytes, Values] = {}
        self._forms: list[Tensor] | None = None  # of the values on a batch
        self.nbytes = 0

    @property
    def is_tried(self) -> bool:
        """Whether samples are known to be cacheable."""
        return self._forms is not None

    def keys_of(self, batch: Sequence[Tensor]) -> list[bytes] | None:
        return digests(batch, self._samples.number)

    def find(self, keys: Sequence[bytes]) -> Values | None:
        """Return the values on the batch of these samples, if all of them are here."""
        if self._forms is None or not all(key in self._parts for key in keys):
            return None
        columns = zip(*(self._parts[key] for key in keys), strict=True)
        return tuple(map(self._joined, columns, self._forms, self._samples.rows))

    def add(self, keys: Sequence[bytes], batch: Sequence[Tensor], values: Values) -> bool:
        """Keep the values on a batch by sample; return whether that is known to be exact.

        Raises:
            StateError: a sample that is here has given other bits.
        """
        if self._forms is None:
            if len({*keys}) < len(keys):
                return True  # equal samples show nothing: that it is exact is tried out on the next batch
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
                    "frozen layers have given other bits for a sample than in an earlier batch: their kernels do not "
                    "round it the same in each place of a batch. Give numerics = 'eager'"
                )
        return True

    def _joined(self, parts: Sequence[Tensor], form: Tensor, rows: tuple[int, int]) -> Tensor:
        made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=parts[0].device)
        return torch.cat([*parts], rows[0], out=made)

    def _is_exact(self, batch: Sequence[Tensor], values: Values) -> bool:
        """Return whether samples give the same bits at other positions, and among other samples."""
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
    """Return whether a new tensor can have the same form: no two entries are in one place, and its memory is
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
    """Return a digest of all of each sample that a kernel may depend on; None of tensors that are not plain."""
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
