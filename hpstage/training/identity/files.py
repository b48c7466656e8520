"""Digests of the contents of data files, where large files and large numbers of files are sampled; and the paths of
files that code reads, if they are literals or globals: initial weights of a model, tables."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dis import Instruction
from pathlib import PurePath
from types import CodeType
from typing import Any

import xxhash

from hpstage.training.code.bytecode import FROM_GLOBALS, inner, instructions_of
from hpstage.training.code.string_digest import hashed

WHOLE = 64 << 20
"""Bytes up to which a file counts by all of its content."""
_TOGETHER = 512 << 20  # total size of the files that count by all of their content
_BLOCKS, _BLOCK = 64, 64 << 10  # blocks of a larger file, which count with its size and time
_LISTED = 256
"""Number of files in a longer list whose content is read; the others count by their names."""
_LONGEST_PATH = 1024
# Suffixes of files that training writes rather than reads, and of code, which counts in its own digest.
_NO_DATA = frozenset((".log", ".out", ".err", ".lock", ".pid", ".tmp", ".py", ".pyc", ".so"))

_known: dict[tuple[int, int, int, int, bool], str] = {}
"""Digests by device, inode, size and modification time, and whether the whole file was read."""


class DataFiles:
    """The files named by values that count.

    Attributes:
        nbytes: total size of the files.
        sampled: whether any file counts only by a part or by its name.
        places: absolute paths of the files.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.sampled = False
        self.places: set[str] = set()
        self._left = _TOGETHER
        self._texts: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return sorted({os.path.basename(path) for path in self._texts})

    def text(self, path: str) -> str | None:
        """Return the text that replaces a path in a value: name and digest of the file; ``None`` if it is no data file.

        A folder counts by its name: its content may belong to another study, or be written while this one runs.
        """
        folder, name = os.path.split(path)
        if not (folder or "." in name) or len(path) > _LONGEST_PATH or "\0" in path or "\n" in path:
            return None
        if os.path.splitext(name)[1].lower() in _NO_DATA:
            return None
        place = os.path.abspath(path)
        if place not in self._texts:
            try:
                found = os.stat(path)
                if stat.S_ISDIR(found.st_mode) and folder:
                    return f"folder {name or os.path.basename(folder)}"
                if not stat.S_ISREG(found.st_mode):
                    return None
                whole = found.st_size <= min(WHOLE, self._left)
                self._texts[place] = f"file {name} {_content(path, found, whole)}"
            except OSError:
                return None
            self.places.add(place)
            self.nbytes += found.st_size
            self.sampled |= not whole
            self._left -= found.st_size if whole else 0
        return self._texts[place]

    def listed(self, values: Sequence[Any]) -> str | None:
        """Return a digest of a long list of paths, or of tuples with one path each; ``None`` for other lists."""
        first = _path_in(values[0])
        if first is None or self.text(str(first)) is None:
            return None
        paths = [_path_in(value) for value in values]
        if None in paths:
            return None
        texts = [str(path) for path in paths]
        start = len(os.path.commonpath([os.path.dirname(min(texts)), os.path.dirname(max(texts))]))
        count = min(_LISTED, len(texts))
        contents = [self.text(texts[index * len(texts) // count]) for index in range(count)]
        self.sampled |= len(texts) > _LISTED
        self.places.update(text if os.path.isabs(text) else os.path.abspath(text) for text in texts)
        others = [
            tuple(item for item in value if item is not path) if isinstance(value, tuple) else ()
            for value, path in zip(values, paths, strict=True)
        ]
        return f"{len(texts)} files {hashed(repr(([text[start:] for text in texts], others, contents)))}"

    def look_at(self, value: object, depth: int = 3) -> None:
        """Record the files named by a value, or by the items of a container."""
        if isinstance(value, str | PurePath):
            self.text(str(value))
        elif isinstance(value, Mapping | list | tuple | set | frozenset) and depth:
            items: Iterable[object] = value.values() if isinstance(value, Mapping) else value
            if not isinstance(value, list | tuple) or len(value) <= _LISTED or self.listed(value) is None:
                for item in items:
                    self.look_at(item, depth - 1)

    def digest(self) -> str:
        """Return a digest of all names and contents."""
        return hashed("\n".join(sorted(self._texts.values())))


def _path_in(value: object) -> object:
    if isinstance(value, tuple):
        return next((item for item in value if isinstance(item, str | PurePath)), None)
    return value if isinstance(value, str | PurePath) else None


def content_of(path: str) -> str | None:
    """Return a digest of a file; ``None`` if it is not a regular file.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    found = os.stat(path)
    return _content(path, found, found.st_size <= WHOLE) if stat.S_ISREG(found.st_mode) else None


def _content(path: str, found: os.stat_result, whole: bool) -> str:
    known = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, whole)
    if known not in _known:
        hasher = xxhash.xxh3_128()
        with open(path, "rb") as file:
            if whole:
                while part := file.read(1 << 20):
                    hasher.update(part)
            else:
                for number in range(_BLOCKS):
                    file.seek(number * (found.st_size - _BLOCK) // (_BLOCKS - 1))
                    hasher.update(file.read(_BLOCK))
        _known[known] = hasher.hexdigest()
    time = "" if whole else f" {found.st_mtime_ns // 10**9}"
    return f"{found.st_size} {_known[known]}{time}"


_READS = re.compile(r"load|load_\w+|open|read_\w+|imread|fromfile|from_file|memmap|genfromtxt|loadtxt|File|safe_open")
_WRITES = re.compile(r"save|save_\w+|savez|savez_compressed|savetxt|savefig|dump|write|write_\w+|tofile|to_\w+")
_NO_FILE = frozenset(("load_state_dict", "to_tensor", "to_dense", "to_sparse", "to_empty"))
_WRITING = re.compile(r"[rbt]*[wax+][bt+]*")  # modes of open()


def paths_read(code: CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield strings that may be paths of files read by ``code`` and the code nested in it.

    Files that training writes are not inputs. If code also writes files, only statements that read and do not write
    count, and paths that other statements write do not, such as the path of a checkpoint to resume from.

    Args:
        code: code of a function.
        names: the function's globals.
    """
    read, written = list[str](), set[str]()
    for part in inner(code):
        instructions = instructions_of(part)
        for scope in _statements(instructions) if _matches(_WRITES, instructions) else [instructions]:
            if _matches(_WRITES, scope):
                written.update(_texts(scope, names))
            elif _matches(_READS, scope):
                read += _texts(scope, names)
    return (path for path in read if path not in written)


def found_at(path: str, names: Mapping[str, Any]) -> str:
    """Return the path of an existing file: the path itself, else the same path relative to the folder of the code."""
    next_to_code = os.path.join(os.path.dirname(names.get("__file__") or ""), path)
    return next_to_code if not os.path.exists(path) and os.path.exists(next_to_code) else path


def _statements(instructions: Sequence[Instruction]) -> Iterator[Sequence[Instruction]]:
    start = 0
    for index, instruction in enumerate(instructions, 1):
        if instruction.opname.startswith(("STORE_", "POP_TOP", "RETURN_", "BEFORE_WITH", "LOAD_SPECIAL")):
            yield instructions[start:index]
            start = index


def _matches(pattern: re.Pattern[str], instructions: Sequence[Instruction]) -> bool:
    for instruction in instructions:
        name = instruction.argval
        if not isinstance(name, str):
            continue
        if instruction.opname == "LOAD_CONST":
            if pattern is _WRITES and _WRITING.fullmatch(name):
                return True
        elif pattern.fullmatch(name) and name not in _NO_FILE:
            return True
    return False


def _texts(instructions: Sequence[Instruction], names: Mapping[str, Any]) -> Iterator[str]:
    for instruction in instructions:
        content = instruction.argval
        if instruction.opname in FROM_GLOBALS:
            content = names.get(content)
        elif instruction.opname != "LOAD_CONST":
            continue
        if isinstance(content, str | PurePath):
            yield str(content)
