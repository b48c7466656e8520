"""open_checkpoints: open the checkpoint store at a path or URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from hpstage.checkpoints.folder import FolderCheckpoints
from hpstage.checkpoints.store import CheckpointStore
from hpstage.checkpoints.url import UrlCheckpoints
from hpstage.errors import UsageError
from hpstage.store import plugins
from hpstage.store.redaction import shown

# At least two letters: "c:" is a drive. Two colons chain file systems of fsspec.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?:://|::)")


def open_checkpoints(
    location: str | os.PathLike[str],
    workload: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    sweep: bool = True,
) -> CheckpointStore:
    """Open the checkpoints of ``workload`` at ``location``: a folder, or a URL of a plugin's scheme or one of fsspec's.

    A path or ``file://`` URL is a folder, with the features of a file system that object stores do not have. Nothing is
    written yet: use :meth:`CheckpointStore.check` to find out whether it can be.

    Args:
        storage_options: options of fsspec's driver, for URLs only.
        sweep: let a folder remove the remains of dead writers.

    Raises:
        UsageError: the URL is invalid, its driver is not installed, or options were given for a folder.
    """
    text = os.fspath(location)
    match = _SCHEME.match(text)
    if match is None:
        return open_folder(text, workload, storage_options=storage_options, sweep=sweep)
    scheme = match[1].lower()
    if scheme not in plugins.names("hpstage.checkpoints"):
        return UrlCheckpoints(text, workload, storage_options=storage_options)
    open_one = plugins.opener("hpstage.checkpoints", scheme, CheckpointStore)  # type: ignore[type-abstract]
    return open_one(text, workload, storage_options=storage_options, sweep=sweep)


def open_folder(
    location: str, workload: str, *, storage_options: Mapping[str, Any] | None, sweep: bool
) -> CheckpointStore:
    """Open the checkpoints in a folder, given as a path or as ``file://``. Arguments as :func:`open_checkpoints`."""
    if storage_options:
        raise UsageError(f"{shown(location)!r} is a folder, which has no storage_options; omit them")
    return FolderCheckpoints(_path(location) if _SCHEME.match(location) else location, workload, sweep=sweep)


def _path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{shown(url)!r} is not a URL ({error}); write file:///path/to/folder") from None
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise UsageError(
            f"{shown(url)!r} names a file on another host, or no absolute path; write file:///path/to/folder"
        )
    return path
