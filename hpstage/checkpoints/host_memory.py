"""The memory that is actually available, given the limits of the host and of control groups (a container, a Slurm job).

Linux reports these limits. On other systems they are unknown, and there always seems to be room.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHARERS = "HPSTAGE_WORKERS_ON_THIS_HOST"
"""Environment variable with the number of workers that share the memory of this host."""
LIVE = "HPSTAGE_LIVE_MEMORY"
"""Environment variable with the maximum bytes of states that a training process keeps in memory."""

_MOST = 2 << 30
# The workers of a host keep states in 1/_SHARE of all memory, and leave 1/_FREE of it free when they copy a state.
_SHARE, _FREE = 4, 16
# Memory that must be available before a state is copied, in states: the copy, a state that is being verified, and a
# state that is being loaded, with its model.
_STATES = 4
# States of fewer bytes always have room: checking would take longer than copying them.
_SMALL = 1 << 20
# A higher limit means that there is no limit.
_ENDLESS = 1 << 60


class HostMemory:
    """The memory that training processes on this host may use.

    Args:
        sharers: number of processes that share it; by default, the value of the environment variable.
        proc, groups: folders in which Linux reports memory.
    """

    def __init__(
        self, sharers: int | None = None, *, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._sharers = int(os.environ.get(SHARERS, "1")) if sharers is None else sharers
        self._meminfo = proc / "meminfo"
        self._limits = list(_limits(proc, groups))
        host = _table(self._meminfo).get("MemTotal:")
        totals = [limit for limit, _, _ in self._limits] + ([] if host is None else [host << 10])
        self.total = min(totals, default=None)
        """Total bytes; ``None`` if unknown."""

    def live_bytes(self) -> int:
        """Return the default for the maximum bytes of states that a training process keeps in memory."""
        return min(_MOST, self.part(_SHARE, _MOST))

    def part(self, of: int, default: int) -> int:
        """Return the fraction ``1 / of`` of this process's share of all memory; ``default`` if the total is unknown."""
        return default if self.total is None else self.total // (of * self._sharers)

    def available(self) -> int | None:
        """Return the bytes that can be allocated without taking memory from other processes; ``None`` if unknown."""
        host = _table(self._meminfo).get("MemAvailable:")
        left = [] if host is None else [host << 10]
        for limit, used, stat in self._limits:
            with suppress(OSError, ValueError):
                table = _table(stat)
                # In the older tables, numbers without this prefix leave out subgroups.
                prefix = "total_" if "total_inactive_file" in table else ""
                cached = table.get(f"{prefix}inactive_file", 0) + table.get(f"{prefix}active_file", 0)
                left.append(limit - int(used.read_text()) + cached)
        return min(left, default=None)

    def has_room(self, size: int) -> bool:
        """Whether every training process here could now copy a state of ``size`` bytes and load another one."""
        if size < _SMALL or self.total is None or (available := self.available()) is None:
            return True
        return available - self.total // _FREE >= _STATES * size * self._sharers


def give_back() -> None:
    """Return freed memory of this process to the system, as far as its C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, Path, Path]]:
    """Yield for each control group of this process its limit, and the files with its used and its cached bytes."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, most, used = groups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, most, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A container may see its own group as the root, under the path that it has outside.
        group = root / path.lstrip("/")
        while True:
            with suppress(OSError, ValueError):  # no such group, or "max"
                limit = int((group / most).read_text())
                if limit < _ENDLESS:
                    yield limit, group / used, group / "memory.stat"
            if group == root:
                break
            group = group.parent


def _table(file: Path) -> dict[str, int]:
    """Return the numbers by name; none if there is no such file."""
    try:
        return {words[0]: int(words[1]) for line in file.read_text().splitlines() if (words := line.split())}
    except (OSError, ValueError, IndexError):
        return {}
