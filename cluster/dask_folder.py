"""dask_folder: where Dask puts temporary files, so that no other account of the host can change them.

A scheduler, a worker and its training processes import modules from this folder first. By default, Dask uses a folder
with a fixed name in the system's folder for temporary files. If another account has created that folder, Dask uses it
all the same, and that account may replace the files in it.
"""

from __future__ import annotations

import dask.config

from hpstage.training.private_folder import private_folder


def dask_folder() -> str:
    """Return a private folder of this account inside Dask's temporary directory; create it if it is missing."""
    return private_folder(dask.config.get("temporary-directory"))
