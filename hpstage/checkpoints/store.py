"""The CheckpointStore port: states kept under their keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec

from hpstage.events import Kept, StateKey


class Manifest(msgspec.Struct, frozen=True):
    """Identity and integrity of one checkpoint; written last, so that its presence means completeness."""

    format: int
    key: StateKey
    step: int
    parent: StateKey | None
    workload: str
    digest: str
    """Digest of the content: names, dtypes, shapes, bytes and structure; equal states have equal digests."""
    files: dict[str, str]
    """xxh3_128 of each file's bytes, by name."""
    bytes: int


class CheckpointStore(ABC):
    """Keeps states under their keys, on storage that all workers reach.

    Obligations. *Atomic*: a reader sees a complete checkpoint or :class:`CheckpointMissing`. *Verified*:
    ``load`` checks key, workload and checksums and raises :class:`CheckpointCorrupt`; nothing that was stored
    is ever executed. *Content-addressed*: saving a key that is already kept changes nothing (equal keys mean
    equal training). *Failing clean*: a full or read-only disk raises :class:`CheckpointError`, leaves no
    partial checkpoint and no temporary file behind. *Portable*: instances can be pickled and sent to workers;
    safe to use from several processes.

    A state is a tree of dicts, lists, tuples, scalars, strings, bytes, ``torch.Tensor`` and
    ``numpy.ndarray``; it comes back with the same types, shapes, dtypes and values. Anything else raises
    :class:`StateError` with the path to it.
    """

    @abstractmethod
    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept: ...

    @abstractmethod
    def load(self, key: StateKey) -> object:
        """The state, on the CPU, in memory of its own."""

    @abstractmethod
    def manifest(self, key: StateKey) -> Manifest:
        """Read and check the manifest alone. Raises as ``load`` does."""

    @abstractmethod
    def delete(self, key: StateKey) -> None:
        """Forget a checkpoint; it disappears at once. Deleting a missing one is no error."""

    @abstractmethod
    def keys(self) -> Iterator[StateKey]: ...
