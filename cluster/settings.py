"""Dask settings for training that takes hours, as environment variables for processes still to be started.

A variable that is already set is not changed, except for the folder of temporary files: theirs is in it.
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
    # How long a frozen worker keeps its chain. Less would kill workers during a long call into C.
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    # The driver takes back the chain of a lost worker. With 0, Dask would fail its task first, as if its code were bad.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "3",
}
_WORKER = {
    **_BOTH,
    # With steps of 1 ms the profiler takes 2 to 3 % of a core.
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
}


def dask_folder() -> str:
    """Return a private folder of this account inside Dask's temporary directory; create it if it is missing.

    A scheduler, a worker and its training processes import modules from it first. By default, Dask uses a folder with a
    fixed name there, even if another account has created that folder, and may replace the files in it.
    """
    return private_folder(dask.config.get("temporary-directory"))


def scheduler_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` with the settings for a scheduler."""
    return {**_SCHEDULER, **environment, _FOLDER: dask_folder()}


def worker_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` with the settings for a worker. Its training processes get further variables."""
    return {**_WORKER, **environment, _FOLDER: dask_folder()}
