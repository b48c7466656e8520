"""Workers that die, come late or do not fit; the cluster that goes away; the driver that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster, WorkerPlugin

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor
from hpstage.cluster.admission import environment_of, refusal
from hpstage.cluster.messages import Description
from hpstage.errors import ClusterError, UsageError
from hpstage.executor import Environment
from hpstage.plan.messages import BoundaryReached, ChainEnded, WorkerJoined, WorkerLeft
from hpstage.testing.chains import chain, ended, outcome, until, workers
from hpstage.testing.toys import Counter, Gate
from tests.dask.oddities import Deadly, Measuring
from tests.dask.processes import Processes

pytestmark = pytest.mark.sampled(8)

Open = Callable[..., DaskExecutor]


@pytest.fixture(scope="module")
def cluster(nannies: LocalCluster) -> LocalCluster:
    """Workers that can be killed."""
    return nannies


@pytest.fixture(scope="module")
def client(client_of_nannies: Client) -> Client:
    return client_of_nannies


@pytest.mark.ci
def test_a_killed_worker_is_reported_as_dead_and_its_replacement_joins(
    open_executor: Open, client: Client, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    gate.shut()
    executor = open_executor(Counter(gate))
    worker, other = workers(executor)
    executor.start(worker, chain("c", 5))
    executor.start(other, chain("d", 5))
    gate.wait()
    os.kill(client.run(os.getpid, workers=[worker])[worker], signal.SIGKILL)
    reports = until(executor, lambda seen: any(isinstance(report, WorkerJoined) for report in seen))
    [left] = [report for report in reports if isinstance(report, WorkerLeft)]
    assert (left.worker, left.reason) == (worker, "died")
    assert not any(isinstance(report, ChainEnded) for report in reports)
    [joined] = [report for report in reports if isinstance(report, WorkerJoined)]
    executor.start(worker, chain("too late", 5))  # the driver did not know yet: nothing hangs on a dead address
    gate.open()
    executor.start(joined.worker, chain("again", 5))
    reports += ended(executor, "again", "d")
    assert outcome(reports, "again").outcome == "done"
    assert outcome(reports, "d").outcome == "done"


@pytest.mark.ci
def test_trying_out_a_trainable_does_not_wait_for_a_worker_killed_by_it(open_executor: Open) -> None:
    assert open_executor(Deadly()).try_out({"x": 1.0}) is None


@pytest.mark.ci
def test_workers_of_a_machine_measure_the_step_backends_at_the_same_time(open_executor: Open, tmp_path: Path) -> None:
    assert open_executor(Measuring(tmp_path)).measure({"x": 1.0}, 300.0) == {"eager": 1.5, "eager begins": 300.0}


@pytest.mark.ci
def test_trying_out_a_trainable_does_not_wait_for_workers_busy_with_another_search(
    open_executor: Open, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    gate.shut(1)
    other = open_executor(Counter(gate))
    for worker in workers(other, 2):
        other.start(worker, chain(worker, 5, 1))
    until(other, lambda seen: sum(isinstance(report, BoundaryReached) for report in seen) == 2)
    executor = open_executor()
    assert executor.try_out({"x": 1.0}) is None
    gate.open()
    until(other, lambda seen: sum(isinstance(report, ChainEnded) for report in seen) == 2)
    tried = (executor.try_out({"x": 1.0}) for _ in range(20))  # each waits some seconds for its turn
    assert next(filter(None, tried))["total"] == 0.0


def test_a_late_worker_joins_and_a_retired_worker_leaves_during_a_run(
    open_executor: Open, cluster: LocalCluster
) -> None:
    executor = open_executor()
    first = set(workers(executor))
    cluster.scale(3)
    [late] = workers(executor, 1)
    assert late not in first
    executor.start(late, chain("c", 5))
    assert outcome(ended(executor, "c"), "c").outcome == "done"
    cluster.scale(2)
    reports = until(executor, lambda seen: any(isinstance(report, WorkerLeft) for report in seen))
    assert isinstance(reports[-1], WorkerLeft)
    assert reports[-1].reason == "closed"


def test_restarted_workers_leave_cleanly_and_join_again(open_executor: Open, client: Client) -> None:
    executor = open_executor()
    [worker, _] = workers(executor)
    client.restart_workers([worker])
    reports = until(executor, lambda seen: any(isinstance(report, WorkerJoined) for report in seen))
    assert [report.reason for report in reports if isinstance(report, WorkerLeft)] == ["closed"]


@pytest.mark.ci
def test_a_terminated_worker_leaves_cleanly(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.scheduler()
        process = processes.worker(nanny=True)
        with Client(processes.address, set_as_default=False) as client:
            executor = DaskExecutor(client)
            executor.open(Counter(), FolderCheckpoints(tmp_path / "states", "w"))
            [worker] = workers(executor, 1)
            executor.start(worker, chain("c", 10**9))
            process.terminate()  # Kubernetes, Slurm and systemd ask so before they kill
            [left] = until(executor, lambda seen: len(seen) == 1)
            executor.close()
    assert isinstance(left, WorkerLeft)
    assert left.reason == "closed"


@pytest.mark.ci
def test_a_supervised_worker_saves_its_state_and_leaves_after_sigterm(tmp_path: Path) -> None:
    """As a spot instance is, or a pod that is evicted, whose worker was started by `hpstage worker`."""
    with Processes(tmp_path) as processes:
        processes.scheduler()
        process = processes.supervised_worker()
        with Client(processes.address, set_as_default=False) as client:
            executor = DaskExecutor(client)
            executor.open(Counter(), FolderCheckpoints(tmp_path / "states", "w"))
            [worker] = workers(executor, 1)
            executor.start(worker, chain("c", 10**9, 1))
            until(executor, lambda seen: any(isinstance(report, BoundaryReached) for report in seen))
            process.terminate()
            reports = until(executor, lambda seen: any(isinstance(report, ChainEnded) for report in seen))
            executor.start(worker, chain("next", 10**9, 1))  # the driver does not know yet
            reports += until(executor, lambda seen: any(isinstance(report, WorkerLeft) for report in seen))
            executor.close()
    *kept, end, left = reports
    assert isinstance(end, ChainEnded) and isinstance(left, WorkerLeft)
    assert (end.wasted_steps, left.reason) == (0, "closed")
    # None, if the notice came before the step after the first state.
    assert [r.reached.step for r in kept if isinstance(r, BoundaryReached) and r.reached.kept] in ([], [end.step])
    assert len(kept) == (end.step > 1)


DRIVER = """
import sys
from pathlib import Path
from distributed import Client
from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor
from hpstage.testing.chains import chain, workers
from hpstage.testing.toys import Counter

executor = DaskExecutor(Client(sys.argv[1]))
executor.open(Counter(), FolderCheckpoints(sys.argv[2], "w"))
for worker in workers(executor, 2):
    executor.start(worker, chain(worker, 10**9, 1))
seen = 0
while seen < 2:
    seen += len(executor.wait(1))
print("running", flush=True)
sys.stdin.read()
"""


def test_chains_of_a_killed_driver_stop_and_the_next_driver_removes_its_plugins(
    open_executor: Open, cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    client.wait_for_workers(2, timeout=120)
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.scheduler_address, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "running\n"
        driver.kill()
        driver.wait()
    for worker in client.scheduler_info(n_workers=-1)["workers"]:
        assert client.submit(pow, 2, 5, workers=[worker], pure=False).result(timeout=120) == 32

    def plugins(dask_scheduler: Any = None) -> list[str]:
        return [name for name in dask_scheduler.worker_plugins if name.startswith("hpstage-")]

    before = client.run_on_scheduler(plugins)
    open_executor(Counter())
    [mine] = client.run_on_scheduler(plugins)
    assert before and mine not in before


def test_a_driver_removes_the_plugin_of_a_dead_driver_that_workers_have_already_removed(
    open_executor: Open, client: Client
) -> None:
    """The scheduler may still know of a plugin that a worker has taken off already."""
    client.wait_for_workers(2, timeout=120)
    name = "hpstage-of-the-dead"
    client.register_plugin(WorkerPlugin(), name=name)

    def without_it(dask_worker: Any = None) -> None:
        del dask_worker.plugins[name]

    client.run(without_it)
    open_executor(Counter())

    def plugins(dask_scheduler: Any = None) -> list[str]:
        return list(dask_scheduler.worker_plugins)

    assert name not in client.run_on_scheduler(plugins)


def test_a_cluster_that_stays_without_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpstage.cluster.executor._STARTING", 0.2)
    with (
        LocalCluster(n_workers=0, dashboard_address=":0", scheduler_kwargs={"dashboard": False}) as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(ClusterError, match="no workers"),
    ):
        DaskExecutor(client).open(Counter(), None)


class Unsendable(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counter()
        self.inner.lock = threading.Lock()  # type: ignore[attr-defined]


def test_a_trainable_that_cannot_be_pickled_is_refused_by_the_name_of_its_attribute(client: Client) -> None:
    with pytest.raises(UsageError, match=r"Unsendable .* attribute 'inner\.lock'"):
        DaskExecutor(client).open(Unsendable(), None)


@pytest.mark.ci
def test_a_module_that_is_missing_on_the_workers_is_named_in_the_error(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("from hpstage.testing.toys import Counter\nclass Mine(Counter): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from only_here import Mine  # type: ignore[import-not-found]

    with pytest.raises(UsageError, match=r"No module named 'only_here'.*PYTHONPATH"):
        DaskExecutor(client).open(Mine(), None)


def test_missing_gpus_are_reported_before_anything_is_trained(client: Client) -> None:
    with pytest.raises(ClusterError, match="2 GPUs were requested, but 0 of 2 workers"):
        DaskExecutor(client, gpus=2).open(Counter(), None)


def test_workers_with_different_environments_are_refused_by_the_differing_item() -> None:
    same = {"machine": "x86_64", "threads": "1"}
    one = Description("tcp://a", "a", 1, environment=Environment({**same, "torch": "2.13.0"}))
    two = Description("tcp://b", "b", 1, environment=Environment({**same, "torch": "2.12.1"}))
    with pytest.raises(ClusterError, match=r"differ in torch \('2.13.0' on tcp://a; '2.12.1' on tcp://b\)"):
        environment_of([one, two], None)
    assert environment_of([one], None) == Environment({**same, "torch": "2.13.0"})
    assert refusal(one, Environment({**same, "torch": "2.13.0"})) is None
    assert "torch" in str(refusal(two, Environment({**same, "torch": "2.13.0"})))


def test_a_module_value_that_differs_between_processes_is_named_with_a_remedy() -> None:
    described = (Environment({"code": text}, loaded={"utl.now ~": text}) for text in ("1", "2"))
    one, two = (Description(f"tcp://{at}", "a", at, environment=found) for at, found in enumerate(described))
    with pytest.raises(
        ClusterError, match=r"computes another value of utl\.now in each process.*`stateless`.*Start identical"
    ):
        environment_of([one, two], None)


def test_workers_with_gpus_of_two_kinds_are_refused_by_the_names_of_the_gpus() -> None:
    one = Description("tcp://a", "a", 1, cuda=True, environment=Environment({"device": "cuda (NVIDIA A100)"}))
    two = Description("tcp://b", "b", 1, cuda=True, environment=Environment({"device": "cuda (NVIDIA H100)"}))
    differing = r"device \('cuda \(NVIDIA A100\)' on .*; 'cuda \(NVIDIA H100\)' on tcp://b\)"
    with pytest.raises(ClusterError, match=rf"{differing}.* Start identical workers"):
        environment_of([one, two], 2)
    assert re.search(differing, str(refusal(two, environment_of([one], 1))))


def test_workers_with_another_python_version_are_refused_with_both_versions(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpstage.cluster.worker.PYTHON", "3.9")  # of this process; the workers' are others
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(UsageError, match=f"runs Python {here}, and the search Python 3.9.*Start the workers with"):
        DaskExecutor(client).open(Counter(), None)


def test_workers_that_would_train_on_the_same_gpu_are_refused() -> None:
    """As in a LocalCUDACluster, where each worker sees all GPUs of the host, in an order that begins with its own."""

    def worker(name: str, *devices: str, host: str = "here") -> Description:
        return Description(name, host, int(name), cuda=True, environment=Environment({}), devices=devices)

    environment = environment_of([worker("1", "0"), worker("2", "1"), worker("3", "1", host="there")], 3)
    with pytest.raises(ClusterError, match="workers 1 and 2 would both train on GPU 1 of here"):
        environment_of([worker("1", "0", "1"), worker("2", "1", "2")], 2)
    environment_of([worker("1", "0", "1"), worker("2", "2", "3")], 2)
    environment_of([worker("1"), worker("2")], 2)  # which share one by intent
    assert "would both train on GPU GPU-7" in str(
        refusal(worker("2", "GPU-7"), environment, None, [worker("1", "GPU-7")])
    )
    assert refusal(worker("1", "GPU-7"), environment, None, [worker("1", "GPU-7")]) is None  # its earlier process


def test_workers_that_share_a_process_are_refused() -> None:
    with pytest.raises(ClusterError, match="share a process"):
        environment_of([Description("a", "host", 7), Description("b", "host", 7)], None)


def test_n_workers_together_with_a_client_is_refused(client: Client) -> None:
    with pytest.raises(UsageError, match="n_workers"):
        DaskExecutor(client, n_workers=3)


class Starting:
    """As an asynchronous GatewayCluster before it is awaited."""

    scheduler_address, status = None, "created"


def test_a_cluster_that_is_closed_or_not_started_is_refused() -> None:
    closed = LocalCluster(0, dashboard_address=":0", scheduler_kwargs={"dashboard": False})
    closed.close()
    with pytest.raises(UsageError, match=r"LocalCluster.* is closed; start another one"):
        DaskExecutor(closed).open(Counter(), None)
    with pytest.raises(UsageError, match="has no scheduler yet; start or await it first"):
        DaskExecutor(Starting()).open(Counter(), None)
