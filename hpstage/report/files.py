"""Files that are replaced atomically, so that they are never read half-written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces ``path`` on success. On failure it is removed."""
    aside = path.with_name(f".{os.getpid()}-{path.name}")  # writers may depend on the suffix
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
