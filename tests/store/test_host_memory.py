"""The memory of a host, as Linux reports it: on hosts, in containers of both kinds, in groups within groups."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstage.checkpoints.host_memory import HostMemory, give_back

GB = 1 << 30


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def host(root: Path, total: int, available: int, groups: str) -> None:
    write(root / "proc" / "meminfo", f"MemTotal: {total >> 10} kB\nMemFree: 0 kB\nMemAvailable: {available >> 10} kB")
    write(root / "proc" / "self" / "cgroup", groups)


def memory(root: Path, sharers: int = 1) -> HostMemory:
    return HostMemory(sharers, proc=root / "proc", groups=root / "groups")


def new_group(folder: Path, most: object, used: int, cached: int = 0) -> None:
    write(folder / "memory.max", most)
    write(folder / "memory.current", used)
    write(
        folder / "memory.stat", f"anon {used - cached}\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}"
    )


def old_group(folder: Path, most: int, used: int, cached: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", most)
    write(folder / "memory.usage_in_bytes", used)
    write(folder / "memory.stat", f"inactive_file 0\ntotal_inactive_file {cached}\ntotal_active_file 0")


def test_memory_is_that_of_the_host_without_control_groups(tmp_path: Path) -> None:
    host(tmp_path, 64 * GB, 40 * GB, "0::/")
    assert (memory(tmp_path).total, memory(tmp_path).available()) == (64 * GB, 40 * GB)
    assert memory(tmp_path).live_bytes() == 2 * GB
    assert memory(tmp_path, 16).live_bytes() == GB


def test_a_control_group_limits_memory_and_its_file_cache_counts_as_free(tmp_path: Path) -> None:
    host(tmp_path, 64 * GB, 40 * GB, "0::/pod/app")
    new_group(tmp_path / "groups" / "pod" / "app", 4 * GB, 3 * GB, cached=GB)
    found = memory(tmp_path, 2)
    assert (found.total, found.available(), found.live_bytes()) == (4 * GB, 2 * GB, GB // 2)


def test_a_parent_control_group_limits_memory_if_the_inner_limit_is_max(tmp_path: Path) -> None:
    host(tmp_path, 64 * GB, 40 * GB, "0::/pod/app")
    new_group(tmp_path / "groups" / "pod", 8 * GB, 7 * GB)
    new_group(tmp_path / "groups" / "pod" / "app", "max", GB)
    assert (memory(tmp_path).total, memory(tmp_path).available()) == (8 * GB, GB)


def test_memory_limits_of_cgroups_v1_are_read(tmp_path: Path) -> None:
    host(tmp_path, 64 * GB, 40 * GB, "9:cpu:/x\n4:memory:/job/step\n0::/")
    old_group(tmp_path / "groups" / "memory" / "job", 9223372036854771712, GB)
    old_group(tmp_path / "groups" / "memory" / "job" / "step", 2 * GB, GB, cached=GB // 2)
    assert (memory(tmp_path).total, memory(tmp_path).available()) == (2 * GB, 3 * GB // 2)


def test_the_memory_limit_of_a_container_is_read_from_its_root_group(tmp_path: Path) -> None:
    host(tmp_path, 64 * GB, 40 * GB, "4:memory:/docker/0123")
    old_group(tmp_path / "groups" / "memory", 2 * GB, GB)
    assert (memory(tmp_path).total, memory(tmp_path).available()) == (2 * GB, GB)


def test_a_host_that_reports_no_memory_limit_has_room(tmp_path: Path) -> None:
    found = memory(tmp_path)
    assert (found.total, found.available()) == (None, None)
    assert found.has_room(1 << 50) and found.live_bytes() == 2 * GB


def test_free_memory_is_shared_among_workers_and_a_reserve_stays_free(tmp_path: Path) -> None:
    host(tmp_path, 16 * GB, 9 * GB, "0::/")
    assert memory(tmp_path).has_room(2 * GB)  # four of them, and a sixteenth of all
    assert not memory(tmp_path).has_room(2 * GB + 1)
    assert memory(tmp_path, 4).has_room(GB // 2) and not memory(tmp_path, 4).has_room(GB // 2 + 1)


def test_the_memory_of_this_host_is_read() -> None:
    found = HostMemory()
    available = found.available()
    assert found.total is None or (available is not None and 0 < available <= found.total)
    give_back()


# --- a real group -----------------------------------------------------------------------------------------

SEARCH = """
import sys, time
import optuna, torch, hpstage
from hpstage import schedule as s

class Fat:
    def setup(self, hp): self.x, self.tensor = 0.0, torch.zeros(27_500_000)
    def train(self, step, hp):
        self.x += hp["lr"]
        self.tensor += 1
        time.sleep(0.02)
    def evaluate(self): return {"x": self.x}
    def state_dict(self): return {"x": self.x, "tensor": self.tensor}
    def load_state_dict(self, state): self.x, self.tensor = state["x"], state["tensor"].clone()

def space(trial):
    late, last = trial.suggest_float("late", 0.1, 0.9), trial.suggest_float("last", 0.1, 0.9)
    return {"lr": s.piecewise({0: 0.1, 4: late, 8: last})}

if __name__ == "__main__":
    hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)), Fat(), space, metric="x", steps=16,
        n_trials=8, executor=hpstage.cluster.DaskExecutor(n_workers=2), store=sys.argv[1], checkpoint_budget="1 GB",
        audit="off", algorithm=hpstage.algos.SuccessiveHalving(min_steps=4, reduction_factor=2),
    )
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 1.7 GB, of either kind."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines() if sys.platform == "linux" else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = (root / "memory" if controllers else root) / path.lstrip("/") / f"hpstage-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir()
        except OSError:
            continue
        limit = folder / ("memory.limit_in_bytes" if controllers else "memory.max")
        if limit.exists():
            limit.write_text("1700000000")
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group for memory can be made here: that takes root, and a writable /sys/fs/cgroup")


@pytest.mark.slow
def test_a_search_in_a_small_control_group_is_not_killed_for_lack_of_memory(group: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # a disk: what is in memory would count, too
        search_in(group, Path(folder))
    events = next(file for name in ("memory.oom_control", "memory.events") if (file := group / name).exists())
    assert "oom_kill 0" in events.read_text().splitlines()


def search_in(group: Path, folder: Path) -> None:
    script = folder / "search.py"
    script.write_text(SEARCH)

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    ran = subprocess.run(
        [sys.executable, script, folder / "store"],
        preexec_fn=enter,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr
