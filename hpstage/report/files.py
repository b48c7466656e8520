"""Files that users name: replaced atomically, so that they are never read half-written, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpstage.errors import UsageError
from hpstage.errors.text import clean


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces ``path`` on success. On failure it is removed."""
    aside = path.with_name(f".{os.getpid()}-{path.name}")  # writers may depend on the suffix
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def refusing(path: object, *, option: str = "", another: str = "file") -> Iterator[None]:
    """Raise :class:`UsageError` if ``path``, the value of an ``option``, cannot be written within."""
    try:
        yield
    except OSError as error:
        name = f"{option} {clean(path)}".lstrip()
        raise UsageError(f"cannot write to {name}: {error.strerror or error}; give another {another}") from error
