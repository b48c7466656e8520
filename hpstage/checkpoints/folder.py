"""FolderCheckpoints: checkpoints in a folder that all workers can access."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hpstage.checkpoints import format as files
from hpstage.checkpoints.formatted import LOGS, PLACE, FormattedCheckpoints, Publish, Write, log_path
from hpstage.checkpoints.packed_place import PackedPlace
from hpstage.checkpoints.packs import SMALL, Packs
from hpstage.checkpoints.processes import has_died, writer_prefix
from hpstage.checkpoints.sharing import Sharing
from hpstage.checkpoints.store import Manifest, is_key, is_part, key_path
from hpstage.errors import CheckpointCorrupt, CheckpointUnreachable
from hpstage.plan.facts import StateKey

# Folder where checkpoints are written, and to which they are moved for removal. No key begins with a dot.
_ASIDE = ".tmp"
_PACKS = ".packs"
# Errors of file systems that cannot rename folders; EMFILE is gcsfuse's.
_NO_RENAMES = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EMFILE, errno.EXDEV}
# Errors of opening a path that is not a file: a socket, a cycle of links, a device without a driver.
_NO_FILE = {errno.ENXIO, errno.ELOOP, errno.ENODEV}
# Errors of opening a path that is not a folder: it is missing, a file, a pipe, a cycle of links.
_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
# Maximum bytes of a manifest, which usually has a few thousand, or of a place's name.
_SHORT = 1 << 20
# Seconds after which a temporary folder is considered abandoned, regardless of its writer.
_ABANDONED = 24 * 3600.0
# Small tensors are combined into writes and reads of this many bytes; larger ones bypass the buffer.
_BUFFER = 1 << 18
SMALL_VARIABLE = "HPSTAGE_SMALL_STATES"
"""Environment variable: checkpoints and logs of at most this many bytes share files; 0: each has its own files."""


class FolderCheckpoints(FormattedCheckpoints):
    """Checkpoints of one ``workload`` under the folder ``path``, local or on a shared file system.

    ``<path>/<key[:2]>/<key>/`` holds the files of :mod:`hpstage.checkpoints.format`. A checkpoint is written to a
    temporary folder and published by renaming it, so that readers see all of it or nothing; hard links are not needed.
    Small checkpoints and logs share files, the packs in ``<path>/.packs`` (:mod:`hpstage.checkpoints.packs`), until
    :meth:`unpack` gives a checkpoint files of its own.
    Nothing is synced to the disk: a saved checkpoint survives the death of any process, and after a power failure the
    checksums reveal what was lost, which is then recomputed. Creating an instance writes nothing; it removes the
    remains of dead writers, unless ``sweep`` is False.

    Once :meth:`identity` has named the place, an instance and its copies are bound to it. If a missing mount makes the
    path lead to another place, that place is neither written to nor trusted.
    """

    beside_training = True
    _to_reach = "see that it is mounted, and that this path leads to the same place everywhere"

    def __init__(self, path: str | os.PathLike[str], workload: str, *, sweep: bool = True) -> None:
        # Absolute, since workers may run in another folder.
        self.path = Path(path).absolute()
        self.workload = workload
        self._sharing = Sharing()
        self._packs = Packs(self.path / _PACKS)
        self._small = int(os.environ.get(SMALL_VARIABLE, SMALL))
        if sweep:
            with suppress(CheckpointUnreachable):  # check() reports whether the place can be used
                self.sweep()

    @property
    def _root(self) -> str:
        return str(self.path)

    def location(self, key: StateKey) -> str:
        pack = self._packs.path_of(key)
        return str(self._folder(key)) if pack is None else f"{pack}: {key}"

    def unpack(self, key: StateKey) -> str:
        with self._explained(key, "unpack"):
            entry = None if os.path.lexists(self._folder(key)) else self._packs.read(key)
            if entry is not None:
                with self._aside() as aside:
                    self._make(aside)
                    PackedPlace.of(self.location(key), entry).copy_to(FolderPlace(aside))
                    self._publish(aside, key)
                self._packs.delete(key)
        return str(self._folder(key))

    @contextmanager
    def _written(self, key: StateKey, write: Write, size: int) -> Iterator[tuple[Manifest, Publish]]:
        self.prove()
        if size < self._small:
            packed = PackedPlace(self.location(key))
            manifest = write(packed)
            packed.write(files.MANIFEST, files.encode_manifest(manifest))
            entry = packed.entry()
            if len(entry) <= self._small:
                yield manifest, lambda: self._publish_packed(key, entry)
                return
        with self._aside() as aside:
            self._make(aside)
            place = FolderPlace(aside)
            manifest = write(place)
            place.write(files.MANIFEST, files.encode_manifest(manifest))
            yield manifest, lambda: self._publish(aside, key)

    def _publish(self, aside: Path, key: StateKey) -> bool:
        folder = self._folder(key)
        folder.parent.mkdir(exist_ok=True)
        return _rename(aside, folder)

    def _publish_packed(self, key: StateKey, entry: bytes) -> bool:
        """Publish a checkpoint, unless there is a sound one: several checkpoints of one key are equivalent."""
        self._make_root()
        self._packs.write(key, entry)
        self._remove_folder(key)
        return True

    def keys(self) -> Iterator[StateKey]:
        with self._explained(None, "list"):
            # An f-string is faster than a Path: a folder may hold a hundred thousand checkpoints.
            found = {one.name for one in self._folders() if os.path.exists(f"{one.path}/{files.MANIFEST}")}
            found |= {name for name in self._packs.sizes()[0] if is_key(name)}
        yield from sorted(key for key in map(StateKey, found) if not is_part(key))

    def _listed(self) -> tuple[dict[StateKey, int], int]:
        with self._explained(None, "list"):
            listed = {folder.name: _file_sizes(folder.path) for folder in self._folders()}
            aside = sum(sum(_file_sizes(folder.path).values()) for folder in _entries(self.path / _ASIDE))
            packed, unused = self._packs.sizes()
        sizes = {StateKey(name): size for name, size in packed.items() if is_key(name)}
        sizes |= {StateKey(key): sum(found.values()) for key, found in listed.items() if files.MANIFEST in found}
        return sizes, aside + unused

    def _place_name(self) -> str:
        marker = self.path / PLACE
        if not marker.parent.exists():
            with self._aside() as aside:
                self._make(aside)
                (aside / marker.name).write_text(uuid.uuid4().hex)
                _rename(aside, marker.parent)  # if another process was faster, its name counts
        self._make_root()
        return self._read_file(PLACE).decode()

    def check(self) -> None:
        with self._explained(None, "write"), self._aside() as aside, self._aside() as renamed:
            self._make(aside)
            (aside / "check").write_bytes(b"hpstage")
            aside.rename(renamed)

    def sweep(self) -> int:
        """Remove the temporary folders of dead writers; return how many were removed.

        A writer is dead if it ran on this host and has ended, or if its folder is older than a day by the clock of the
        place, since that of this host may be wrong.
        """
        removed = 0
        now: float | None = None

        def is_old(path: Path) -> bool:
            nonlocal now
            now = self._now() if now is None else now
            return now - path.stat().st_mtime > _ABANDONED

        with suppress(OSError):  # leftover packs do no harm
            self._packs.compact(is_old)
        with self._explained(None, "list"):
            entries = _entries(self.path / _ASIDE)
        for entry in entries:
            folder = self.path / _ASIDE / entry.name
            if not has_died(entry.name):
                try:
                    if not is_old(folder):
                        continue
                except OSError:
                    continue  # it is gone, or this user may not write here
            _discard(folder)  # another process may sweep as well
            removed += 1
        return removed

    def logs(self) -> dict[StateKey, int]:
        with self._explained(None, "list logs of"):
            found = [_file_sizes(prefix.path) for prefix in _entries(self.path / LOGS)]
            packed, _ = self._packs.sizes()
        found.append({path.rpartition("/")[2]: size for path, size in packed.items() if path.startswith(LOGS)})
        return {StateKey(name): size for sizes in found for name, size in sizes.items() if is_key(name)}

    def delete_log(self, key: StateKey) -> None:
        with self._explained(key, "delete the log of"):
            (self.path / log_path(key)).unlink(missing_ok=True)
            self._packs.delete(log_path(key))

    def _write_file(self, path: str, content: bytes) -> None:
        target = self.path / path
        if len(content) < self._small:
            self._make_root()
            self._packs.write(path, content)
            target.unlink(missing_ok=True)
            return
        with self._aside() as aside:
            self._make(aside)
            (aside / "file").write_bytes(content)
            try:
                (aside / "file").replace(target)
            except FileNotFoundError:
                target.parent.mkdir(parents=True, exist_ok=True)
                (aside / "file").replace(target)
        self._packs.delete(path)

    def _read_file(self, path: str) -> bytes:
        try:
            return _content(self.path / path, _SHORT if path == PLACE else files.LONGEST)
        except FileNotFoundError:
            packed = None if path == PLACE else self._packs.read(path)
            if packed is None:
                raise
            return packed

    def _now(self) -> float:
        """Return the current time by the clock that sets this place's modification times. Raises ``OSError``."""
        with self._aside() as probe:
            probe.mkdir()
            return probe.stat().st_mtime

    def _folders(self) -> Iterator[os.DirEntry[str]]:
        """Return the folders that may hold a checkpoint, in the order of their keys."""
        for prefix in _entries(self.path):
            if not prefix.name.startswith("."):
                for folder in _entries(prefix.path):
                    if is_key(folder.name):
                        yield folder

    def _place(self, key: StateKey) -> files.Place:
        folder = self._folder(key)
        entry = None if os.path.lexists(folder) else self._packs.read(key)
        return FolderPlace(folder) if entry is None else PackedPlace.of(self.location(key), entry)

    def _folder(self, key: StateKey) -> Path:
        return self.path / key_path(key)

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        """Yield a path for a temporary folder, which no longer exists afterwards: it was published or is removed."""
        folder = self.path / _ASIDE / f"{writer_prefix()}-{uuid.uuid4().hex}"
        try:
            yield folder
        finally:
            _discard(folder)

    def _make(self, aside: Path) -> None:
        self._make_root()
        aside.mkdir()

    def _make_root(self) -> None:
        """Create the folder for temporary folders. Once the place has a name it must exist already, so that nothing is
        created in an empty mount point if the mount disappears while a checkpoint is saved."""
        root = self.path / _ASIDE
        if self._name:
            root.stat()
        else:
            root.mkdir(parents=True, exist_ok=True)

    def _remove(self, key: StateKey) -> None:
        self._remove_folder(key)
        self._packs.delete(key)

    def _remove_folder(self, key: StateKey) -> None:
        folder = self._folder(key)
        if os.path.lexists(folder):
            with self._aside() as aside:
                self._make_root()
                with suppress(FileNotFoundError):  # another process has removed it
                    folder.rename(aside)

    @contextmanager
    def _present(self, key: StateKey, manifest: Manifest | None = None) -> Iterator[None]:
        folder = self._folder(key)
        held = None
        try:
            held = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        except OSError as error:
            if error.errno not in _NO_FOLDER:
                raise
            if error.errno != errno.ENOENT:  # else it is in a pack, or missing
                folder.lstat()  # raises if the place cannot be reached
                raise CheckpointCorrupt(f"{folder} is not a folder: {error.strerror}") from error
        try:
            yield
        except FileNotFoundError as error:
            # A deleted checkpoint is moved before its files are removed. As long as the folder is held open, no other
            # folder can be mistaken for it.
            if held is not None and _is_at(folder, held):
                raise CheckpointCorrupt(f"{folder} lacks {Path(error.filename).name}") from error
            # Not kept in a variable: it would form a cycle with its traceback, and objects of all frames, such as the
            # state to save, would stay in memory until the cycle is collected.
            raise self._missing(key) from error
        finally:
            if held is not None:
                os.close(held)

    def _described(self, error: OSError) -> tuple[str, str]:
        return str(error.strerror), _remedy(error)


class FolderPlace:
    """The place of one checkpoint's files: a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def where(self, name: str) -> str:
        return str(self._folder / name)

    def create(self, name: str) -> BinaryIO:
        return (self._folder / name).open("wb", buffering=_BUFFER)

    def open(self, name: str) -> _Reader:
        return _opened(self._folder / name)

    def manifest(self) -> bytes:
        return _content(self._folder / files.MANIFEST, _SHORT)

    def write(self, name: str, content: bytes) -> None:
        (self._folder / name).write_bytes(content)


class _Reader(io.BufferedReader):
    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size


def _opened(path: Path) -> _Reader:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened.
        CheckpointCorrupt: it is not a regular file: reading a pipe would block forever, and a device has no end.
    """
    try:
        # O_NONBLOCK: do not wait for the writer of a pipe.
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise CheckpointCorrupt(f"{path} is not a file: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise CheckpointCorrupt(f"{path} is not a file, but a folder, a pipe or a device")
    return _Reader(io.FileIO(opened), _BUFFER)


def _content(path: Path, most: int) -> bytes:
    """Return the content of a file of at most ``most`` bytes. Raises as :func:`_opened` does, and for larger files."""
    with _opened(path) as file:
        if file.size > most:
            raise CheckpointCorrupt(f"{path} has {file.size:,} bytes, and cannot have more than {most:,}")
        return file.read()


def _rename(source: Path, target: Path) -> bool:
    """Rename a folder; ``False`` if the target exists (an empty folder does not count as existing)."""
    try:
        source.rename(target)
    except OSError:
        if os.path.lexists(target):
            return False
        raise
    return True


def _discard(folder: Path) -> None:
    """Remove a folder, or a file in its place, as far as possible. Leftovers do no harm."""
    with suppress(OSError):  # it is a folder
        folder.unlink()  # first, since rmtree() would open a pipe, and wait
    shutil.rmtree(folder, ignore_errors=True)


def _is_at(folder: Path, held: int) -> bool:
    """Whether the open folder ``held`` is still the one at this path."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(held))
    except FileNotFoundError:
        return False


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name; none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        return []


def _file_sizes(folder: str) -> dict[str, int]:
    """Return the bytes of each file in a folder, except files that another process removes."""
    sizes: dict[str, int] = {}
    for entry in _entries(folder):
        with suppress(FileNotFoundError):
            sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    return sizes


def _remedy(error: OSError) -> str:
    if error.errno in _NO_RENAMES:
        return "it cannot rename folders; if it is a mounted object store, give its own URL (s3://bucket/path)"
    return "see that it is mounted, that the disk has free space and that this user may read and write there"
