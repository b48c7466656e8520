"""Gangs on Dask: several workers train one chain, to the bits of one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from distributed import Client, Worker
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
import hpstage.torch
from hpstage import schedule as s
from hpstage.cluster import DaskExecutor, local_cluster
from hpstage.cluster.worker import TrainingPlugin
from hpstage.plan.facts import ChainId, ChainLost, ChainStarted, StateReached, WorkerId
from hpstage.plan.messages import Boundary, BoundaryReached, Chain, ChainEnded, Report, Stage
from hpstage.schedule.forms import Constant
from hpstage.testing.chains import NODE, chain, key, until, workers

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Net(hpstage.torch.TorchTrainable):
    device = "cpu"
    data_version = "1"
    batch_size = 16
    virtual_nodes = 4

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=hp["lr"])

    def dataset(self) -> Any:
        x = torch.randn(96, 6, generator=torch.Generator().manual_seed(5))
        return TensorDataset(x, (x.sum(1) > 0).long())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        seconds, _, until = os.environ.get("PAUSE", "0").partition(" ")
        if not os.path.exists(until):
            time.sleep(float(seconds))
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = self.dataset().tensors
        return {"loss": nn.functional.cross_entropy(model(x), y).double().item()}


def space(trial: optuna.Trial) -> dict[str, Any]:
    """One trunk, then four lines."""
    return {"lr": s.piecewise({0: 0.01, 12: trial.suggest_categorical("late", [0.01, 0.003, 0.001, 0.0003])})}


def search(trainable: Any, steps: int = 24, every: int = 6, **options: Any) -> Any:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"late": [0.01, 0.003, 0.001, 0.0003]}, seed=0))
    return hpstage.optimize(study, trainable, space, metric="loss", steps=steps, checkpoint_every=every, **options)


def kept(result: Any) -> dict[str, str]:
    return {
        fact.kept.key: fact.kept.digest
        for fact in result.journal
        if isinstance(fact, StateReached) and fact.kept is not None
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return kept(search(Net(), executor=hpstage.InlineExecutor(), store=tmp_path_factory.mktemp("alone")))


def widths(result: Any) -> list[int]:
    return [1 + len(fact.gang) for fact in result.journal if isinstance(fact, ChainStarted)]


def set_pause(seconds: str, dask_worker: Worker) -> None:
    """For the processes that train for this worker, not for all of this process: these would not be forked then."""
    dask_worker.variables = {**dask_worker.variables, "PAUSE": seconds}


@pytest.fixture
def slow(client: Client) -> Iterator[Client]:
    """The shared cluster of two workers, on which a step takes long enough that a second one pays."""
    client.run(set_pause, "0.02")
    yield client
    client.run(set_pause, "0")


class Widening(DaskExecutor):
    """Makes a file when the first gang starts."""

    def __init__(self, client: Client, file: Path) -> None:
        super().__init__(client)
        self._file = file

    def start(self, worker: WorkerId, chain: Chain) -> None:
        if chain.gang:
            self._file.touch()
        super().start(worker, chain)


class Killing(DaskExecutor):
    """Kills the training process of a worker of the first gang, after it has kept a state."""

    def __init__(self, client: Client, who: str) -> None:
        super().__init__(client)
        self.killed: WorkerId | None = None
        self._client = client
        self._who = who
        self._gangs: dict[ChainId, tuple[WorkerId, ...]] = {}

    def start(self, worker: WorkerId, chain: Chain) -> None:
        self._gangs[chain.id] = (worker, *chain.gang)
        super().start(worker, chain)

    def wait(self, timeout: float | None) -> list[Report]:
        reports = super().wait(timeout)
        for report in reports:
            has_kept = isinstance(report, BoundaryReached) and report.reached.kept is not None
            if has_kept and report.reached.workers == 2 and self.killed is None:
                self.killed = self._gangs[report.reached.chain][self._who == "follows"]
                self.act(self.killed)
        return reports

    def act(self, worker: WorkerId) -> None:
        self._client.run(kill_training, workers=[worker])


def kill_training(dask_worker: Worker, how: int = signal.SIGKILL) -> None:
    for plugin in dask_worker.plugins.values():
        if isinstance(plugin, TrainingPlugin):
            os.kill(plugin.site._trainer.pid, how)


def stop_training(dask_worker: Worker) -> None:
    kill_training(dask_worker, signal.SIGSTOP)


STEPS = {"lr": Constant(0.01)}


def of_gang(name: str, *gang: WorkerId) -> Chain:
    """Two steps from the beginning."""
    return Chain(
        id=ChainId(name),
        source=None,
        initial={"lr": 0.01},
        stages=(Stage(NODE, 0, 2, STEPS, b""),),
        boundaries=(Boundary(NODE, 2, key(2), evaluate=True, keep=True),),
        gang=gang,
    )


def end_of(executor: DaskExecutor) -> ChainEnded:
    reports = until(executor, lambda seen: any(isinstance(report, ChainEnded) for report in seen), 100.0)
    return next(report for report in reports if isinstance(report, ChainEnded))


@pytest.mark.ci
def test_a_gang_does_not_wait_for_a_worker_that_trains_for_another_search(open_executor, run):
    gangs, (first, second) = open_executor(Net()), run.workers
    workers(gangs)
    run.gate.shut()
    run.executor.start(second, chain("held", 4))
    run.gate.wait()
    gangs.start(first, of_gang("early", second))
    ended = end_of(gangs)
    assert (ended.outcome, ended.wasted_steps) == ("apart", 0)
    assert f"worker {second} could not train with others: it is busy with another search" == ended.message
    run.gate.open()
    gangs.start(first, of_gang("late", second))
    assert end_of(gangs).outcome == "done"


@pytest.mark.slow
def test_gangs_of_two_searches_that_need_each_others_workers_do_not_deadlock(open_executor, run):
    """Each is led by a worker that the other wants to follow."""
    first, second = run.workers
    searches = {first: (open_executor(Net()), second), second: (open_executor(Net()), first)}
    run.gate.shut()
    for number, worker in enumerate(run.workers):
        run.executor.start(worker, chain(f"held {number}", 4))
    for executor, _ in searches.values():
        workers(executor)
    for leads, (executor, follows) in searches.items():
        executor.start(leads, of_gang(f"led by {leads}", follows))
    run.gate.open()
    for executor, _ in searches.values():
        assert end_of(executor).outcome in ("done", "apart")


class Losing(Killing):
    """Retires the leader of the first gang."""

    def __init__(self, client: Client, how: str) -> None:
        super().__init__(client, "leads")
        self._how = how
        self.retiring: threading.Thread | None = None

    def act(self, worker: WorkerId) -> None:
        if self._how == "silent":
            self._client.run(stop_training, workers=[worker])
        # In a thread, as another client would: the others get more to train at that time.
        self.retiring = threading.Thread(target=self._client.retire_workers, args=([worker],))
        self.retiring.start()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at once", "silent"])
def test_workers_of_a_gang_whose_leader_leaves_are_not_blamed_for_the_lost_chain(
    how, monkeypatch, alone, tmp_path, caplog
):
    """Also where it leaves without a report, so that its follower is ended: the follower's next chain still runs."""
    monkeypatch.setenv("PAUSE", "0.05")
    with local_cluster(3, gpus=0) as cluster, Client(cluster, set_as_default=False) as client:
        executor = Losing(client, how)
        result = search(Net(), executor=executor, verify="off", store=tmp_path)
        assert executor.retiring is not None
        executor.retiring.join()
    assert not [fact for fact in result.journal if isinstance(fact, ChainLost) and fact.blames]
    if how == "at once":
        assert "its training process" not in caplog.text  # nobody had to be ended
    check_equal(result, alone)


def check_equal(result: Any, alone: dict[str, str]) -> None:
    found = kept(result)
    assert set(alone) & set(found)
    assert {key: digest for key, digest in found.items() if key in alone} == {
        key: digest for key, digest in alone.items() if key in found
    }
    finals = {(trial.params["late"], trial.value) for trial in result.study.trials}
    assert len(finals) == 4


@pytest.mark.ci
def test_a_trunk_trained_by_a_gang_of_two_workers_equals_training_by_one_bit_for_bit(slow, alone, tmp_path):
    result = search(Net(), executor=DaskExecutor(slow), verify="off", store=tmp_path)
    assert 2 in widths(result)
    check_equal(result, alone)
    assert result.savings.steps_trained == result.savings.steps_unique == 12 + 4 * 12
    first = next(fact for fact in result.journal if isinstance(fact, StateReached) and fact.workers > 1)
    assert first.workers == 2 and 0 < first.own_seconds <= 1.2 * first.train_seconds


@pytest.mark.ci
def test_a_chain_is_verified_by_one_worker_and_then_trained_by_a_gang_of_two(slow, alone, tmp_path):
    widened = tmp_path / "widened"
    slow.run(set_pause, f"0.3 {widened}")  # until then: a verification may take long
    result = search(Net(), executor=Widening(slow, widened), store=tmp_path / "store")
    assert widths(result)[0] == 1 and 2 in widths(result)
    assert result.plan.verified
    check_equal(result, alone)


@pytest.mark.ci
@pytest.mark.parametrize("who", ["leads", "follows"])
def test_a_worker_killed_in_a_gang_costs_only_steps_since_the_last_checkpoint(slow, alone, who, tmp_path):
    executor = Killing(slow, who)
    result = search(Net(), executor=executor, verify="off", store=tmp_path)
    assert executor.killed
    losses = [fact for fact in result.journal if isinstance(fact, ChainLost) and fact.blames]
    assert [loss.workers for loss in losses] == [2]
    assert result.savings.steps_trained == result.savings.steps_unique
    check_equal(result, alone)
