"""Groups of processes whose memory the kernel limits, where root may make them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group, of version 1 or 2, in which what goes beyond ``limit`` bytes is killed.

    What a process has allocated before it joins is not counted.

    Raises:
        OSError: this user may not make one.
    """

    def __init__(self, name: str, limit: int) -> None:
        parent, file = (_V1, "memory.limit_in_bytes") if _V1.is_dir() else (_V2, "memory.max")
        self._path = parent / name
        self._path.mkdir()
        try:
            (self._path / file).write_text(str(limit))
        except OSError:
            self.close()
            raise

    def add(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove it. Processes that are in it are limited no more."""
        for pid in (self._path / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (self._path.parent / "cgroup.procs").write_text(pid)
        self._path.rmdir()


def can_limit() -> bool:
    try:
        MemoryGroup("hpstage-probe", 1 << 26).close()
    except OSError:
        return False
    return True
