"""private_folder: where this account keeps temporary files that no other account of the host can change."""

from __future__ import annotations

import os
import stat
import tempfile


def private_folder(parent: str | None = None) -> str:
    """Return a folder within ``parent`` (default: the system's folder for temporary files) that only this account can
    use. It is created if it is missing, and is the same in all processes, unless another account has created it
    first."""
    parent = parent or tempfile.gettempdir()
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
