"""Dask settings for training that takes hours, as environment variables to start processes with.

Variables that are already set are kept, except the folder for temporary files: a private folder in it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import dask.config

from hpstage.training.private_folder import private_folder

_FOLDER = "DASK_TEMPORARY_DIRECTORY"
_BOTH = {
    # A shorter silence means a busy process, not a dead one: code that holds the GIL looks dead to Dask.
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "30s",
}
_SCHEDULER = {
    **_BOTH,
    # Time until a frozen worker is declared dead. A shorter time would kill workers during a long call into C.
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    # The driver retries the chain of a lost worker. With 0, Dask would fail the task before, as if its code were wrong.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "3",
}
_WORKER = {
    **_BOTH,
    # With steps of 1 ms the profiler takes 2 to 3 % of a core.
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
}


def dask_folder() -> str:
    """Return a private folder of this account inside Dask's temporary directory; create it if it is missing.

    Schedulers, workers and training processes search this folder first when they import modules. Dask's default is a
    folder with a fixed name, even if another account has created it and can replace its files.
    """
    return private_folder(dask.config.get("temporary-directory"))


def scheduler_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` with the settings for a scheduler."""
    return {**_SCHEDULER, **environment, _FOLDER: dask_folder()}


def worker_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` with the settings for a worker. Its training processes get further variables."""
    return {**_WORKER, **environment, _FOLDER: dask_folder()}
