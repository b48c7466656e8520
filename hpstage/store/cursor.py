"""A reader's place in a journal, by which it is noticed that what was read is not what is there now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha1
from typing import NamedTuple

HASH_LENGTH = 16
"""Characters of a hash: 64 bits, which no accident meets. Against people who forge records it is no protection."""


class Cursor(NamedTuple):
    """After ``position`` records, whose chain of hashes ends in ``hash``.

    Each record's hash is that of the hash before it and the record, so that equal hashes mean equal logs up to there.
    SHA-1, since that is what a script within Redis has.
    """

    position: int = 0
    hash: bytes = b""

    def after(self, records: Iterable[bytes]) -> Cursor:
        """The place after these records, which follow on this one."""
        hashes = list(chain(self.hash, records))
        return Cursor(self.position + len(hashes), hashes[-1]) if hashes else self


def chain(hash: bytes, records: Iterable[bytes]) -> Iterator[bytes]:
    """The hash of each of the records, which follow on one whose hash is ``hash``."""
    for record in records:
        hash = sha1(hash + record, usedforsecurity=False).hexdigest()[:HASH_LENGTH].encode()
        yield hash
