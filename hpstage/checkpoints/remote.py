"""Remote: the files below a URL, through fsspec, with bounded retries and clear errors.

fsspec and its drivers are imported on first use. Drivers raise arbitrary errors; this module raises only ``OSError``,
:class:`UsageError` before anything is done, and exceptions of the caller's code.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from hpstage.errors import UsageError
from hpstage.store.redaction import is_secret, redacted, secrets_of, shown, shown_cause

T = TypeVar("T")

# Seconds between attempts: what fails three times is not temporary. Drivers also retry single requests.
_PAUSES = (0.2, 1.0)

# Files are written and read in pieces of this size, so that a stage of 10 GB is not in memory twice. The pieces of a
# batch are fetched concurrently, since one connection to an object store is slow.
_PIECE = 8 << 20
_BATCH = 64 << 20

# Errors that another attempt would not change.
_DEFINITE_ERRNOS = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EINVAL,
    errno.EISDIR,
    errno.EMSGSIZE,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_DEFINITE = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    NotImplementedError,
    AttributeError,
    TypeError,
    ValueError,
)


class DriverError(OSError):
    """Stands for an exception of an fsspec driver that is no ``OSError``; the original is its ``__cause__``."""


class Remote:
    """The files below ``url``. Paths are relative to it. Instances can be pickled and are thread-safe.

    All methods raise ``OSError``; ``FileNotFoundError`` and ``FileExistsError`` have their usual meaning.

    Args:
        url: of any scheme that fsspec supports.
        options: the driver's ``storage_options``. They are sent to workers with the pickled instance, but never appear
            in a message.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url
        self._options = dict(options)
        self._opened: tuple[int, Any, str] | None = None

    def connect(self) -> None:
        """Load the driver, which may already connect to the service. May also raise :class:`UsageError`."""
        self._open()

    @property
    def url(self) -> str:
        """The part of the URL that may be shown."""
        return shown(self._url)

    def read(self, path: str) -> bytes:
        files, full = self._at(path)
        content: bytes = self.attempt(lambda: files.cat_file(full))
        return content

    def open(self, path: str) -> RemoteReader:
        return RemoteReader(self, path)

    def size(self, path: str) -> int:
        files, full = self._at(path)
        return int(self.attempt(lambda: files.info(full)["size"]))

    def read_ranges(self, path: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of several ranges ``[start, stop)``, fetched concurrently if the driver can."""
        files, full = self._at(path)
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        contents: list[bytes] = self.attempt(
            lambda: files.cat_ranges([full] * len(ranges), starts, stops, on_error="raise")
        )
        return contents

    def write(self, path: str, content: bytes) -> None:
        """Write a file, replacing an existing one."""
        files, full = self._at(path)
        self._below_folders(path, lambda: files.pipe_file(full, content))

    def write_new(self, path: str, content: bytes) -> None:
        """Write a file if it does not exist; otherwise raise ``FileExistsError`` and change nothing.

        Atomic if the service compares and puts in one step (S3, GCS, Azure); otherwise concurrent writers may overwrite
        each other. After a lost connection it may be unknown whether the file was written.
        """
        files, full = self._at(path)
        try:
            self._below_folders(path, lambda: files.pipe_file(full, content, mode="create"))
        except OSError as error:
            if not (error.errno == errno.ENOSYS or isinstance(error.__cause__, NotImplementedError)):
                raise
            # An S3-compatible server without conditional writes.
            if self.attempt(lambda: files.exists(full)):
                raise FileExistsError(errno.EEXIST, "the file exists", path) from None
            self.write(path, content)

    @contextmanager
    def create(self, path: str) -> Iterator[RemoteWriter]:
        """Create a file, written piece by piece; complete if the context is left without an error. Not retried."""
        files, full = self._at(path)
        with _as_oserror():
            file = self._below_folders(path, lambda: files.open(full, "wb"))
        try:
            yield RemoteWriter(file)
            with _as_oserror():
                file.close()
        except BaseException:
            # Closing would publish the incomplete file.
            with suppress(Exception):
                file.discard()
                file.closed = True
            with suppress(Exception):
                file.close()
            raise

    def remove(self, path: str) -> None:
        """Remove a file; a missing file is not an error."""
        files, full = self._at(path)
        with suppress(FileNotFoundError):
            self.attempt(lambda: files.rm_file(full))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of each file below the URL, or a folder there, by path in it; empty if the bucket or folder
        does not exist."""
        files, root = self._at(folder) if folder else self._open()
        try:
            found = self.attempt(lambda: files.find(root, detail=True))
        except FileNotFoundError:
            return {}
        prefix = root.rstrip("/").lstrip("/") + "/"
        return {
            path.lstrip("/").removeprefix(prefix if prefix != "/" else ""): int(info["size"] or 0)
            for path, info in found.items()
        }

    def modified(self, path: str) -> float:
        """Return when a file was written, in seconds, by the service's clock."""
        files, full = self._at(path)
        found: datetime = self.attempt(lambda: files.modified(full))
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()

    def now(self) -> float:
        """Return the service's current time, comparable to :meth:`modified`; this host's clock may be wrong."""
        probe = f".clock-{uuid.uuid4().hex}"
        self.write(probe, b"")
        try:
            return self.modified(probe)
        finally:
            self.remove(probe)

    def attempt(self, action: Callable[[], T]) -> T:
        """Return the result of ``action``, retrying temporary errors a few times. Raises ``OSError``."""
        # Not tenacity: the error that it keeps references its frames, and with them the state being saved.
        for pause in _PAUSES:
            try:
                with _as_oserror():
                    return action()
            except OSError as error:
                if is_definite(error):
                    raise
                time.sleep(pause)
        with _as_oserror():
            return action()

    def reason(self, error: OSError) -> str:
        """Return a description of the error on one line and without credentials."""
        shown = error.__cause__ if isinstance(error, DriverError) and error.__cause__ is not None else error
        text = " ".join((error.strerror or str(shown)).split())
        if not text or isinstance(error, DriverError):
            text = f"{type(shown).__name__}: {text}".removesuffix(": ")
        return self.redacted(text)

    def shown_cause(self, error: OSError) -> OSError | None:
        """Return the error for showing as a cause, unless its text or that of its causes contains credentials."""
        return shown_cause(error, self._url, secrets=_secrets(self._options))

    def redacted(self, text: str) -> str:
        return redacted(text, self._url, secrets=_secrets(self._options))

    def __getstate__(self) -> tuple[str, dict[str, Any]]:
        return self._url, self._options

    def __setstate__(self, state: tuple[str, dict[str, Any]]) -> None:
        self._url, self._options = state
        self._opened = None

    def _at(self, path: str) -> tuple[Any, str]:
        files, root = self._open()
        return files, f"{root.rstrip('/')}/{path}"

    def _open(self) -> tuple[Any, str]:
        """Return the driver, created once per process (connections do not survive a fork), and the root's path in
        it."""
        if self._opened is None or self._opened[0] != os.getpid():
            files, root = _driver(self._url, self._options, self.redacted)
            self._opened = (os.getpid(), files, root)
        return self._opened[1:]

    def _below_folders(self, path: str, action: Callable[[], T]) -> T:
        """Try ``action``; if real folders are missing, create them, starting with the URL's own, and try again."""
        try:
            return self.attempt(action)
        except FileNotFoundError:
            files, root = self._open()
            # One at a time: creating parents would create the bucket of a mistyped URL.
            folder = root.rstrip("/")
            for name in ["", *path.split("/")[:-1]]:
                folder = f"{folder}/{name}" if name else folder
                if "/" not in folder:  # a bucket
                    continue
                with suppress(FileExistsError), _as_oserror():
                    files.mkdir(folder, create_parents=False)
            return self.attempt(action)


class RemoteWriter:
    """A remote file being written."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        while rest:
            with _as_oserror():
                self._file.write(rest[:_PIECE])
            rest = rest[_PIECE:]


class RemoteReader:
    """A remote file, read from its start, one batch ahead."""

    def __init__(self, remote: Remote, path: str) -> None:
        self._remote = remote
        self._path = path
        self.size = remote.size(path)
        self._fetched = 0
        self._pieces: deque[memoryview] = deque()

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pieces.clear()

    def readinto(self, memory: memoryview) -> int:
        """Fill ``memory``; return the number of bytes filled, less only at the end."""
        filled = 0
        while filled < len(memory):
            if not self._pieces and not self._fetch():
                break
            piece = self._pieces.popleft()
            taken = min(len(piece), len(memory) - filled)
            memory[filled : filled + taken] = piece[:taken]
            filled += taken
            if taken < len(piece):
                self._pieces.appendleft(piece[taken:])
        return filled

    def read(self, count: int) -> bytes:
        memory = bytearray(min(count, self.size))
        with memoryview(memory) as view:
            filled = self.readinto(view)
        return bytes(memory[:filled])

    def _fetch(self) -> bool:
        """Fetch the next batch; return whether there was any."""
        stop = min(self.size, self._fetched + _BATCH)
        ranges = [(start, min(start + _PIECE, stop)) for start in range(self._fetched, stop, _PIECE)]
        if ranges:
            contents = self._remote.read_ranges(self._path, ranges)
            self._pieces.extend(memoryview(content) for content in contents if content)
            self._fetched = stop
        return bool(self._pieces)


def is_definite(error: OSError) -> bool:
    """Whether another attempt would fail in the same way."""
    shown = error.__cause__ if isinstance(error, DriverError) else error
    return isinstance(shown, _DEFINITE) or error.errno in _DEFINITE_ERRNOS


def _driver(url: str, options: Mapping[str, Any], plain: Callable[[str], str]) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the URL's path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.dircache import DirCache  # type: ignore[import-untyped]

    where = shown(url)
    try:
        # A separate instance without caching, since other processes write to the same place.
        files, root = url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or error.name or "its driver"
        raise UsageError(
            f"{where}: the driver of {where.partition(':')[0]}:// is not installed ({plain(str(error))}); pip install "
            f"{missing}"
        ) from None
    except (ValueError, TypeError) as error:
        # TypeError is how a driver refuses an option. Option values are not in its text, but redact it to be safe.
        raise UsageError(f"{where}: {plain(str(error))}; see the URL and storage_options") from None
    except Exception as error:
        # Some drivers connect immediately.
        raise DriverError(plain(str(error))) from None
    if isinstance(getattr(files, "dircache", None), DirCache):
        files.dircache = DirCache(use_listings_cache=False)
    return files, str(root)


@contextmanager
def _as_oserror() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise DriverError(str(error)) from error


def _secrets(options: Mapping[str, Any]) -> set[str]:
    """Return strings in a driver's options that may be credentials, at any depth."""
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _secrets(value)
        elif isinstance(value, str):
            found |= secrets_of(value)
            if is_secret(name):
                found.add(value)
    return found
