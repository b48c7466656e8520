"""Detection of changes to tensors and arrays, and restoration of small ones.

Version counters cannot detect them: BatchNorm's writes to its running statistics are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from hpstage.checkpoints import leaves
from hpstage.training.capture.kind import torch
from hpstage.training.capture.survey import Record, Survey, plainly
from hpstage.training.capture.values import Marked, duplicate, fill, is_tensor, nbytes, storable

_COPIED = 64 << 20
"""Total bytes up to which copies are made. Beyond that, only checksums are kept."""


class Guard:
    """Remembers the values of tensors and arrays as of its creation.

    Args:
        records: records of tensors and arrays. A record that holds a sample is compared by it.
        pristine: an earlier survey of these objects, with copies of some.
    """

    def __init__(self, records: Sequence[Record], pristine: Survey) -> None:
        self._records = records
        # By id: an object that was known before keeps its earlier path, which another object may have by now.
        self._copies: dict[int, Any] = {}
        self._sums: dict[int, object] = {}
        with plainly():
            plain = []
            for record in records:
                if record.content.sample is None:
                    plain.append((id(record.obj), storable(record.obj)))
                    continue
                known = pristine.records.get(id(record.obj))
                if known is not None and record.content.same(known.content):
                    self._copies[id(record.obj)] = known.content.copy
                else:
                    self._copies[id(record.obj)] = Marked(record.obj, copied=True).copy
            self._sums = {key: _checksum(values) for key, values in plain}
            if sum(nbytes(values) for _, values in plain) <= _COPIED:
                self._copies |= {key: duplicate(values) for key, values in plain}

    def changed(self) -> Iterator[Record]:
        with plainly():
            for record in self._records:
                known = self._sums.get(id(record.obj))
                if record.changed() if known is None else _checksum(storable(record.obj)) != known:
                    yield record

    def put_back(self, record: Record) -> bool:
        """Restore the values of ``record``. Return whether that was possible."""
        copy = self._copies.get(id(record.obj))
        if copy is None:
            return False
        with plainly():
            fill(record.obj, copy)
        return True


def _checksum(values: Any) -> object:
    if not is_tensor(values) or values.device.type == "cpu":
        leaf = leaves.describe("", values)
        assert isinstance(leaf, leaves.Leaf)
        return xxhash.xxh3_128_digest(leaves.content(leaf, values))
    return sums(values)


def sums(values: Any) -> tuple[int, int]:
    """Return two sums over a tensor's bytes, computed on its device: copying the bytes to the CPU would take longer."""
    library = torch()
    bits = values.detach().contiguous().view(-1).view(library.uint8).to(library.int64)
    weights = library.arange(bits.numel(), device=bits.device) % 8191
    return int(bits.sum()), int((bits * weights).sum())
