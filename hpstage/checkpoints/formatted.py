"""Base class of the checkpoint stores that use the files of :mod:`hpstage.checkpoints.format`."""

from __future__ import annotations

import errno
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from hpstage.checkpoints import format as files
from hpstage.checkpoints import lazy_copies, stage_log
from hpstage.checkpoints.sharing import (
    BEFORE_TRAINING,
    SMALLEST,
    Division,
    Sharing,
    is_divisible,
    key_of_part,
    name_in_part,
)
from hpstage.checkpoints.stage_log import StageLog
from hpstage.checkpoints.state_tree import FlatState, contents_of, flatten, summary_of
from hpstage.checkpoints.store import CheckpointStore, Manifest, Usage, is_part, key_path
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointFull, CheckpointMissing, CheckpointUnreachable
from hpstage.plan.facts import Kept, Part, StateKey

T = TypeVar("T")

# The folder of logs, each at the path that its state's checkpoint has in the store. No key begins with a dot.
LOGS = ".logs"
# The file that holds the place's name.
PLACE = ".place/name"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
# Messages of full object stores, whose drivers give no error number: MinIO (XMinioStorageFull,
# XMinioAdminBucketQuotaExceeded), Ceph (QuotaExceeded), WebDAV (507 Insufficient Storage). "Quota exceeded" alone may
# be a quota of requests.
_NO_ROOM_TEXT = re.compile(r"QuotaExceeded\b|StorageFull\b|InsufficientStorage|Insufficient Storage|No space left")

Write = Callable[..., Manifest]
"""Writes a state's files to a place, maybe with a ``token`` in the names; returns the manifest that completes them."""
Publish = Callable[[], bool]
"""Makes a written checkpoint visible at once, with its manifest; ``False`` if there is one already."""


class FormattedCheckpoints(CheckpointStore):
    """Writes checkpoints in the same order on every storage: first the files, under names that no other writer uses,
    then the manifest, atomically. Subclasses implement the storage. A state is saved only if it is not kept yet, and
    reported as missing only if the place is the right one."""

    workload: str
    _sharing: Sharing
    _name = ""
    """The place's name, set by the first call of :meth:`identity`. It never changes: a missing mount will return."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._root!r}, workload={self.workload!r})"

    def location(self, key: StateKey) -> str:
        return self._place(key).where("").rstrip("/")

    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        kept, flat = self._kept(key), flatten(state)
        if is_part(key):  # copied from another store
            kept = kept or self._save(key, flat, step, parent, None)
            self._sharing.place(Part(key, kept.bytes), [leaf.name for leaf in flat.leaves])
            return kept
        if kept is not None:
            digest, marks = summary_of(flat)
            return replace(kept, digest=digest, marks=marks)
        return self._save(key, flat, step, parent, self._divide(key, flat))

    def meet(self, state: object) -> None:
        flat = flatten(state)
        if is_divisible(flat):
            names = [*map(name_in_part, flat.leaves, contents_of(flat))]
            self._sharing.meet(BEFORE_TRAINING, names)
            self._sharing.hold(dict(zip(names, flat.values, strict=True)))

    def _divide(self, key: StateKey, flat: FlatState) -> Division | None:
        """Store leaves that an earlier state had, too, in a part, unless they are in one already. Return how the leaves
        are divided; ``None`` for a small state."""
        if not is_divisible(flat):
            return None
        contents = contents_of(flat)
        names = [*map(name_in_part, flat.leaves, contents)]
        for placed in set(self._sharing.placed(names).values()):
            if not self.has(placed.key):
                self._sharing.forget(placed.key)
        if new := self._sharing.to_place(key, flat, names):
            part = key_of_part(self.workload, new)
            kept = self._kept(part)
            if kept is None:
                shared = flatten({name: flat.values[index] for name, index in sorted(new.items())})
                kept = self._save(part, shared, 0, None, None)
            self._sharing.place(Part(kept.key, kept.bytes), new)
        self._sharing.meet(key, names)
        placed_here = self._sharing.placed(names)
        self._sharing.hold({names[index]: flat.values[index] for index in placed_here})
        return Division(contents, placed_here)

    def _save(
        self, key: StateKey, flat: FlatState, step: int, parent: StateKey | None, division: Division | None
    ) -> Kept:
        write = partial(
            files.write, flat=flat, key=key, step=step, parent=parent, workload=self.workload, division=division
        )
        parts = {} if division is None else division.parts
        size = sum(leaf.nbytes for index, leaf in enumerate(flat.leaves) if index not in parts)
        with self._explained(key, "write"), self._written(key, write, size) as (manifest, publish):
            while not publish():
                # Another writer was faster. Equal keys mean equal training, so its checkpoint is used if it is sound.
                if (kept := self._kept(key)) is not None:
                    return replace(kept, digest=manifest.digest, marks=manifest.marks)
                self._remove(key)
        return manifest.as_kept()

    def load(self, key: StateKey) -> object:
        def read() -> object:
            manifest = self._manifest(key)
            with self._explained(key, "read"), self._present(key, manifest):
                state, names = files.read(self._place(key), manifest, partial(self._read_part, key))
            if manifest.bytes >= SMALLEST:
                self._sharing.meet(key, names)
            return state

        return self._sought(read)

    def _read_part(self, key: StateKey, part: StateKey, names: Collection[str]) -> Mapping[str, Any]:
        """Return values of a part for the state ``key``: the named ones if this process holds them, else all."""
        if (held := self._sharing.held(names)) is not None:
            return held
        with self._needed(key, part):
            manifest = self._manifest(part)
            with self._explained(part, "read"), self._present(part, manifest):
                values = files.read_for_part(self._place(part), manifest)
        self._sharing.place(Part(part, manifest.bytes), values)
        for value in values.values():
            lazy_copies.allow_copies(value)
        self._sharing.hold(values)
        return values

    @contextmanager
    def _needed(self, key: StateKey, part: StateKey) -> Iterator[None]:
        """Convert an error of a part to an error of the state that needs it. The next state of this process that needs
        the part verifies it, and writes it again."""
        try:
            yield
        except (CheckpointMissing, CheckpointCorrupt) as error:
            self._sharing.forget(part)
            self._manifest(key)  # raises CheckpointMissing if the state was deleted, too
            raise CheckpointCorrupt(f"a part of {self.location(key)} cannot be used: {error}") from error

    def verify(self, key: StateKey) -> None:
        self._sought(lambda: self._verified(key))

    def manifest(self, key: StateKey) -> Manifest:
        return self._sought(lambda: self._manifest(key))

    def delete(self, key: StateKey) -> None:
        with self._explained(key, "delete"):
            self._remove(key)

    def keys(self) -> Iterator[StateKey]:
        """Return the keys of all checkpoints, sound or not, in sorted order."""
        yield from sorted(self.sizes())

    def sizes(self) -> dict[StateKey, int]:
        return {key: size for key, size in self._listed()[0].items() if not is_part(key)}

    def parts(self) -> dict[StateKey, int]:
        return {key: size for key, size in self._listed()[0].items() if is_part(key)}

    def usage(self) -> Usage:
        sizes, unpublished = self._listed()
        states = sum(not is_part(key) for key in sizes)
        return Usage(checkpoints=states, bytes=sum(sizes.values()), unpublished=unpublished)

    def identity(self) -> str:
        """Return the place's name: a random one, which the first caller writes to it. One place may have many paths and
        URLs, and one path may lead to two places."""
        if self._name:
            self.prove()
        else:
            with self._explained(None, "write"):
                self._name = self._place_name()
        return self._name

    def prove(self) -> None:
        if not self._name:
            return
        found = ""
        with self._explained(None, "reach"), suppress(FileNotFoundError):
            found = self._read_file(PLACE).decode()
        if found != self._name:
            what = "a different place here than for the driver" if found else "not the place of the checkpoints here"
            raise CheckpointUnreachable(f"{self._root} is {what}; {self._to_reach}")

    def save_log(self, key: StateKey, log: StageLog) -> None:
        path, content = log_path(key), stage_log.encode(log, key, self.workload)
        self.prove()
        with self._explained(key, "write the log of"):
            self._write_file(path, content)

    def load_log(self, key: StateKey) -> StageLog:
        path = log_path(key)

        def read() -> bytes:
            with self._explained(key, "read the log of"):
                try:
                    return self._read_file(path)
                except FileNotFoundError:
                    pass
            raise CheckpointMissing(f"no log of state {key} in {self!r}")

        return stage_log.decode(self._sought(read), key, self.workload, f"{path} in {self!r}")

    def _kept(self, key: StateKey) -> Kept | None:
        """Return the checkpoint that is already saved under the key, if every byte of it is sound."""
        try:
            return self._verified(key).as_kept()
        except (CheckpointMissing, CheckpointCorrupt):
            return None

    def _verified(self, key: StateKey) -> Manifest:
        """Return the manifest after checking every byte of its files and of its parts."""
        manifest, names = self._checked(key)
        for part in manifest.parts:
            with self._needed(key, part.key):
                _, held = self._checked(part.key)
            if not held.own.issuperset(name for key_of_it, name in names.in_parts if key_of_it == part.key):
                raise CheckpointCorrupt(f"{self.location(key)} names leaves that are not in {part.key}")
        return manifest

    def _checked(self, key: StateKey) -> tuple[Manifest, files.Names]:
        manifest = self._manifest(key)
        with self._explained(key, "read"), self._present(key, manifest):
            return manifest, files.verify(self._place(key), manifest)

    def has(self, key: StateKey) -> bool:
        """Whether there is a checkpoint with a sound manifest."""
        try:
            self._manifest(key)
        except (CheckpointMissing, CheckpointCorrupt):
            return False
        return True

    def _manifest(self, key: StateKey) -> Manifest:
        with self._explained(key, "read"), self._present(key):
            place = self._place(key)
            content = place.manifest()
        manifest = files.decode_manifest(content, place.where(files.MANIFEST))
        files.check_identity(manifest, key, self.workload, self.location(key))
        return manifest

    def _sought(self, find: Callable[[], T]) -> T:
        """Return the result of ``find``. :class:`CheckpointMissing` is raised only if this is the right place."""
        try:
            return find()
        except CheckpointMissing:
            self.prove()
            return find()  # the place may have become available again

    def _missing(self, key: StateKey) -> CheckpointMissing:
        return CheckpointMissing(f"no checkpoint of state {key} under {self._root}")

    @contextmanager
    def _explained(self, key: StateKey | None, action: str) -> Iterator[None]:
        """Convert errors of the place to :class:`CheckpointError`, with the action that failed and the remedy."""
        what = "checkpoints" if key is None else f"the checkpoint of state {key}"
        try:
            yield
        except OSError as error:
            reason, remedy = self._described(error)
            text = f"cannot {action} {what} under {self._root}: {reason}; {remedy}"
            raise kind_of(error, reason)(text) from self._shown_cause(error)

    # --- the storage --------------------------------------------------------------------------------------

    _to_reach: str
    """The remedy if the location leads to another place."""

    @property
    @abstractmethod
    def _root(self) -> str:
        """The path or URL, without credentials."""

    @abstractmethod
    def _place(self, key: StateKey) -> files.Place: ...

    @abstractmethod
    def _written(self, key: StateKey, write: Write, size: int) -> AbstractContextManager[tuple[Manifest, Publish]]:
        """Write a state with ``size`` bytes in its leaves. At the end of the context, unpublished files are removed.
        Raises ``OSError``."""

    @abstractmethod
    def _remove(self, key: StateKey) -> None:
        """Make a checkpoint disappear at once, then remove its files. Raises ``OSError``."""

    @abstractmethod
    def _listed(self) -> tuple[dict[StateKey, int], int]:
        """Return the bytes of each checkpoint, sound or not, and the total bytes that are not published."""

    @abstractmethod
    def _place_name(self) -> str:
        """Return the place's name, and write one if it has none. Raises ``OSError``."""

    @abstractmethod
    def _write_file(self, path: str, content: bytes) -> None:
        """Write or replace a file at a path in the store, atomically if the storage can. Raises ``OSError``."""

    @abstractmethod
    def _read_file(self, path: str) -> bytes:
        """Return the content of a file of the store. Raises ``OSError``; ``FileNotFoundError`` if the file is
        missing."""

    @abstractmethod
    def _present(self, key: StateKey, manifest: Manifest | None = None) -> AbstractContextManager[None]:
        """Distinguish a checkpoint that is missing, or deleted while it is read, from one with a missing file."""

    @abstractmethod
    def _described(self, error: OSError) -> tuple[str, str]:
        """Return an error's reason and remedy."""

    def _shown_cause(self, error: OSError) -> OSError | None:
        return error


def log_path(key: StateKey) -> str:
    """Return the path of a log within its store."""
    return f"{LOGS}/{key_path(key)}"


def kind_of(error: OSError, text: str = "") -> type[CheckpointError]:
    """Return :class:`CheckpointFull` or :class:`CheckpointUnreachable`. ``text``: the message of the storage's
    driver."""
    if error.errno in _NO_ROOM or (error.errno is None and _NO_ROOM_TEXT.search(text)):
        return CheckpointFull
    return CheckpointUnreachable
