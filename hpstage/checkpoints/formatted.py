"""What checkpoint stores in the files of :mod:`hpstage.checkpoints.format` have in common, wherever these lie."""

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
    """Saves what is not kept already, and believes that something is missing only where the place is the right one."""

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
        """The checkpoint that is kept already, if every byte of it is sound."""
        try:
            return self._verified(key).as_kept()
        except (CheckpointMissing, CheckpointCorrupt):
            return None

    def _verified(self, key: StateKey) -> Manifest:
        """The manifest, every byte that it tells of being sound."""
        manifest = self._manifest(key)
        with self._explained(key, "read"), self._present(key, manifest):
            files.verify(self._place(key), manifest)
        return manifest

    def _sought(self, find: Callable[[], T]) -> T:
        """What ``find`` finds, which is missing only where the place is the right one."""
        try:
            return find()
        except CheckpointMissing:
            self.prove()
            return find()  # the place may have come back in between

    @abstractmethod
    def _save(self, key: StateKey, flat: FlatState, step: int, parent: StateKey | None) -> Kept: ...

    @abstractmethod
    def _place(self, key: StateKey) -> files.Place: ...

    @abstractmethod
    def _manifest(self, key: StateKey) -> Manifest: ...

    @abstractmethod
    def _present(self, key: StateKey, manifest: Manifest) -> AbstractContextManager[None]:
        """Tell a checkpoint that is missing, or is deleted while it is read, from one that lacks a file."""

    @abstractmethod
    def _explained(self, key: StateKey | None, action: str) -> AbstractContextManager[None]:
        """Turn the errors of the place into ours, with what was to be done and the remedy."""
