"""The local cluster: devices dealt out, and workers set up to train at full speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dask.config
import pytest
from distributed import Client

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor, launch, local_cluster
from hpstage.errors import ClusterError
from tests.dask.toys import Counter, chain, ended, outcome, workers


def test_workers_keep_freed_memory_and_are_not_profiled(client: Client) -> None:
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"):
        assert all(int(value) >= 2**28 for value in client.run(os.getenv, variable).values())
    assert set(client.run(dask.config.get, "distributed.worker.profile.enabled").values()) == {False}
    assert set(client.run(os.getenv, "OMP_NUM_THREADS").values()) == {"1"}


def test_no_gpus_means_that_workers_see_none(client: Client) -> None:
    assert set(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values()) == {""}


def test_each_worker_sees_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "visible_devices", lambda: ["3", "5"])
    with local_cluster() as cluster, Client(cluster, set_as_default=False) as client:
        assert sorted(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values()) == ["3", "5"]


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "visible_devices", lambda: ["0"])
    with pytest.raises(ClusterError, match="2 GPUs were asked for, but torch finds 1"):
        local_cluster(gpus=2)


def test_a_script_without_a_main_guard_is_told_so_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from hpstage.cluster import local_cluster\nlocal_cluster(1, gpus=0)\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert 'if __name__ == "__main__"' in done.stderr.splitlines()[-1]


def test_an_executor_without_a_client_starts_a_cluster_and_ends_it(tmp_path: Path) -> None:
    executor = DaskExecutor(n_workers=1, gpus=0)
    executor.open(Counter(), FolderCheckpoints(tmp_path, "w"))
    [worker] = workers(executor, 1)
    executor.start(worker, chain("c", 5))
    reports = ended(executor, "c")
    assert outcome(reports, "c").outcome == "done"
    cluster = executor._cluster
    assert cluster is not None
    executor.close()
    executor.close()
    assert cluster.status.name == "closed"
