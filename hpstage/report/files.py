"""Writing files named by users: they are replaced atomically, or an error names the file that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpstage.errors import UsageError
from hpstage.errors.text import clean


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write. It replaces ``path`` on success, and is removed on failure."""
    aside = path.with_name(f".{os.getpid()}-{path.name}")  # writers may depend on the suffix
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def refusing(path: object, *, option: str = "", another: str = "file") -> Iterator[None]:
    """Raise :class:`UsageError` if ``path`` cannot be written in this context.

    Args:
        option: the option that has the path, for the error message.
        another: what to give instead, such as ``"folder"``.
    """
    try:
        yield
    except OSError as error:
        name = f"{option} {clean(path)}".lstrip()
        raise UsageError(f"cannot write to {name}: {error.strerror or error}; give another {another}") from error
