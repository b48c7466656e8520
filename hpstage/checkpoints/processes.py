"""Processes of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def is_alive(pid: int, start: str = "") -> bool:
    """Is there a process of this id, and is it the one that began at ``start``, if that is told?

    One that has ended and was not waited for still counts.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not start or start_of(pid) in (start, "")


def start_of(pid: int) -> str:
    """When a process began, on the clock of the host's boot: tells it from all others that have had its id since then.

    Empty where the system does not tell.
    """
    try:
        # The name, in parentheses, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def host_identity() -> str:
    """Names the place where a process id means one process: host, boot, and space of process ids."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        place = Path(path)
        try:
            parts.append(os.readlink(place) if place.is_symlink() else place.read_text().strip())
        except OSError:
            parts.append("")
    return "/".join(parts)
