"""The local cluster: devices dealt out, and workers set up to train at full speed."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dask.sizeof import sizeof
from distributed import Client, LocalCluster

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor, devices, local_cluster
from hpstage.errors import ClusterError, UsageError
from hpstage.execution.shared_device import SHARERS
from hpstage.testing.chains import chain, ended, outcome, reached, workers
from hpstage.testing.toys import Counter
from tests.dask.processes import ROOT

pytestmark = pytest.mark.sampled(8)


def test_workers_of_a_local_cluster_run_without_dasks_profiler(client: Client) -> None:
    def profiled(dask_worker: Any = None) -> bool:
        return "profile" in dask_worker.periodic_callbacks

    assert set(client.run(profiled).values()) == {False}


@pytest.mark.usefixtures("nothing_ahead")
def test_workers_in_this_process_run_dasks_periodic_callbacks_every_five_seconds() -> None:
    def intervals(dask_worker: Any = None) -> dict[str, float]:
        return {name: callback.callback_time for name, callback in dask_worker.periodic_callbacks.items()}

    async def heartbeat(dask_worker: Any = None) -> None:
        await dask_worker.heartbeat()

    with local_cluster(1, gpus=0) as cluster, Client(cluster) as client:
        client.run(heartbeat)  # whose answer has the interval that the scheduler proposes
        (found,) = client.run(intervals).values()
        tick = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.periodic_callbacks["tick"].callback_time)
    assert (found["heartbeat"], found["tick"], found["monitor"]) == (5000, 5000, 5000)
    assert tick == 5000


class Seeing(Counter):
    """Reports which device its process sees, and how many share it."""

    def evaluate(self) -> dict[str, float]:
        return {
            "device": float(os.environ["CUDA_VISIBLE_DEVICES"] or -1),
            "sharers": float(os.environ.get(SHARERS, "0")),
        }


def seen(cluster: LocalCluster, folder: Path) -> list[tuple[float, float]]:
    """What the training process on each worker sees."""
    executor = DaskExecutor(cluster)
    with closing(executor):
        executor.open(Seeing(), FolderCheckpoints(folder, "w"))
        found = workers(executor, len(cluster.workers))
        for worker in found:
            executor.start(worker, chain(worker, 1))
        reports = ended(executor, *found)
    metrics = [reached(reports, worker)[0].metrics or {} for worker in found]
    return sorted((one["device"], one["sharers"]) for one in metrics)


def test_training_processes_of_a_cluster_with_gpus_zero_see_no_gpu(cluster: LocalCluster, tmp_path: Path) -> None:
    assert seen(cluster, tmp_path) == [(-1, 0), (-1, 0)]


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_each_worker_of_a_local_cluster_sees_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "visible_devices", lambda: ["3", "5"])
    with local_cluster() as cluster:
        assert seen(cluster, tmp_path) == [(3, 1), (5, 1)]


def test_a_request_for_more_gpus_than_present_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_devices", lambda: ["0"])
    with pytest.raises(ClusterError, match="2 GPUs were requested, but torch finds 1"):
        local_cluster(gpus=2)


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_two_workers_per_gpu_share_a_gpu_and_know_the_number_of_sharers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "visible_devices", lambda: ["3"])
    with local_cluster(workers_per_gpu=2) as cluster:
        assert seen(cluster, tmp_path) == [(3, 2), (3, 2)]


def test_workers_per_gpu_is_refused_without_a_gpu_or_with_a_given_client(client: Client) -> None:
    with pytest.raises(UsageError, match="2 workers per GPU were requested, but there is no usable GPU"):
        DaskExecutor(gpus=0, workers_per_gpu=2).open(Counter(), None)
    with pytest.raises(UsageError, match="hpstage worker --workers-per-gpu"):
        DaskExecutor(client, workers_per_gpu=2)


# With a dashboard a cluster takes a second longer to start.
BARE = """
import sys
import textwrap
sys.modules["bokeh"] = None
"""
WHERE = f"""{BARE}
import os
from pathlib import Path

Path("imported-by").open("a").write(f"{{os.getpid()}} {{os.getppid()}}\\n")

from hpstage.testing.toys import Tape

class Reporting(Tape):
    def evaluate(self):
        return {{"score": float(os.getpid())}}

if __name__ == "__main__":
    import optuna
    import hpstage
    from hpstage.cluster import DaskExecutor

    result = hpstage.optimize(
        optuna.create_study(), Reporting(), lambda trial: {{"a": trial.suggest_int("a", 1, 2)}},
        metric="score", steps=2, n_trials=2, executor=DaskExecutor(n_workers=1, gpus=0),
    )
    print(os.getpid(), int(result.best_value))
"""


def test_a_script_is_imported_by_the_training_process_and_not_by_the_dask_worker(tmp_path: Path) -> None:
    done = ran(tmp_path, WHERE)
    driver, trained = done.stdout.split()
    imported = [line.split()[0] for line in (tmp_path / "imported-by").read_text().splitlines()]
    assert imported == [driver, trained], done.stderr


SEARCH = f"""{BARE}
from hpstage.testing.toys import Tape

def search():
    import optuna
    import hpstage
    from hpstage.cluster import DaskExecutor

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    hpstage.optimize(
        optuna.create_study(), Tape(), lambda trial: {{"a": trial.suggest_int("a", 1, 2)}},
        metric="score", steps=2, n_trials=2, executor=DaskExecutor(n_workers=1, gpus=0),
    )
    print("found")
"""


def ran(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_script_without_a_main_guard_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    done = ran(tmp_path, f"{SEARCH}\nsearch()\n")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    line = len(SEARCH.splitlines()) + 2
    assert last.startswith(
        "hpstage.errors.UsageError: training processes import your script, and would start the search again at line "
        f"{line};"
    )
    assert last.endswith('put the call that starts the search under `if __name__ == "__main__":`')
    assert not (tmp_path / ".hpstage").exists()


def test_the_first_training_process_detects_an_ineffective_main_guard(tmp_path: Path) -> None:
    done = ran(tmp_path, f"{SEARCH}\nif Tape is not None:\n    search()\n")
    assert done.returncode == 1
    assert "UsageError: the trainable cannot be set up on worker" in done.stderr
    assert "importing the script starts the search again; put the call that starts the search under" in done.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(
            'if __name__ == "__main__":\n    search()\n', marks=pytest.mark.slow
        ),  # as of the first script here
        'if __name__ != "__main__":\n    raise SystemExit\nsearch()\n',
        pytest.param(
            'def main():\n    search()\n\nif __name__ == "__main__":\n    for _ in range(1):\n        main()\n',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_kind_of_main_guard_is_accepted(start: str, tmp_path: Path) -> None:
    done = ran(tmp_path, f"{SEARCH}\n{start}")
    assert done.stdout == "found\n", done.stderr


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_a_dask_executor_without_a_client_starts_and_closes_a_cluster(tmp_path: Path) -> None:
    executor = DaskExecutor(n_workers=1, gpus=0)
    executor.open(Counter(), FolderCheckpoints(tmp_path, "w"))
    [worker] = workers(executor, 1)
    executor.start(worker, chain("c", 5))
    reports = ended(executor, "c")
    assert outcome(reports, "c").outcome == "done"
    cluster = executor._place.cluster
    assert cluster is not None
    executor.close()
    executor.close()
    assert cluster.status.name == "closed"


BEATING = f"""{BARE}
from distributed import Client, WorkerPlugin

import optuna
import hpstage
from hpstage.cluster import DaskExecutor, local_cluster
from hpstage.testing.toys import Tape

class Beats(WorkerPlugin):
    name = "beats"

    def setup(self, worker):
        async def beat():
            while worker.status.name == "running":
                await worker.heartbeat()
        self.tasks = [worker.loop.asyncio_loop.create_task(beat()) for _ in range(20)]

if __name__ == "__main__":
    with local_cluster(1, gpus=0) as cluster, Client(cluster) as client:
        client.register_plugin(Beats())
        hpstage.optimize(
            optuna.create_study(), Tape(), lambda trial: {{"a": trial.suggest_int("a", 1, 2)}},
            metric="score", steps=2, n_trials=2, executor=client,
        )
"""


@pytest.mark.ci
def test_a_heartbeat_interrupted_by_closing_the_cluster_is_not_logged(tmp_path: Path) -> None:
    done = ran(tmp_path, BEATING)
    assert done.returncode == 0, done.stderr
    assert "heartbeat" not in done.stdout + done.stderr


def test_the_event_loop_of_a_local_cluster_does_not_change_pythons_random_state(client: Client) -> None:
    before = random.getstate()
    client.run(lambda: list(range(100)))  # messages of lists so long that Dask samples them
    assert sizeof(list(range(100))) > 0
    assert random.getstate() == before


LOOKING = """
import sys
from urllib.error import HTTPError
from urllib.request import urlopen

import hpstage

with hpstage.local_cluster(1, gpus=0) as cluster:
    base = cluster.dashboard_link.rpartition("/")[0]
    assert "hpstage_" in urlopen(f"{base}/metrics").read().decode()
    assert "bokeh" not in sys.modules
    plots = urlopen(f"{base}/individual-plots.json").read().decode()
    assert "individual-hpstage-tree" in plots and "bokeh" in sys.modules
    for page in ("hpstage", "status"):
        assert urlopen(f"{base}/{page}").status == 200
    try:
        urlopen(f"{base}/nowhere")
    except HTTPError as error:
        print(error.code)
"""


def test_bokeh_is_imported_only_when_a_dashboard_page_is_requested(tmp_path: Path) -> None:
    done = ran(tmp_path, 'if __name__ == "__main__":\n' + textwrap.indent(LOOKING, "    "))
    assert done.stdout == "404\n", done.stderr


@pytest.mark.parametrize("taken", ["", "import socket; taken = socket.socketpair()"])
@pytest.mark.ci
def test_a_search_runs_in_a_service_without_standard_streams(taken: str, tmp_path: Path) -> None:
    script = (
        f'{SEARCH}\nif __name__ == "__main__":\n    {taken or "pass"}\n    search()\n    open("found", "w").close()\n'
    )
    (tmp_path / "script.py").write_text(script)
    subprocess.run(
        ["sh", "-c", 'exec "$0" script.py <&- >&- 2>&-', sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        timeout=300,
        check=True,
    )
    assert (tmp_path / "found").exists()


def test_a_program_piped_to_python_can_search_with_an_odd_sys_path_and_blocked_sigchld(
    tmp_path: Path,
) -> None:
    start = """
import pathlib, signal, sys
sys.path.append(pathlib.Path.cwd())
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
search()
"""
    done = subprocess.run(
        [sys.executable],
        input=SEARCH + start,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "found\n", done.stderr


@pytest.mark.usefixtures("nothing_ahead")
def test_heartbeat_errors_of_an_idle_local_cluster_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with local_cluster(1, gpus=0):
        logging.getLogger("distributed.worker").error("Failed to communicate with scheduler during heartbeat.")
        logging.getLogger("distributed.worker").error("something else")
    assert "heartbeat" not in caplog.text
    assert "something else" in caplog.text
