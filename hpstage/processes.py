"""Processes of this host."""

from __future__ import annotations

import os


def is_alive(pid: int) -> bool:
    """Is there a process of this id? One that has ended and was not waited for still counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
