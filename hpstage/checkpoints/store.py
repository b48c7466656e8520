"""The CheckpointStore port: stores states by key. Which ones may be evicted: :mod:`hpstage.checkpoints.evictable`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec

from hpstage.checkpoints.stage_log import StageLog
from hpstage.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from hpstage.plan.facts import Kept, Part, StateKey

_KEY = re.compile(r"[0-9A-Za-z_-]{2,128}")
_PART = "part-"


def is_key(name: str) -> bool:
    """Whether a name found on a storage can be a state key. No key begins with a dot."""
    return _KEY.fullmatch(name) is not None


def is_part(key: StateKey) -> bool:
    """Whether this is the key of leaves that several states have in common."""
    return key.startswith(_PART)


def part_key(digest: str) -> StateKey:
    return StateKey(_PART + digest)


def key_path(key: StateKey) -> str:
    """Return ``<key[:2]>/<key>``, the path of a checkpoint within its store. Raises :class:`UsageError`.

    The key becomes a path, which must not leave the store.
    """
    if not is_key(key):
        raise UsageError(f"{key!r} is not a state key: 2 to 128 letters, digits, '_' and '-'")
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
    """Marks of the leaves (:func:`~hpstage.checkpoints.state_tree.marks_of`)."""
    parts: tuple[Part, ...] = ()
    """Parts: checkpoints that hold the leaves which are not in the files, since several states share them."""
    rest: int | None = None
    """Bytes of the files if there are parts; ``bytes`` is what they would have without parts."""

    @property
    def own(self) -> int:
        """Bytes of the files."""
        return self.as_kept().own

    def as_kept(self) -> Kept:
        return Kept(self.key, self.bytes, self.digest, self.marks, self.parts, self.rest)


class Usage(msgspec.Struct, frozen=True):
    """Storage used by checkpoints, as far as it lists sizes; no content is read."""

    checkpoints: int
    bytes: int
    """Bytes of all checkpoints, including their manifests."""
    unpublished: int = 0
    """Bytes not yet published by writers, alive or dead; ``sweep`` removes those of dead ones."""


class CheckpointStore(ABC):
    """Stores states by key, on storage that all workers can reach.

    Obligations. *Atomic*: a reader sees a complete checkpoint or :class:`CheckpointMissing`. *Verified*: ``load``
    checks key, workload and checksums and raises :class:`CheckpointCorrupt`; stored content is never executed.
    *Content-addressed*: saving a key that is already saved changes nothing (equal keys mean equal training). *Clean*:
    a failure leaves no partial checkpoint and no temporary file. *Clear*: full storage raises :class:`CheckpointFull`.
    ``CheckpointMissing`` and ``CheckpointCorrupt`` mean that a state is lost; they are raised only if the storage was
    reached. Other failures, such as a missing mount or an outage, raise :class:`CheckpointUnreachable`; callers wait
    and try again. *Portable*: instances can be pickled and sent to workers, and are safe to use from several processes.

    A state is a tree of dicts, lists, tuples, scalars, strings, bytes, ``torch.Tensor`` and ``numpy.ndarray``; it is
    restored with the same types, shapes, dtypes and values. Anything else raises :class:`StateError` with the path to
    it.
    """

    beside_training: bool = False
    """Whether states may be saved and loaded in a thread while training continues. The store must then draw no numbers
    from Python's, NumPy's or torch's global generators, as drivers of object stores do before a retry."""

    @abstractmethod
    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        """Keep a state. The result describes ``state`` even if another one was kept under the key before, so that a
        difference between them is detected."""

    def meet(self, state: object) -> None:  # noqa: B027  # may be left out
        """Record a state that is not saved: leaves that later states of this process have as well may then be stored
        once."""

    @abstractmethod
    def load(self, key: StateKey) -> object:
        """Return the state, on the CPU, in newly allocated memory."""

    @abstractmethod
    def manifest(self, key: StateKey) -> Manifest:
        """Read and check the manifest alone. Raises as ``load`` does."""

    def location(self, key: StateKey) -> str:
        """Return the path or URL of a checkpoint, whether it is kept or not, for people and other programs; without
        credentials."""
        return f"{self!r}: {key_path(key)}"

    def unpack(self, key: StateKey) -> str:
        """Return :meth:`location`, for people and other programs, after giving the checkpoint files of its own there if
        it shares a file with others. Raises the errors of :meth:`load`, also if the place cannot be written to."""
        return self.location(key)

    def verify(self, key: StateKey) -> None:
        """Check that a checkpoint is complete and sound. Raises as ``load`` does; should not build the state."""
        self.load(key)

    @abstractmethod
    def delete(self, key: StateKey) -> None:
        """Delete a checkpoint; it disappears at once. Deleting a missing one is not an error."""

    @abstractmethod
    def keys(self) -> Iterator[StateKey]:
        """Return the keys of all checkpoints, sound or not."""

    def save_log(self, key: StateKey, log: StageLog) -> None:  # noqa: B027  # may be left out
        """Keep the log of the steps before a state; it replaces an earlier log. A reader sees the whole log, the
        earlier one, or :class:`CheckpointCorrupt`. By default, logs are not kept."""

    def load_log(self, key: StateKey) -> StageLog:
        """Return the log of the steps before a state. Raises as :meth:`load` does."""
        raise CheckpointMissing(f"no log of state {key} in {self!r}")

    def logs(self) -> dict[StateKey, int]:
        """Return the bytes of each log, by key, without reading any."""
        return {}

    def delete_log(self, key: StateKey) -> None:  # noqa: B027  # may be left out
        """Delete a log. Deleting a missing one is not an error."""

    def sizes(self) -> dict[StateKey, int]:
        """Return the bytes that each checkpoint takes, sound or not, without reading contents.

        For storage that lists no sizes, the default implementation reads the manifests, and counts 0 for corrupt ones.
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

    def parts(self) -> dict[StateKey, int]:
        """Return the bytes of each part: leaves that several states have in common. They are deleted as states are; a
        state whose part is gone is corrupt. By default, states have nothing in common."""
        return {}

    def usage(self) -> Usage:
        """Return the total storage used by all checkpoints; costs as much as :meth:`sizes`."""
        sizes = self.sizes()
        return Usage(checkpoints=len(sizes), bytes=sum(sizes.values()))

    def sweep(self) -> int:
        """Remove the remains of writers that died, but never those of a living one; return how many were removed."""
        return 0

    def identity(self) -> str:
        """Return a string that identifies the place, regardless of the path or host from which it is accessed.

        Once an instance has returned it, the instance and its copies in other processes are bound to that place:
        nothing is saved to, or reported missing from, another one. Empty, as here, if the store cannot identify its
        place.
        """
        return ""

    def prove(self) -> None:
        """Check, by one small read, that the place is still the one named by ``identity``, if that was called.

        Raises :class:`CheckpointUnreachable` if the place is a different one or missing.
        """
        return

    def check(self) -> None:
        """Check that checkpoints can be written here, and leave nothing behind. Raises :class:`CheckpointError`."""
        return
