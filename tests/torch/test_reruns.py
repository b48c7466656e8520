"""The end of a chain is trained again in a process in which nothing was trained: what no survey sees is found."""

from __future__ import annotations

import csv
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.algos.full_training import FullTraining
from hpstage.cluster import DaskExecutor
from hpstage.errors import StateError
from hpstage.execution.rerun import Reruns
from hpstage.execution.rerun_queue import Rerun, RerunQueue
from hpstage.execution.retraining import Retrained
from hpstage.execution.untrained import UntrainedFork
from hpstage.training.run import Run
from tests.torch.loops import begun, stepped
from tests.torch.trainables import Small

optuna.logging.set_verbosity(optuna.logging.ERROR)

STEPS = 12

LIMIT = csv.field_size_limit()
"""A setting that no survey sees: one function sets and returns what C keeps."""

pytestmark = [
    pytest.mark.sampled(8),
    pytest.mark.forks,
    pytest.mark.usefixtures("reruns_on_any_machine"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is trained again in forks"),
]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    csv.field_size_limit(LIMIT)


class Counting(Small):
    """Knows its step, which is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def model(self, hp: Any) -> Any:
        self.n = 0
        return super().model(hp)

    def loss(self, model: Any, batch: Any) -> Any:
        self.n += 1
        self.change()
        return super().loss(model, batch) * self.factor()

    def change(self) -> None:
        """Change something."""

    def factor(self) -> float:
        return 1.0


class SettingOfLibrary(Counting):
    """A setting is made late, once."""

    def change(self) -> None:
        if self.n == 6:
            csv.field_size_limit(2 * LIMIT)

    def factor(self) -> float:
        return csv.field_size_limit() / LIMIT


class SettingSetBack(SettingOfLibrary):
    """A setting is made, and set back before the end: only states in between lack it."""

    def change(self) -> None:
        if self.n in (4, 10):
            csv.field_size_limit(2 * LIMIT if self.n == 4 else LIMIT)


class SettingOfInterpreter(Counting):
    def change(self) -> None:
        if self.n == 11:  # where no fork is verified
            csv.field_size_limit(3 * LIMIT)

    def factor(self) -> float:
        return csv.field_size_limit() / LIMIT


class Interrupted(SettingOfInterpreter):
    """The second step of each chain takes long, as on a loaded machine."""

    def change(self) -> None:
        super().change()
        if self.n in (2, 5):
            time.sleep(0.3)


class Leaking(Counting):
    """What one trial sets late, the next ones see from their beginning."""

    def change(self) -> None:
        if self.n == STEPS:
            csv.field_size_limit(2 * LIMIT)

    factor = SettingOfLibrary.factor


class Measuring(Counting):
    """Some of its metrics are never the same."""

    def evaluate(self, model: Any) -> dict[str, float]:
        return {**super().evaluate(model), "pid": float(os.getpid()), "time": time.time()}


class Connected(Counting):
    """Fails in a process that has not trained its beginning."""

    def change(self) -> None:
        if self.n == 2:
            csv.field_size_limit(3 * LIMIT)
        if self.n == 11 and csv.field_size_limit() != 3 * LIMIT:
            raise ConnectionError("it is not open")


class Greedy(Connected):
    def change(self) -> None:
        try:
            super().change()
        except ConnectionError as error:
            raise MemoryError("too much") from error


class Piping(Counting):
    """Holds the numbers of file descriptors, which mean others, or nothing, in another process."""

    def model(self, hp: Any) -> Any:
        self.ends = os.pipe()
        return super().model(hp)

    def change(self) -> None:
        if self.n > 4:
            os.write(self.ends[1], b"x")
        if self.n > 7:
            os.read(self.ends[0], 1)


class LeakingFromTheLastStep(Counting):
    """Whoever begins with nothing after another trial sees what that one has left."""

    def model(self, hp: Any) -> Any:
        self.limit = csv.field_size_limit()
        return super().model(hp)

    def change(self) -> None:
        if self.n == STEPS:
            csv.field_size_limit(3 * LIMIT)

    def factor(self) -> float:
        return self.limit / LIMIT


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_int("drop", 1, STEPS)
    return {"lr": s.multistep(0.1, [drop], gamma=0.1), "momentum": 0.9, "batch_size": 8, "seed": 3}


def search(trainable: object, store: Path, **options: Any) -> hpstage.Result:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [3, 5, 8]}, seed=0))
    return hpstage.optimize(
        study,
        trainable,
        space,
        metric="loss",
        steps=STEPS,
        n_trials=3,
        store=store,
        **{"executor": hpstage.InlineExecutor(), **options},
    )


@pytest.mark.ci
@pytest.mark.parametrize("trainable", [SettingOfLibrary, SettingOfInterpreter, Interrupted, Leaking])
def test_a_rerun_finds_state_of_the_process_that_training_depends_on(trainable: type, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"depends on something outside its state.* in a process that had trained"):
        search(trainable(), tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("executor", [hpstage.InlineExecutor, lambda: DaskExecutor(n_workers=1, gpus=0)])
def test_a_rerun_also_starts_from_intermediate_states(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps are so slow that the end of a chain is two of them."""
    if executor is hpstage.InlineExecutor:
        monkeypatch.setattr(Reruns, "_most", lambda self: 2)
    with pytest.raises(StateError, match=r"after (5|7|8|10) steps, .* again from the state at step (3|5|8) in a"):
        search(SettingSetBack(), tmp_path, executor=executor())


def test_no_step_is_rerun_if_verification_is_off(tmp_path: Path) -> None:
    search(SettingOfLibrary(), tmp_path, verify="off")


@pytest.mark.parametrize("trainable", [Counting, Measuring])
def test_a_rerun_ignores_metrics_that_differ_at_each_evaluation(trainable: type, tmp_path: Path) -> None:
    result = search(trainable(), tmp_path)
    assert result.best_trial.value is not None


def reporting(run: Run) -> None:
    parts = begun(run)
    for _ in run.steps():
        stepped(run, parts)


@pytest.mark.ci
def test_a_rerun_requests_only_the_reports_that_the_search_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are so slow that reruns end between the steps at which trials branch or end."""
    monkeypatch.setattr(Reruns, "_most", lambda self: 2)
    monkeypatch.setattr(Reruns, "_has_time", lambda self: True)
    compared: list[int] = []
    see = RerunQueue._see

    def noting(self: RerunQueue, result: Retrained) -> None:
        assert self._running is not None
        compared.extend(again.step for again in self._running.segment.compared)
        see(self, result)

    monkeypatch.setattr(RerunQueue, "_see", noting)
    search(reporting, tmp_path)
    assert not {3, 5, 8, STEPS}.issuperset(compared)  # where trials branch and end


def test_training_that_fails_in_a_rerun_ends_the_search(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot be trained again .* lost: ConnectionError: it is not"):
        search(Connected(), tmp_path)


@pytest.mark.ci
def test_a_rerun_that_lacks_memory_causes_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        search(Greedy(), tmp_path)
    assert "could not be trained again in a process that had trained nothing" in caplog.text
    assert "MemoryError: too much" in caplog.text


def test_a_rerun_whose_initial_state_was_evicted_is_skipped_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a budget evicts it: nothing is wrong."""
    evicted: list[object] = []
    source_of = RerunQueue._source

    def source(self: RerunQueue, rerun: Rerun) -> Any:
        store, key = source_of(self, rerun), rerun.segment.source
        if key is not None:
            store.delete(key)
            evicted.append(key)
        return store

    monkeypatch.setattr(RerunQueue, "_source", source)
    with caplog.at_level(logging.WARNING, "hpstage"):
        search(Small(), tmp_path)
    assert evicted and "trained again" not in caplog.text


def test_training_that_holds_a_pipe_fails_in_a_rerun(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot be trained again .*: OSError"):
        search(Piping(), tmp_path)


def test_the_second_chain_from_step_0_is_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five trials share their first steps; the sixth shares none."""
    monkeypatch.setattr("hpstage.execution.rerun._SECONDS", 60.0)  # all of its steps, however slow the machine
    study = optuna.create_study()
    for drop, momentum in [(3, 0.9), (5, 0.9), (8, 0.9), (10, 0.9), (11, 0.9), (3, 0.8)]:
        study.enqueue_trial({"drop": drop, "momentum": momentum})

    def several(trial: optuna.Trial) -> dict[str, Any]:
        momentum = trial.suggest_float("momentum", 0, 1)
        drop = trial.suggest_int("drop", 1, 12)
        return {"lr": s.multistep(0.1, [drop], gamma=0.1), "momentum": momentum, "batch_size": 8, "seed": 3}

    with pytest.raises(StateError, match=r"then again from step 0 in a process that had trained nothing"):
        hpstage.optimize(
            study,
            LeakingFromTheLastStep(),
            several,
            metric="loss",
            steps=STEPS,
            n_trials=6,
            algorithm=FullTraining(window=1),  # in this order, on any machine
            checkpoint_every=1,
            executor=hpstage.InlineExecutor(),
            store=tmp_path,
        )


class LeakingOnce(LeakingFromTheLastStep):
    """One of the last trials leaves something behind."""

    def model(self, hp: Any) -> Any:
        self.number = hp["number"]
        return super().model(hp)

    def change(self) -> None:
        if self.number == 6:
            super().change()


@pytest.mark.ci
def test_chains_after_the_fourth_are_rerun_if_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def several(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": 0.1, "momentum": 0.9, "batch_size": 8, "seed": 3, "number": trial.suggest_int("number", 0, 39)}

    study = optuna.create_study()
    for number in range(40):
        study.enqueue_trial({"number": number})
    monkeypatch.setattr("hpstage.execution.rerun._SECONDS", 60.0)
    advance = RerunQueue.advance
    monkeypatch.setattr(RerunQueue, "advance", lambda self, timeout=0.0, settled=False: advance(self, 60.0))
    with pytest.raises(StateError, match=r"again from step 0 in a process that had trained nothing"):
        hpstage.optimize(
            study,
            LeakingOnce(),
            several,
            metric="loss",
            steps=STEPS,
            n_trials=40,
            executor=hpstage.InlineExecutor(),
            store=tmp_path,
        )


def test_reruns_take_one_state_per_chain_even_at_the_start_of_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a state is taken depends on the time that steps take: taken twice, the states may differ."""
    chosen: list[str] = []
    take = Reruns._take

    def noting(self: Reruns, step: int) -> None:
        assert self._flight is not None
        chosen.append(self._flight.chain.id)
        take(self, step)

    monkeypatch.setattr(Reruns, "_take", noting)
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [2, 4, 6]}, seed=0))
    hpstage.optimize(
        study,
        Counting(),
        space,
        metric="loss",
        steps=STEPS,
        n_trials=3,
        algorithm=FullTraining(window=1),
        checkpoint_every=1,
        executor=hpstage.InlineExecutor(),
        store=tmp_path,
    )
    assert len(chosen) == len(set(chosen)) > 0


@pytest.mark.ci
def test_a_rerun_from_the_beginning_does_not_load_the_state_of_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps seem to take long until the chain has ended; its source is in memory only."""
    monkeypatch.setattr(Reruns, "_most", lambda self: 2 if self._flight is not None else 60)
    monkeypatch.setattr(Reruns, "_see_fork", lambda *_: None)
    started: list[int] = []
    source_of = RerunQueue._source

    def source(self: RerunQueue, rerun: Rerun) -> Any:
        started.append(rerun.segment.start)
        monkeypatch.setattr(self, "checkpoints", None)
        return source_of(self, rerun)

    monkeypatch.setattr(RerunQueue, "_source", source)
    search(Counting(), tmp_path)
    assert started[0] in (6, 10) and started[1] == 3  # the first chain is cut where the machine is slow


def test_a_search_with_reruns_leaves_no_process(tmp_path: Path) -> None:
    before = children()
    search(Counting(), tmp_path)
    assert children() == before


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_search_continues_if_the_process_for_reruns_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = UntrainedFork.made

    def killed(trainable: Any) -> UntrainedFork | None:
        fork = made(trainable)
        assert fork is not None
        os.kill(fork._pid, 9)
        return fork

    monkeypatch.setattr(UntrainedFork, "made", killed)
    search(SettingOfLibrary(), tmp_path)


@pytest.mark.ci
def test_dask_workers_rerun_steps(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"in a process that had trained"):
        search(SettingOfInterpreter(), tmp_path, executor=DaskExecutor(n_workers=1, gpus=0))
    assert torch.get_num_threads() >= 1
