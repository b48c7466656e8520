"""Files that are replaced at once, so that nobody reads half of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a file to write; when that is done, it takes the place of ``path``. What fails leaves nothing."""
    aside = path.with_name(f".{os.getpid()}-{path.name}")  # writers may go by the suffix
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
