"""Tells which tensors and arrays something has changed, and puts small ones back.

Version counters do not tell: what BatchNorm writes to its running statistics is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpstage.checkpoints.state_tree import digest
from hpstage.training.kinds import Marked, duplicate, fill_any, nbytes, torch
from hpstage.training.survey import Record, Survey

_COPIED = 64 << 20
"""Bytes in all up to which copies are made. The rest is known by checksums."""


class Guard:
    """Knows values as they are when it is made.

    Args:
        records: of tensors and arrays. Those that hold a sample are compared by themselves.
        pristine: what is known of these from before, copies among it.
    """

    def __init__(self, records: Sequence[Record], pristine: Survey) -> None:
        self._records = records
        for record in records:
            if record.content.sample is not None:
                before = pristine.records[id(record.obj)].content
                same = record.content.same(before)
                record.content = before if same else Marked(record.obj, sampled=True, copied=True)
        plain = [record for record in records if record.content.sample is None]
        copied = sum(nbytes(record.obj) for record in plain) <= _COPIED
        self._copies = {record.path: duplicate(record.obj) for record in plain} if copied else {}
        self._sums = {record.path: _checksum(record.obj) for record in plain}

    def changed(self) -> Iterator[Record]:
        for record in self._records:
            known = self._sums.get(record.path)
            if record.changed() if known is None else _checksum(record.obj) != known:
                yield record

    def put_back(self, record: Record) -> bool:
        """Whether it could be."""
        copy = self._copies.get(record.path, record.content.copy)
        if copy is None:
            return False
        fill_any(record.obj, copy)
        return True


def _checksum(obj: Any) -> object:
    library = torch()
    if library is None or not isinstance(obj, library.Tensor) or obj.device.type == "cpu":
        return digest(obj)
    # Where the tensor is: to fetch it would take longer than to read it.
    bits = obj.detach().contiguous().view(library.uint8).to(library.int64)
    return int(bits.sum()), int(
        (bits * (library.arange(bits.numel(), device=bits.device).view(bits.shape) % 8191)).sum()
    )
