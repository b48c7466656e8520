"""Whether the process that wrote a file is still alive, so that leftovers of dead writers can be removed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import xxhash


def is_alive(pid: int, start: str = "") -> bool:
    """Whether a process of this id exists that started at ``start``, if given.

    A process that has ended but was not waited for still counts.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not start or start_of(pid) in (start, "")


def start_of(pid: int) -> str:
    """Return when a process started, on the clock of the host's boot. It distinguishes processes that reuse an id.

    Empty if the system does not provide it.
    """
    try:
        # The name, in parentheses, may contain anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="surrogateescape").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def host_identity() -> str:
    """Return a string that identifies the scope of process ids: host, boot, and pid namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        place = Path(path)
        try:
            parts.append(os.readlink(place) if place.is_symlink() else place.read_text().strip())
        except OSError:
            parts.append("")
    return "/".join(parts)


def writer_prefix() -> str:
    """Return the prefix of the names of files that this process writes. It shows others whether the process has
    ended."""
    return f"{host_digest()}-{os.getpid()}"


def has_died(name: str) -> bool:
    """Whether the process that wrote the file of this name is known to have ended."""
    host, _, rest = name.partition("-")
    pid = rest.partition("-")[0]
    return host == host_digest() and pid.isdigit() and not is_alive(int(pid))


def host_digest() -> str:
    """Return a digest of :func:`host_identity`."""
    return xxhash.xxh3_64_hexdigest(host_identity().encode())
