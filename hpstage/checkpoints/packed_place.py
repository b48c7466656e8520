"""PackedPlace: the files of a small checkpoint, as one entry of a pack."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from hpstage.checkpoints import format as files
from hpstage.errors import CheckpointCorrupt

_NAMES = {files.TENSORS, files.STRUCTURE, files.MANIFEST}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, bytes]).decode


class PackedPlace:
    """The place of a checkpoint's files in memory.

    Args:
        location: location of the entry, for messages.
        content: files of the entry; more may be added.
    """

    def __init__(self, location: str, content: Mapping[str, bytes] = {}) -> None:
        self._location = location
        self._files = dict(content)

    @classmethod
    def of(cls, location: str, entry: bytes) -> PackedPlace:
        """Return the place that an entry holds. Raises :class:`CheckpointCorrupt`."""
        try:
            content = _decode(entry)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointCorrupt(f"{location} holds no checkpoint: {error}") from error
        if content.keys() != _NAMES:  # each becomes a file name when unpacked
            raise CheckpointCorrupt(f"{location} contains files that do not belong to a checkpoint")
        return cls(location, content)

    def entry(self) -> bytes:
        return _encode(self._files)

    def copy_to(self, other: files.Place) -> None:
        for name, content in self._files.items():
            other.write(name, content)

    def where(self, name: str) -> str:
        return f"{self._location}/{name}"

    @contextmanager
    def create(self, name: str) -> Iterator[io.BytesIO]:
        with io.BytesIO() as file:
            yield file
            self._files[name] = file.getvalue()

    def open(self, name: str) -> _Reader:
        if name not in self._files:
            raise CheckpointCorrupt(f"{self._location} lacks {name}")
        return _Reader(self._files[name])

    def manifest(self) -> bytes:
        return self._files[files.MANIFEST]

    def write(self, name: str, content: bytes) -> None:
        self._files[name] = content


class _Reader(io.BytesIO):
    @property
    def size(self) -> int:
        return len(self.getbuffer())
