"""Importing the driver's script in training processes, as multiprocessing does.

The script's module-level code (a default dtype, a folder on ``sys.path``) thus also takes effect in training processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from types import ModuleType
from typing import Any

_KEYS = ("init_main_from_name", "init_main_from_path")


def this_script() -> dict[str, str]:
    """Return the argument of :func:`import_script` for another process; empty in a console or a notebook."""
    data: dict[str, Any] = spawn.get_preparation_data("")
    if not os.path.isfile(data.get("init_main_from_path", __file__)):
        return {}  # such as "<stdin>", if Python reads the program from a pipe
    return {key: data[key] for key in _KEYS if key in data}


def import_script(script: dict[str, str]) -> None:
    """Import a script as the main module of this process; its ``__name__`` is not ``"__main__"``.

    Raises:
        SystemExit: the script reached the start of the search, or exits with a nonzero status.
    """
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # as in any process of multiprocessing while it does this
    try:
        spawn.prepare(script)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
        # The script exits when it is imported. The trainable does not need it: its definitions were sent.
    finally:
        del process._inheriting


@contextmanager
def as_main(script: dict[str, str]) -> Iterator[ModuleType]:
    """Import a script as a training process does, and make it the main module of this process in the context."""
    before = {name: sys.modules.get(name) for name in ("__main__", "__mp_main__")}
    try:
        import_script(script)
        yield sys.modules["__main__"]
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
