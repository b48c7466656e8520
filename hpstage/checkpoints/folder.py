"""FolderCheckpoints: checkpoints in a folder that all workers reach."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from hpstage.checkpoints import format as files
from hpstage.checkpoints.state_tree import flatten
from hpstage.checkpoints.store import CheckpointStore, Manifest
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, UsageError
from hpstage.events import Kept, StateKey

# Where checkpoints are written, and put before they are removed. No key begins with a dot.
_ASIDE = ".tmp"
# Seconds after which a temporary folder is taken for abandoned, whoever made it.
_ABANDONED = 24 * 3600.0
_KEY = re.compile(r"[0-9A-Za-z_-]{2,128}")


class FolderCheckpoints(CheckpointStore):
    """Checkpoints of one ``workload`` under the folder ``path``, local or on a shared file system.

    ``<path>/<key[:2]>/<key>/`` holds the files of :mod:`hpstage.checkpoints.format`. A checkpoint is written
    aside and published by renaming its folder, so that readers see all of it or nothing. Nothing is synced to
    the disk: what was saved outlives every process at once, and after a power cut the checksums find what was
    lost, which is then computed anew. Making an instance writes nothing; it removes what dead writers have
    left.
    """

    def __init__(self, path: str | os.PathLike[str], workload: str) -> None:
        # Absolute, since workers may run in another folder.
        self.path = Path(path).absolute()
        self.workload = workload
        self.sweep()

    def __repr__(self) -> str:
        return f"FolderCheckpoints({str(self.path)!r}, workload={self.workload!r})"

    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        folder = self._folder(key)
        if (kept := self._kept(key)) is not None:
            return kept
        flat = flatten(state)
        with self._explained(key, "write"), self._aside() as aside:
            aside.mkdir(parents=True)
            written = files.write(aside, flat)
            manifest = Manifest(
                format=files.FORMAT,
                key=key,
                step=step,
                parent=parent,
                workload=self.workload,
                digest=written.digest,
                files=written.files,
                bytes=written.bytes,
            )
            files.write_manifest(aside, manifest)
            folder.parent.mkdir(exist_ok=True)
            while not _rename(aside, folder):
                # Another writer was faster. Equal keys mean equal training: its checkpoint serves, if it is
                # sound.
                if (kept := self._kept(key)) is not None:
                    return kept
                self._remove(folder)
        return _as_kept(manifest)

    def load(self, key: StateKey) -> object:
        manifest = self.manifest(key)
        with self._explained(key, "read"), self._present(key):
            return files.read(self._folder(key), manifest)

    def manifest(self, key: StateKey) -> Manifest:
        folder = self._folder(key)
        with self._explained(key, "read"), self._present(key):
            manifest = files.read_manifest(folder)
        if manifest.key != key:
            raise CheckpointCorrupt(f"{folder} holds the checkpoint of another state, {manifest.key}")
        if manifest.workload != self.workload:
            raise CheckpointCorrupt(f"{folder} is of workload {manifest.workload}, not {self.workload}")
        return manifest

    def delete(self, key: StateKey) -> None:
        with self._explained(key, "delete"):
            self._remove(self._folder(key))

    def keys(self) -> Iterator[StateKey]:
        """Keys of all checkpoints, sound or not, in sorted order."""
        for prefix in _names(self.path):
            if not prefix.startswith("."):
                for name in _names(self.path / prefix):
                    if _KEY.fullmatch(name) and (self.path / prefix / name / files.MANIFEST).exists():
                        yield StateKey(name)

    def sweep(self) -> int:
        """Remove the temporary folders of dead writers; how many there were.

        A writer is dead if it ran on this host and is no more, or if its folder is older than a day.
        """
        removed = 0
        for name in _names(self.path / _ASIDE):
            folder = self.path / _ASIDE / name
            if _abandoned(folder):
                # Another process may sweep as well, and a folder that we may not remove does no harm.
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        return removed

    def _folder(self, key: StateKey) -> Path:
        # The key becomes a path: it must not lead out of the folder.
        if _KEY.fullmatch(key) is None:
            raise UsageError(f"{key!r} is no state key: 2 to 128 letters, digits, '_' and '-'")
        return self.path / key[:2] / key

    def _kept(self, key: StateKey) -> Kept | None:
        """The checkpoint that is kept already, if every byte of it is sound."""
        try:
            manifest = self.manifest(key)
            with self._explained(key, "read"), self._present(key):
                files.verify(self._folder(key), manifest)
        except (CheckpointMissing, CheckpointCorrupt):
            return None
        return _as_kept(manifest)

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        """A path for a temporary folder, which is gone afterwards: published or removed."""
        folder = self.path / _ASIDE / f"{_host()}-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _remove(self, folder: Path) -> None:
        """Make a checkpoint disappear at once, then remove its files."""
        with self._aside() as aside:
            if folder.exists():
                aside.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # another process has removed it
                    folder.rename(aside)

    @contextmanager
    def _present(self, key: StateKey) -> Iterator[None]:
        """Tell a checkpoint that is missing, or is deleted while it is read, from one that lacks a file."""
        folder = self._folder(key)
        missing = CheckpointMissing(f"no checkpoint of state {key} under {self.path}")
        try:
            held = os.open(folder, os.O_RDONLY)
        except FileNotFoundError as error:
            raise missing from error
        try:
            yield
        except FileNotFoundError as error:
            # A deleted checkpoint loses its place before its files. As long as the folder is held open, no other
            # one can be taken for it.
            if _is_at(folder, held):
                raise CheckpointCorrupt(f"{folder} lacks {Path(error.filename).name}") from error
            raise missing from error
        finally:
            os.close(held)

    @contextmanager
    def _explained(self, key: StateKey, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot {action} the checkpoint of state {key} under {self.path}: {error.strerror}; "
                "see that the disk has free space and that this user may read and write there"
            ) from error


def _as_kept(manifest: Manifest) -> Kept:
    return Kept(key=manifest.key, bytes=manifest.bytes, digest=manifest.digest)


def _rename(source: Path, target: Path) -> bool:
    """Rename a folder; ``False`` if the target exists (an empty folder does not count as existing)."""
    try:
        source.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    return True


def _is_at(folder: Path, held: int) -> bool:
    """Whether the open folder ``held`` is still the one at this path."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(held))
    except FileNotFoundError:
        return False


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _host() -> str:
    """Where a process number means the same process: this host, and this container's process namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        namespace = ""
    return xxhash.xxh3_64_hexdigest(f"{socket.gethostname()} {namespace}".encode())


def _abandoned(folder: Path) -> bool:
    host, _, rest = folder.name.partition("-")
    pid = rest.partition("-")[0]
    if host == _host() and pid.isdigit() and not _alive(int(pid)):
        return True
    try:
        return time.time() - folder.stat().st_mtime > _ABANDONED
    except FileNotFoundError:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
