"""dask_folder: where Dask puts temporary files, so that no other account of the host can change them.

A scheduler, a worker and its training processes import from there first. By default, Dask takes a folder of a known
name in the system's one for temporary files even if another account has made it, which may then replace what is in it.
"""

from __future__ import annotations

import dask.config

from hpstage.training.private_folder import private_folder


def dask_folder() -> str:
    """Return a folder of this account's alone, within the one that Dask is configured for; made if it is missing."""
    return private_folder(dask.config.get("temporary-directory"))
