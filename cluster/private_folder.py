"""private_folder: where Dask puts temporary files, so that no other account of the host can change them.

A scheduler, a worker and its training processes import from there first. By default, Dask takes a folder of a known
name in the system's one for temporary files even if another account has made it, which may then replace what is in it.
"""

from __future__ import annotations

import os
import stat
import tempfile

import dask.config


def private_folder() -> str:
    """Return a folder of this account's alone, within the one that Dask is configured for; made if it is missing."""
    parent: str = dask.config.get("temporary-directory") or tempfile.gettempdir()
    if not hasattr(os, "getuid"):
        return parent  # which is the account's own
    folder = os.path.join(parent, f"hpstage-{os.getuid()}")
    os.makedirs(parent, exist_ok=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            return tempfile.mkdtemp(prefix="hpstage-", dir=parent)
    return folder
