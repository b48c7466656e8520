"""The CheckpointStore port: states kept under their keys."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec

from hpstage.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from hpstage.plan.facts import Kept, StateKey

_KEY = re.compile(r"[0-9A-Za-z_-]{2,128}")


def is_key(name: str) -> bool:
    """Whether a name found on a storage can be a state key. No key begins with a dot."""
    return _KEY.fullmatch(name) is not None


def key_path(key: StateKey) -> str:
    """``<key[:2]>/<key>``, where a checkpoint lies below its store. Raises :class:`UsageError`.

    The key becomes a path: it must not lead out of the store.
    """
    if not is_key(key):
        raise UsageError(f"{key!r} is no state key: 2 to 128 letters, digits, '_' and '-'")
    return f"{key[:2]}/{key}"


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
    marks: str = ""
    """Of the leaves (:func:`~hpstage.checkpoints.state_tree.marks_of`)."""

    def as_kept(self) -> Kept:
        return Kept(key=self.key, bytes=self.bytes, digest=self.digest, marks=self.marks)


class Usage(msgspec.Struct, frozen=True):
    """What checkpoints take on their storage, as far as it lists sizes; no content is read."""

    checkpoints: int
    bytes: int
    """Of all checkpoints, their manifests included."""
    unpublished: int = 0
    """Bytes that writers, living or dead, have not published; ``sweep`` frees what the dead ones left."""


class CheckpointStore(ABC):
    """Keeps states under their keys, on storage that all workers reach.

    Obligations. *Atomic*: a reader sees a complete checkpoint or :class:`CheckpointMissing`. *Verified*:
    ``load`` checks key, workload and checksums and raises :class:`CheckpointCorrupt`; nothing that was stored
    is ever executed. *Content-addressed*: saving a key that is already kept changes nothing (equal keys mean
    equal training). *Failing clean*: what fails leaves no partial checkpoint and no temporary file behind.
    *Failing clear*: :class:`CheckpointFull` where other checkpoints have to go first; ``CheckpointMissing`` and
    ``CheckpointCorrupt`` only of a place that was reached, since they write a state off; all else, as a mount that
    is missing or an outage, is :class:`CheckpointUnreachable`, which is waited for. *Portable*: instances can be
    pickled and sent to workers; safe to use from several processes.

    A state is a tree of dicts, lists, tuples, scalars, strings, bytes, ``torch.Tensor`` and
    ``numpy.ndarray``; it comes back with the same types, shapes, dtypes and values. Anything else raises
    :class:`StateError` with the path to it.
    """

    @abstractmethod
    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        """Keep a state. What is returned tells of ``state``, also where another was kept under the key before: so that
        it is noticed if they differ."""

    @abstractmethod
    def load(self, key: StateKey) -> object:
        """The state, on the CPU, in memory of its own."""

    @abstractmethod
    def manifest(self, key: StateKey) -> Manifest:
        """Read and check the manifest alone. Raises as ``load`` does."""

    def verify(self, key: StateKey) -> None:
        """See that a checkpoint is whole and sound. Raises as ``load`` does; better without building the state."""
        self.load(key)

    @abstractmethod
    def delete(self, key: StateKey) -> None:
        """Forget a checkpoint; it disappears at once. Deleting a missing one is no error."""

    @abstractmethod
    def keys(self) -> Iterator[StateKey]:
        """Keys of all checkpoints, sound or not."""

    def sizes(self) -> dict[StateKey, int]:
        """Bytes that each checkpoint takes, sound or not, without reading contents.

        As written here, for a storage that lists no sizes, it reads the manifests, and counts 0 for spoilt ones.
        """
        found: dict[StateKey, int] = {}
        for key in self.keys():
            try:
                found[key] = self.manifest(key).bytes
            except CheckpointMissing:  # deleted since it was listed
                continue
            except CheckpointCorrupt:
                found[key] = 0
        return found

    def usage(self) -> Usage:
        """What all checkpoints take together; costs as :meth:`sizes`."""
        sizes = self.sizes()
        return Usage(checkpoints=len(sizes), bytes=sum(sizes.values()))

    def sweep(self) -> int:
        """Remove what writers that died have left, never what a living one writes; how many rests there were."""
        return 0

    def identity(self) -> str:
        """Names the place: equal for all who keep checkpoints there, by whatever path or host they come.

        An instance that has told it once stands for that place, and its copies do in other processes: nothing is
        saved in another, nor missed in another. An empty text, as here, is a store that cannot tell.
        """
        return ""

    def prove(self) -> None:
        """See, by one small read, that the place is here the one that ``identity`` has named, if it has.

        Raises :class:`CheckpointUnreachable`: it is another, or not there.
        """
        return

    def check(self) -> None:
        """Try whether checkpoints can be written here, and leave nothing behind. Raises :class:`CheckpointError`."""
        return
