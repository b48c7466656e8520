"""The driver's script, which training processes import as multiprocessing has its processes do.

What it does at its top (a default dtype, a folder on ``sys.path``) then holds where its trainable trains. The Dask
workers between them do without: each would load torch once more, for nothing.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import spawn
from typing import Any

_DASK_WORKER = "Dask Worker process (from Nanny)"
"""How Dask's nanny calls the process of its worker."""
_KEYS = ("init_main_from_name", "init_main_from_path")


def this_script() -> dict[str, str]:
    """What :func:`import_script` is to import in another process; nothing in a console or a notebook."""
    data: dict[str, Any] = spawn.get_preparation_data("")
    return {key: data[key] for key in _KEYS if key in data}


def import_script(script: dict[str, str]) -> None:
    """Import a script as the main module of this process, which knows by its ``__name__`` that it is not to run.

    Raises:
        SystemExit: it has come to the start of the search, or leaves with a status of its own.
    """
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # as in any process of multiprocessing while it does this
    try:
        spawn.prepare(script)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
        # It is not to be imported, it says; and what was sent of it does not need it.
    finally:
        del process._inheriting


def leave_it_to_training_processes() -> None:
    """Workers that are started by this process from now on do not import its script.

    Dask has no setting for this. It is sound, since Dask sends by value what the script defines.
    """
    prepare = spawn.get_preparation_data
    if getattr(prepare, "__module__", None) == __name__:
        return

    def without_script(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepare(name)
        if name == _DASK_WORKER:
            for key in _KEYS:
                data.pop(key, None)
        return data

    spawn.get_preparation_data = without_script
