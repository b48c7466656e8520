"""Base class of the checkpoint stores that use the files of :mod:`hpstage.checkpoints.format`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from msgspec.structs import replace

from hpstage.checkpoints import format as files
from hpstage.checkpoints import stage_log
from hpstage.checkpoints.stage_log import StageLog
from hpstage.checkpoints.state_tree import FlatState, flatten, summary
from hpstage.checkpoints.store import CheckpointStore, Manifest, key_path
from hpstage.errors import CheckpointCorrupt, CheckpointMissing
from hpstage.plan.facts import Kept, StateKey

T = TypeVar("T")

# The folder of logs, each at the path that its state's checkpoint has in the store. No key begins with a dot.
LOGS = ".logs"


class FormattedCheckpoints(CheckpointStore):
    """Saves only states that are not kept yet, and reports one as missing only if the place is the right one."""

    workload: str

    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        if (kept := self._kept(key)) is not None:
            digest, marks = summary(state)
            return replace(kept, digest=digest, marks=marks)
        return self._save(key, flatten(state), step, parent)

    def load(self, key: StateKey) -> object:
        def read() -> object:
            manifest = self._manifest(key)
            with self._explained(key, "read"), self._present(key, manifest):
                return files.read(self._place(key), manifest)

        return self._sought(read)

    def verify(self, key: StateKey) -> None:
        self._sought(lambda: self._verified(key))

    def manifest(self, key: StateKey) -> Manifest:
        return self._sought(lambda: self._manifest(key))

    def save_log(self, key: StateKey, log: StageLog) -> None:
        path, content = log_path(key), stage_log.encode(log, key, self.workload)
        self.prove()
        with self._explained(key, "write the log beside"):
            self._write_file(path, content)

    def load_log(self, key: StateKey) -> StageLog:
        path = log_path(key)

        def read() -> bytes:
            with self._explained(key, "read the log beside"):
                try:
                    return self._read_file(path)
                except FileNotFoundError:
                    pass
            raise CheckpointMissing(f"no log of state {key} in {self!r}")

        return stage_log.decode(self._sought(read), key, self.workload, f"{path} in {self!r}")

    def _kept(self, key: StateKey) -> Kept | None:
        """Return the checkpoint that is already kept, if every byte of it is sound."""
        try:
            return self._verified(key).as_kept()
        except (CheckpointMissing, CheckpointCorrupt):
            return None

    def _verified(self, key: StateKey) -> Manifest:
        """Return the manifest after checking every byte of its files."""
        manifest = self._manifest(key)
        with self._explained(key, "read"), self._present(key, manifest):
            files.verify(self._place(key), manifest)
        return manifest

    def _sought(self, find: Callable[[], T]) -> T:
        """Return the result of ``find``; :class:`CheckpointMissing` is raised only if the place is the right one."""
        try:
            return find()
        except CheckpointMissing:
            self.prove()
            return find()  # the place may have become available again

    @abstractmethod
    def _save(self, key: StateKey, flat: FlatState, step: int, parent: StateKey | None) -> Kept: ...

    @abstractmethod
    def _write_file(self, path: str, content: bytes) -> None:
        """Write a file at a path in the store, or replace it, at once where the storage can. Raises ``OSError``."""

    @abstractmethod
    def _read_file(self, path: str) -> bytes:
        """Raises ``OSError``; ``FileNotFoundError`` if it is missing."""

    @abstractmethod
    def _place(self, key: StateKey) -> files.Place: ...

    @abstractmethod
    def _manifest(self, key: StateKey) -> Manifest: ...

    @abstractmethod
    def _present(self, key: StateKey, manifest: Manifest) -> AbstractContextManager[None]:
        """Distinguish a checkpoint that is missing, or deleted while it is read, from one with a missing file."""

    @abstractmethod
    def _explained(self, key: StateKey | None, action: str) -> AbstractContextManager[None]:
        """Convert errors of the place to :class:`CheckpointError`, with the action that failed and the remedy."""


def log_path(key: StateKey) -> str:
    """Return the path of a log within its store."""
    return f"{LOGS}/{key_path(key)}"
