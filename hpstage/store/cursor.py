"""A reader's position in a journal, used to detect that records already read have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha1
from typing import NamedTuple

HASH_LENGTH = 16
"""Characters of a hash: 64 bits, enough against accidental collisions, but no protection against forged records."""


class Cursor(NamedTuple):
    """The position after ``position`` records, whose chain of hashes ends in ``hash``.

    Each record's hash covers the hash before it and the record, so that equal hashes mean equal logs up to that
    position. SHA-1, since it is available to scripts in Redis.
    """

    position: int = 0
    hash: bytes = b""

    def after(self, records: Iterable[bytes]) -> Cursor:
        """Return the cursor after these records, which follow this cursor."""
        hashes = list(chain(self.hash, records))
        return Cursor(self.position + len(hashes), hashes[-1]) if hashes else self


def chain(hash: bytes, records: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the hash of each of the records, which follow a record whose hash is ``hash``."""
    for record in records:
        hash = sha1(hash + record, usedforsecurity=False).hexdigest()[:HASH_LENGTH].encode()
        yield hash
