"""Watches what the user's code reads from outside while it trains: files, folders, environment variables, arguments.

Python notifies audit hooks of every file that it opens, by any function and under any name. A file that a C library
opens by itself is not seen; neither is a file of which only the existence is checked.
"""

from __future__ import annotations

import fcntl
import functools
import os
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self
from urllib.parse import unquote

from hpstage.training.code.owner import of_user
from hpstage.training.code.source import source_at
from hpstage.training.identity.files import content_of

_DESCRIPTORS = "/proc/self/fd"
_READ, _UPDATED, _LISTED, _WRITTEN = "read", "updated", "folders", "written"
_SOURCE = "source"
_VARIABLE, _EXPORTED, _ARGUMENT = "variables", "exported", "arguments"
_WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Packages that read source code and compiled code, and Dask's packages, whose threads read files for Dask.
_FOR_OTHERS = frozenset(
    (
        *("importlib", "linecache", "inspect", "tokenize", "zipimport", "torch._dynamo", "torch._inductor", "triton"),
        *("distributed", "tornado"),
    )
)
_LOADER = "importlib._bootstrap_external"
# Parts of hpstage that read and write files of their own.
_OURS = tuple(
    f"hpstage.{name}" for name in ("checkpoints", "store", "cluster", "execution", "training.code", "training.identity")
)
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/")
_IN_MEMORY = "/dev/shm/"  # for any code that names a folder in it
_GRAIN = 10_000_000
"""Nanoseconds by which a modification may seem earlier than it is."""
_MOST = 100_000
"""Number of files that are remembered. Further files are probably samples of a data set."""

# Packages that read the command line for options of their own, such as those of a compiler.
_OWN_ARGUMENTS = frozenset(("jax", "jaxlib"))


class Watch:
    """Context within which the files and variables that the user's code reads are recorded.

    Attributes:
        read: files, by the names that the code uses, with their modification times before they were read (0: absent).
        updated: files in ``read`` that were also opened for writing.
        folders: folders whose entries were listed.
        written: files and folders that were written or made.
        variables: environment variables that the user's code has read.
        exported: environment variables that were set.
        arguments: ``sys.argv``, if the user's code has read arguments of the command line.
        shared: files that the user's code has read after they were written in earlier steps, by the names it uses.
        began: time at which the watch began, in the form of modification times (ns).
    """

    def __init__(self) -> None:
        self.read: dict[str, int] = {}
        self.updated: set[str] = set()
        self.folders: set[str] = set()
        self.written: set[str] = set()
        self.variables: set[str] = set()
        self.exported: set[str] = set()
        self.arguments: set[str] = set()
        self.shared: set[str] = set()
        self._first = self._step = 0  # start times of the first step that counts and of the present step
        self._now: set[str] = set()  # absolute paths of what the present step has written
        self.began = time.time_ns()
        self._before: Watch | None = None
        _install()

    def __enter__(self) -> Self:
        global _current, _last
        self._before, _current = _current, self
        _last = self
        if not isinstance(sys.argv, _Arguments):
            sys.argv = _Arguments(sys.argv)
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        _current, self._before = self._before, None

    def begin_step(self, *, first: bool) -> None:
        """Record that a step begins. Files written in the ``first`` step of a chain may prepare its data."""
        self._step = time.time_ns()
        self._first = self._first or (0 if first else self._step)
        self._now.clear()

    def see_again(self, kind: str, path: str, place: str) -> None:
        """Record a file that is read after an earlier step has written it: its content is in no state. Call this at
        every read, since the file may have been read before it was written.

        The modification time decides, since C libraries write files without Python's noticing.
        """
        if kind == _WRITTEN:
            self._now.add(place)
        elif kind == _READ and self._first and path not in self.shared and place not in self._now:
            is_earlier = self._first <= modified(path) < self._step - _GRAIN
            if is_earlier and not _is_systems(place) and _for_user(sys._getframe(4)):
                self.shared.add(path)

    def see(self, kind: str, path: str) -> None:
        """Record what was done with a file, folder or variable."""
        if kind == _SOURCE:
            _see_source(path)
            return
        if kind in (_READ, _UPDATED) and len(self.read) < _MOST:
            self.read[path] = modified(path)
        if kind != _READ:
            getattr(self, kind).add(path)

    def knows(self, kind: str, path: str) -> bool:
        # A source file is digested each time it is loaded, since it may have been edited.
        return kind != _SOURCE and path in getattr(self, kind)


def modified(path: str) -> int:
    """Return when a file was modified, in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except (OSError, ValueError):
        return 0


_current: Watch | None = None
_last: Watch | None = None
_children = -1
"""Descriptor of a file without a name to which forked processes write what they read; -1 before the hook is
installed."""
imported: dict[str, str] = {}
"""Digests of source files that training has loaded as modules, by absolute path. They are kept because later searches
in this process find the modules loaded already."""
not_inputs: OrderedDict[str, None] = OrderedDict()
"""Files that this process has opened last, but not for the user's code."""
_taken = 0  # number of bytes of the children's file already read
_is_child = False


@functools.cache
def _install() -> None:
    """Install the hook, once in a process: it cannot be removed."""
    global _children
    with tempfile.TemporaryFile("a+b") as file:
        _children = os.dup(file.fileno())
    os.register_at_fork(after_in_child=_forked)
    environ: Any = os.environ
    variables = _Variables(environ._data)
    environ._data = variables
    if os.supports_bytes_environ:
        bytes_environ: Any = os.environb
        bytes_environ._data = variables
    sys.addaudithook(_hook)


def _forked() -> None:
    global _current, _is_child
    _current, _is_child = _current or _last, True


def of_children(watch: Watch) -> None:
    """Add to a watch the records of processes that were forked during it."""
    global _taken
    content = os.pread(_children, max(0, os.fstat(_children).st_size - _taken), _taken) if _children >= 0 else b""
    whole = content[: content.rfind(b"\n") + 1]
    _taken += len(whole)
    for line in whole.decode("utf-8", "surrogateescape").splitlines():
        kind, _, path = line.partition("\t")
        if not watch.knows(kind, path):
            watch.see(kind, path)


def held_open() -> set[str]:
    """Return the files that this process holds open for reading, or has mapped into memory, whoever opened them.

    They show what a C library has opened by itself. Empty where the system does not report it.
    """
    found = set()
    try:
        for descriptor in os.listdir(_DESCRIPTORS):
            with suppress(OSError):
                if fcntl.fcntl(int(descriptor), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                    found.add(os.readlink(f"{_DESCRIPTORS}/{descriptor}"))
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            # Most are parts of libraries.
            lines = [line for line in maps.read().splitlines() if "/" in line and ".so" not in line]
        # Address, permissions, offset, device, inode and path. Code is mapped as executable.
        mapped = [line.split(maxsplit=5) for line in lines]
        # A shared mapping that may be written, such as SQLite's index of its log, is working memory and no input.
        found |= {line[5] for line in mapped if len(line) == 6 and "x" not in line[1] and line[1][1:] != "w-s"}
    except OSError:
        return set()
    return {path for path in found if path.startswith("/") and not _is_systems(path) and os.path.isfile(path)}


def _hook(event: str, args: tuple[Any, ...]) -> None:
    # Called for every event of the process, such as id(), of which few matter. If there is no calling frame, the
    # interpreter itself reads, for example the lines of an uncaught traceback.
    if _last is not None and event in _EVENTS and sys._getframe().f_back is not None:
        _EVENTS[event](*args)


def _opened(path: object, mode: object, flags: object) -> None:
    how = flags if isinstance(flags, int) else os.O_RDONLY
    _note(_WRITTEN if how & _WRITING else _UPDATED if how & os.O_RDWR else _READ, path)


def _see_source(place: str) -> None:
    with suppress(OSError):
        imported[place] = content_of(place) or ""


def _listed(path: object = None, *_: object) -> None:
    _note(_LISTED, "." if path is None else path)


def _connected(database: object, *_: object) -> None:
    text = _text(database)
    if text is not None and text != ":memory:":
        is_url = text.startswith("file:")
        _note(_UPDATED, unquote(text.removeprefix("file:").partition("?")[0]) if is_url else text)


_EVENTS: dict[str, Any] = {
    "open": _opened,
    "os.listdir": _listed,
    "os.scandir": _listed,
    "os.rename": lambda source, target, *_: _note(_WRITTEN, target),
    "os.mkdir": lambda path, *_: _note(_WRITTEN, path),
    "sqlite3.connect": _connected,
}


def _text(path: object) -> str | None:
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None  # a file descriptor


def _note(kind: str, path: object) -> None:
    watch, text = _current, _text(path)
    if text and kind == _READ and _is_loaded_as_module(frame := sys._getframe(3)):
        _note_source(watch, source_at(os.path.abspath(text)), frame)
        return
    if watch is None:
        # A file that hpstage reads for itself between steps, such as a state that it fetches, may still be open while
        # the next step is trained. So may a database that SQLite has closed while it holds locks on it.
        if text and kind in (_READ, _UPDATED) and not _for_user(sys._getframe(3)):
            _exclude(os.path.abspath(text))
        return
    if not text:
        return
    place = os.path.abspath(text)
    watch.see_again(kind, text, place)
    if watch.knows(kind, text):
        return
    if kind != _WRITTEN and (_is_systems(place) or not _for_user(sys._getframe(3))):
        _exclude(place)
        return
    _record(watch, kind, place if kind == _WRITTEN else text)


def _exclude(place: str) -> None:
    """Record that a file is no input. Of many such files, keep the last ones: the others are closed by now."""
    not_inputs.pop(place, None)
    not_inputs[place] = None
    if len(not_inputs) > _MOST:
        not_inputs.popitem(last=False)


def _note_source(watch: Watch | None, place: str, frame: FrameType | None) -> None:
    """Record that a module is loaded, unless the identified code names it, or training has written it."""
    if watch is None:
        if place in imported:  # loaded again
            _see_source(place)
    elif not _is_systems(place) and modified(place) < watch.began and _for_user(frame, to_load=True):
        _record(watch, _SOURCE, place)


def _is_loaded_as_module(frame: FrameType) -> bool:
    """Return whether the import system opens a source or bytecode file to run it, not to show it."""
    if frame.f_globals.get("__name__") != _LOADER or frame.f_code.co_name != "get_data":
        return False
    return frame.f_back is not None and frame.f_back.f_code.co_name == "get_code"


def _record(watch: Watch, kind: str, text: str) -> None:
    """Record an access. If this process was forked by the process that trains, also send the record to that process."""
    watch.see(kind, text)
    if _is_child and "\n" not in text:
        os.write(_children, f"{kind}\t{text}\n".encode("utf-8", "surrogateescape"))


@functools.cache
def _libraries() -> tuple[str, ...]:
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent)} - {os.sep}
    return tuple(f"{folder.rstrip(os.sep)}{os.sep}" for folder in folders) + _SYSTEM


def _is_systems(path: str) -> bool:
    if path.startswith(_IN_MEMORY):
        return False  # among the devices, but its files are ordinary ones
    return path.startswith(_libraries()) or f"{os.sep}site-packages{os.sep}" in path


def _for_user(frame: FrameType | None, *, to_load: bool = False) -> bool:
    """Return whether a file is read for the user's code: by that code, or by a library that it or hpstage calls to
    train.

    Args:
        to_load: whether the file is a module being loaded. Then the user's module that imports it does not decide,
            since hpstage may be loading that one to identify code.
    """
    for name in _callers(frame):
        if name.startswith("hpstage."):
            return not name.startswith(_OURS)
        package = name.partition(".")[0]
        if of_user(name) and not to_load:
            return True
        if not _FOR_OTHERS.isdisjoint((package, ".".join(name.split(".")[:2]))) and not (
            to_load and package == "importlib"
        ):
            return False
    return True


def _by_user(frame: FrameType | None) -> bool:
    """Return whether the user's own code reads a variable. Variables that libraries read are their own settings."""
    return of_user(next((name for name in _callers(frame) if name not in ("os", "collections.abc")), None))


def _callers(frame: FrameType | None) -> Iterator[str]:
    """Yield the modules of the code that runs, innermost first."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str):  # code that is compiled from a text may have none
            yield name
        frame = frame.f_back


_copied: Iterator[bytes] = iter(())
"""Names of the variables still to be read while all of ``os.environ`` is being copied."""


class _Variables(dict[bytes, bytes]):
    """The content of ``os.environ``, which records the variables that are read. Copying all of it does not count."""

    __slots__ = ()  # training may reach this object, and attached attributes would be part of the state

    def __iter__(self) -> Iterator[bytes]:
        global _copied
        _copied = iter(list(super().__iter__()))
        return super().__iter__()

    def __getitem__(self, name: bytes) -> bytes:
        global _copied
        if _current is not None and next(_copied, None) != name:
            _copied = iter(())
            text = os.fsdecode(name)
            if text not in _current.variables and _by_user(sys._getframe(1)):
                _record(_current, _VARIABLE, text)
        return super().__getitem__(name)

    def __setitem__(self, name: bytes, value: bytes) -> None:
        if _current is not None:
            _record(_current, _EXPORTED, os.fsdecode(name))
        super().__setitem__(name, value)


class _Arguments(list[str]):
    """The content of ``sys.argv``, which records that arguments are read, also by slices, as argparse does. The first
    item is not an argument."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        self._note()
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        if at != 0:
            self._note()
        return super().__getitem__(at)

    def __reduce_ex__(self, protocol: object) -> Any:
        return list, (list(super().__iter__()),)

    def _note(self) -> None:
        frame = sys._getframe(2)
        own = frame.f_globals.get("__name__", "").partition(".")[0] in _OWN_ARGUMENTS
        if _current is not None and not _current.arguments and not own and _for_user(frame):
            _record(_current, _ARGUMENT, "sys.argv")
