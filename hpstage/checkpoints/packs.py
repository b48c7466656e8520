"""Packs: small states and logs of a folder in few files, since thousands of tiny trials would need thousands of files.

A pack is a file to which one process appends *entries*. An entry is a header with a name and its own checksum, followed
by the content, which the store checks. The process opens and closes the file for each entry, so that other hosts see
the whole entry afterwards. Only complete entries count: a torn end that a killed writer leaves is ignored, and after a
failed write the writer begins another pack. After a damaged header, the next header is searched for, so that damage
costs only the damaged entry. An entry is deleted by overwriting one byte of its header.

A pack of which most is deleted is compacted, by its writer, or by a process that deletes from it or sweeps the folder:
its entries are appended to another pack, then it is removed. No other process appends to it at that time: it is the
process's own pack, or full, or its writer is gone. A reader finds an entry in one of the two packs: a listing without
the old pack is newer than the copies, and a reader that finds the old pack removed lists again. A process that deletes
an entry looks for further copies afterwards; a process that copies an entry checks afterwards whether it was deleted.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from hpstage.checkpoints.processes import has_died, writer_prefix

SMALL = 1 << 16
"""Maximum bytes of an entry."""
_FULL = 4 << 20
# A process that deletes entries leaves up to _SLACK deleted bytes in a pack. Packs of fewer than _SLIGHT bytes whose
# writers are gone are merged if there are more than _MANY.
_SLACK, _SLIGHT, _MANY = 1 << 18, 1 << 20, 8

_MAGIC = b"hpstage\x01"
_KEPT, _DELETED = b"+", b"-"  # they differ in two bits
_FIXED = struct.Struct("<8scBI")  # magic, whether it is deleted, length of the name, length of the content
_LONGEST = _FIXED.size + 255 + 8
_BLOCK = 1 << 18


class _Entry(NamedTuple):
    name: str
    is_kept: bool
    begin: int
    """Offset of its content within the entry."""
    size: int
    """Bytes of the entry, header included."""


class _Pack:
    """An index of a pack's entries, as far as the pack has been read."""

    __slots__ = ("by_name", "live", "path", "read_to", "sizes")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_name: dict[str, tuple[int, ...]] = {}  # offsets of entries that are not deleted
        self.sizes: dict[int, int] = {}  # by offset
        self.live = 0  # bytes of entries that are not deleted
        self.read_to = 0  # every entry before this offset was understood

    def add(self, offset: int, name: str, size: int) -> None:
        if offset not in self.sizes:
            self.by_name[name] = (*self.by_name.get(name, ()), offset)
            self.sizes[offset] = size
            self.live += size

    def drop(self, offset: int, name: str) -> None:
        if offset in self.sizes:
            self.live -= self.sizes.pop(offset)
            rest = tuple(other for other in self.by_name.pop(name) if other != offset)
            if rest:
                self.by_name[name] = rest

    def read_on(self, file: int) -> None:
        """Read the headers of entries that were appended since the last call."""
        size = os.fstat(file).st_size
        offset, understood = self.read_to, True
        while offset < size:
            entry = _entry_of(os.pread(file, _LONGEST, offset))
            if entry is None:
                understood = False
                following = _search(file, offset + 1, size)
                if following is None:
                    break
                offset = following
                continue
            if offset + entry.size > size:
                break  # torn, or being written
            if entry.is_kept:
                self.add(offset, entry.name, entry.size)
            offset += entry.size
            if understood:
                self.read_to = offset


class Packs:
    """The packs in a folder, which is created with the first pack. Thread-safe; can be pickled.

    All methods raise ``OSError``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start_over()
        _instances.add(self)

    def start_over(self) -> None:
        """Reset the index and the lock. Needed in a forked process: a thread of the parent may hold the lock, and the
        parent owns the pack."""
        self._lock = threading.Lock()
        self._packs: dict[str, _Pack] = {}
        self._own: str | None = None  # the pack to which this process appends
        self._own_end = 0  # offset at which this process's last entry in it ends
        self._look_at = 0  # its size at which this process next checks what others have deleted

    def __getstate__(self) -> Path:
        return self._folder

    def __setstate__(self, folder: Path) -> None:
        self.__init__(folder)  # type: ignore[misc]

    def read(self, name: str) -> bytes | None:
        """Return the content of an entry, if there is one of this name."""
        with self._lock:
            found = self._read(name)
            if found is None:
                self._refresh()
                found = self._read(name)
            return found

    def path_of(self, name: str) -> Path | None:
        """Return the pack with an entry, as far as the index shows, without reading the folder."""
        with self._lock:
            return next((pack.path for pack in self._packs.values() if name in pack.by_name), None)

    def write(self, name: str, content: bytes) -> None:
        """Append an entry, which replaces earlier entries of the same name."""
        with self._lock:
            self._refresh()
            self._tidy()
            earlier = self._found(name)
            self._append(name, content)
            for pack, offset in earlier:
                self._mark(pack, offset, name)

    def delete(self, name: str) -> None:
        """Delete an entry, if there is one."""
        with self._lock:
            self._refresh()
            while found := self._found(name):
                for pack, offset in found:
                    self._mark(pack, offset, name)
                self._refresh()
                for pack in dict.fromkeys(pack for pack, _ in found):
                    slack = _size(pack.path) - pack.live
                    if (not pack.live or slack > max(pack.live, _SLACK)) and self._has_ended(pack):
                        with suppress(OSError):  # an error costs only space
                            self._compact(pack)

    def sizes(self) -> tuple[dict[str, int], int]:
        """Return the bytes of each entry, by name, and the total bytes of deleted, damaged and duplicate entries."""
        with self._lock:
            self._packs.clear()  # others may have deleted entries
            self._refresh()
            packs = self._packs.values()
            sizes = {name: pack.sizes[offsets[-1]] for pack in packs for name, offsets in pack.by_name.items()}
            return sizes, sum(_size(pack.path) for pack in packs) - sum(sizes.values())

    def compact(self, is_abandoned: Callable[[Path], bool]) -> None:
        """Compact packs that consist mostly of deleted entries, and merge small packs if many dead writers have left
        some.

        Args:
            is_abandoned: whether a pack was not written to for so long that its writer must be dead.
        """
        with self._lock:
            self._packs.clear()
            self._refresh()
            sizes = {pack: _size(pack.path) for pack in self._packs.values()}
            ended = [pack for pack in sizes if self._has_ended(pack) or is_abandoned(pack.path)]
            slight = [pack for pack in ended if sizes[pack] < _SLIGHT and pack.path.name != self._own]
            for pack in ended:
                if sizes[pack] > 2 * pack.live or (pack in slight and len(slight) > _MANY):
                    self._compact(pack)

    # --- with the lock held -------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Read the entries that were appended since the last call. Repeat if a pack vanishes in between."""
        while not self._refreshed():
            pass

    def _refreshed(self) -> bool:
        try:
            with os.scandir(self._folder) as entries:
                listed = {entry.name: entry for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            listed = {}
        for name in self._packs.keys() - listed.keys():
            del self._packs[name]
        for name in sorted(listed):
            try:
                found = listed[name].stat()
                if not stat.S_ISREG(found.st_mode):
                    continue
                pack = self._packs.setdefault(name, _Pack(self._folder / name))
                if pack.read_to > found.st_size:  # an earlier copy has replaced the file
                    pack = self._packs[name] = _Pack(pack.path)
                if pack.read_to < found.st_size:
                    with _opened(pack.path, os.O_RDONLY) as file:
                        pack.read_on(file)
            except FileNotFoundError:
                if not listed[name].is_symlink():
                    return False
        return True

    def _found(self, name: str) -> list[tuple[_Pack, int]]:
        return [(pack, offset) for pack in self._packs.values() for offset in pack.by_name.get(name, ())]

    def _read(self, name: str) -> bytes | None:
        for pack, offset in reversed(self._found(name)):
            with suppress(FileNotFoundError), _opened(pack.path, os.O_RDONLY) as file:
                content = os.pread(file, pack.sizes[offset], offset)
                entry = _entry_of(content)
                if entry is None or entry.name != name:
                    self._packs.pop(pack.path.name, None)  # an earlier copy has replaced the file
                elif entry.is_kept:
                    return content[entry.begin :]
            pack.drop(offset, name)
        return None

    def _tidy(self) -> None:
        """Compact this process's pack if others have deleted most of it. It is checked whenever its size has
        doubled."""
        if self._own is None or (size := _size(self._folder / self._own)) < self._look_at:
            return
        self._look_at = 2 * size
        pack = _Pack(self._folder / self._own)
        with _opened(pack.path, os.O_RDONLY) as file:
            pack.read_on(file)
        self._packs[self._own] = pack
        if size > 2 * pack.live:
            with suppress(OSError):
                self._compact(pack)

    def _append(self, name: str, content: bytes) -> tuple[_Pack, int]:
        """Append an entry to this process's pack, or to a new pack."""
        size = 0 if self._own is None else _size(self._folder / self._own)
        if (
            self._own is None or not max(1, self._own_end) <= size < _FULL
        ):  # a shorter pack was damaged: append nothing to it
            self._own = f"{writer_prefix()}-{uuid.uuid4().hex}"
            self._look_at, self._own_end = _SLACK, 0
            with suppress(FileExistsError):
                self._folder.mkdir()
            os.close(os.open(self._folder / self._own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        pack = self._packs.setdefault(self._own, _Pack(self._folder / self._own))
        entry = _encoded(name, content)
        try:
            with _opened(pack.path, os.O_WRONLY | os.O_APPEND) as file:
                start = os.lseek(file, 0, os.SEEK_END)
                try:
                    left = memoryview(entry)
                    while left:
                        left = left[os.write(file, left) :]
                except BaseException:
                    os.ftruncate(file, start)
                    raise
                is_there = os.fstat(file).st_nlink > 0
        except BaseException:
            self._own = None  # append nothing after a torn end
            with suppress(OSError):
                if not _size(pack.path):
                    pack.path.unlink()
            raise
        if not is_there:  # another host assumed that this process is dead
            self._own = None
            return self._append(name, content)
        self._own_end = start + len(entry)
        pack.add(start, name, len(entry))
        if pack.read_to == start:
            pack.read_to += len(entry)
        return pack, start

    def _mark(self, pack: _Pack, offset: int, name: str) -> None:
        """Mark an entry as deleted."""
        with suppress(FileNotFoundError), _opened(pack.path, os.O_RDWR) as file:
            entry = _entry_of(os.pread(file, _LONGEST, offset))
            if entry is None or entry.name != name:
                self._packs.pop(pack.path.name, None)  # as in _read()
            else:
                os.pwrite(file, _DELETED, offset + len(_MAGIC))
        pack.drop(offset, name)

    def _has_ended(self, pack: _Pack) -> bool:
        """Whether no other process appends to a pack, or is about to."""
        return pack.path.name == self._own or pack.read_to >= _FULL or has_died(pack.path.name)

    def _compact(self, old: _Pack) -> None:
        if old.path.name == self._own:
            self._own = None
        with _opened(old.path, os.O_RDONLY) as file:
            copied = self._copy(file, set())
            old.path.unlink(missing_ok=True)
            # A writer that only seemed to be gone either finds its pack removed, or has appended before that.
            self._copy(file, copied)
        self._packs.pop(old.path.name, None)

    def _copy(self, file: int, copied: set[int]) -> set[int]:
        """Append the entries of another pack that are not copied yet. Return the offsets of all copied entries."""
        found = _Pack(Path())
        found.read_on(file)
        copies: list[tuple[int, str, _Pack, int]] = []
        for name, offsets in found.by_name.items():
            for offset in offsets:
                content = os.pread(file, found.sizes[offset], offset)
                entry = _entry_of(content)
                if offset not in copied and entry is not None and entry.is_kept:
                    copies.append((offset, name, *self._append(name, content[entry.begin :])))
        for offset, name, pack, copy in copies:
            if os.pread(file, 1, offset + len(_MAGIC)) == _DELETED:
                self._mark(pack, copy, name)
        return copied | found.sizes.keys()


_instances: weakref.WeakSet[Packs] = weakref.WeakSet()


def _start_over() -> None:
    for packs in _instances:
        packs.start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)


@contextmanager
def _opened(path: Path, how: int) -> Iterator[int]:
    file = os.open(path, how | getattr(os, "O_BINARY", 0))
    try:
        yield file
    except BaseException:
        with suppress(OSError):
            os.close(file)
        raise
    os.close(file)  # may fail if the file system defers writes


def _size(path: Path) -> int:
    """Return the bytes of a file, 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _encoded(name: str, content: bytes) -> bytes:
    header = _FIXED.pack(_MAGIC, _KEPT, len(name), len(content)) + name.encode("ascii")
    return header + _checksum(header) + content


def _entry_of(content: bytes) -> _Entry | None:
    """Return the entry that begins with these bytes; ``None`` if they do not begin with a sound header."""
    if len(content) < _FIXED.size or not content.startswith(_MAGIC):
        return None
    _, mark, length, size = _FIXED.unpack_from(content)
    end = _FIXED.size + length
    header = content[:end]
    if content[end : end + 8] != _checksum(header):
        return None
    return _Entry(header[_FIXED.size :].decode("ascii", "replace"), mark != _DELETED, end + 8, end + 8 + size)


def _checksum(header: bytes) -> bytes:
    """Return a checksum of a header without the byte that marks a deleted entry."""
    at = len(_MAGIC)
    return xxhash.xxh3_64_digest(header[:at] + header[at + 1 :])


def _search(file: int, offset: int, size: int) -> int | None:
    """Return the next offset at which a header may begin."""
    while offset < size:
        at = os.pread(file, _BLOCK + len(_MAGIC), offset).find(_MAGIC)
        if at >= 0:
            return offset + at
        offset += _BLOCK
    return None
