"""Base class of the checkpoint stores that use the files of :mod:`hpstage.checkpoints.format`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from msgspec.structs import replace

from hpstage.checkpoints import format as files
from hpstage.checkpoints.state_tree import FlatState, flatten, summary
from hpstage.checkpoints.store import CheckpointStore, Manifest
from hpstage.errors import CheckpointCorrupt, CheckpointMissing
from hpstage.plan.facts import Kept, StateKey

T = TypeVar("T")


class FormattedCheckpoints(CheckpointStore):
    """Saves only states that are not kept yet, and reports one as missing only if the place is the right one."""

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
    def _place(self, key: StateKey) -> files.Place: ...

    @abstractmethod
    def _manifest(self, key: StateKey) -> Manifest: ...

    @abstractmethod
    def _present(self, key: StateKey, manifest: Manifest) -> AbstractContextManager[None]:
        """Distinguish a checkpoint that is missing, or deleted while it is read, from one with a missing file."""

    @abstractmethod
    def _explained(self, key: StateKey | None, action: str) -> AbstractContextManager[None]:
        """Convert errors of the place to :class:`CheckpointError`, with the action that failed and the remedy."""
