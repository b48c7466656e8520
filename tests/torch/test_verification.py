"""The first fork of a workload is verified: what no state holds is named before hours are spent on it."""

from __future__ import annotations

import functools
import io
import itertools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from sklearn.linear_model import SGDClassifier
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

import hpstage
from hpstage import schedule as s
from hpstage.errors import DeviceFull, StateError, UsageError
from hpstage.execution import verification
from hpstage.execution.fork import Fork, obstacle
from hpstage.plan.facts import ForkVerified, StateReached
from hpstage.plan.log import read_facts
from hpstage.store import MemoryJournal
from hpstage.training.run import Run
from tests.torch.patterns import PATTERNS
from tests.torch.trainables import CASES, Small, network, ordinary_loop, samples, sgd

pytestmark = [pytest.mark.sampled(16), pytest.mark.forks]

STEPS = 8


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [3, 5])
    return {"lr": s.multistep(0.1, [drop], gamma=0.1), "momentum": 0.9, "batch_size": 8, "seed": 3}


REGIMES = ("before the drop", "after it")
"""Kinds of values that this space has: a fork is verified under each."""


def search(trainable: object, journal: Any = None, **options: Any) -> hpstage.Result:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [3, 5]}, seed=0))
    return hpstage.optimize(
        study,
        trainable,
        space,
        metric="loss",
        steps=STEPS,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal() if journal is None else journal,
        **options,
    )


def hidden_counter(run: Run) -> None:
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    seen = 0
    for _ in run.steps():
        batch = run.indices(len(x), 8)
        seen += 8
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x[batch]), y[batch]) * (2 if seen > 40 else 1)).backward()
        optimizer.step()
        if run.wants_report:
            run.report(loss=nn.functional.cross_entropy(model.eval()(x), y).item())
            model.train()


class Meter:
    def __init__(self) -> None:
        self.seen = 0


def hidden_meter(run: Run) -> None:
    x, y = samples()
    model, meter = network(), Meter()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        batch = run.indices(len(x), 8)
        meter.seen += 8
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x[batch]), y[batch]) * (2 if meter.seen > 40 else 1)).backward()
        optimizer.step()
        if run.wants_report:
            run.report(loss=nn.functional.cross_entropy(model.eval()(x), y).item())
            model.train()


def unattached(run: Run) -> None:
    x, y = samples()
    model = network()
    average = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        batch = run.indices(len(x), 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        if run.wants_report:
            run.report(loss=nn.functional.cross_entropy(average(x), y).item())


def iterating(run: Run) -> None:
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    batches = itertools.cycle(range(0, len(x), 8))
    for _ in run.steps():
        start = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[start : start + 8]), y[start : start + 8]).backward()
        optimizer.step()
        if run.wants_report:
            run.report(loss=nn.functional.cross_entropy(model(x), y).item())


class Loader(Small):
    """Batches from an iterator of its own."""

    def model(self, hp: Any) -> nn.Module:
        self.batches = self.endless()
        return super().model(hp)

    def endless(self) -> Iterator[int]:
        while True:
            yield from range(0, 24, 8)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        start = next(self.batches)
        x, y = samples()
        return super().loss(model, (x[start : start + 8], y[start : start + 8]))


@functools.cache
def noise(count: int) -> torch.Tensor:
    return torch.rand(count)


class CachedNoise(Small):
    """A cached function draws random numbers, when it is called first: in a fork that is at another step."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * (1 + noise(3).mean())


class Incomplete:
    """An object whose ``state_dict()`` leaves out what it continues with."""

    def setup(self, hp: Any) -> None:
        self.weight, self.velocity = 1.0, 0.0

    def train(self, step: int, hp: Any) -> None:
        self.velocity = 0.9 * self.velocity - 0.1 * self.weight
        self.weight += self.velocity

    def evaluate(self) -> dict[str, float]:
        return {"loss": self.weight**2}

    def state_dict(self) -> object:
        return {"weight": self.weight}

    def load_state_dict(self, state: Any) -> None:
        self.weight = state["weight"]


@pytest.mark.parametrize(
    ("trainable", "match"),
    [
        (iterating, r"local variable"),
        (Loader(), r"self.batches (is a .*generator that has moved on|has changed and cannot)"),
        (Incomplete(), r"self\.velocity is"),
        (CachedNoise(), r"after 2 more steps model\."),
    ],
)
def test_training_state_that_is_not_captured_is_named_in_the_first_steps(trainable: object, match: str) -> None:
    journal = MemoryJournal()
    with pytest.raises(StateError, match=match):
        search(trainable, journal)
    assert sum(fact.step - fact.start for fact in read_facts(journal) if isinstance(fact, StateReached)) <= 4


class Fitted(Incomplete):
    """Trains an estimator of scikit-learn's, and states what training hangs on; the estimator notes more."""

    def setup(self, hp: Any) -> None:
        self.classifier = SGDClassifier(random_state=0)

    def train(self, step: int, hp: Any) -> None:
        self.classifier.partial_fit([[0.0, step], [1.0, -step]], [0, 1], classes=[0, 1])

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(np.abs(self.classifier.coef_).sum()), "seconds": time.perf_counter()}

    def state_dict(self) -> object:
        return {name: getattr(self.classifier, name) for name in ("coef_", "intercept_", "t_", "classes_")}

    def load_state_dict(self, state: Any) -> None:
        vars(self.classifier).update(state)


class Judged(Fitted):
    """Is evaluated by what the estimator notes."""

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(getattr(self.classifier, "n_features_in_", 0))}


class Noting(Incomplete):
    """Makes an attribute of its own in its first step, that it reads much later, if it is there."""

    def train(self, step: int, hp: Any) -> None:
        if step == 0:
            self.first = self.weight
        self.weight *= 0.9 if step < 7 else 0.9 * getattr(self, "first", 2.0)


def test_an_attribute_missing_in_a_fork_is_allowed_in_an_estimator_unless_it_is_read() -> None:
    search(Fitted())
    with pytest.raises(StateError, match=r"self\.classifier\.\w+ is absent from the state"):
        search(Judged())


def test_an_attribute_missing_in_a_fork_is_refused_in_a_users_object() -> None:
    with pytest.raises(StateError, match=r"self\.first is absent from the state"):
        search(Noting())


@pytest.mark.ci
@pytest.mark.parametrize("name", [*CASES, *PATTERNS])
@pytest.mark.ci_one_in(3)
def test_training_with_captured_state_passes_verification(name: str) -> None:
    search(({**CASES, **PATTERNS})[name]())


@pytest.mark.parametrize("function", [hidden_counter, hidden_meter, unattached])
def test_local_variables_are_captured_and_pass_verification(function: object) -> None:
    journal = MemoryJournal()
    search(function, journal, verify="all")
    verified = [fact for fact in read_facts(journal) if isinstance(fact, ForkVerified)]
    assert verified and all(fact.difference is None for fact in verified)


def test_one_fork_per_kind_of_hyperparameter_values_is_verified_only_once(tmp_path: Path) -> None:
    journal = MemoryJournal()
    search(ordinary_loop, journal, checkpoints=str(tmp_path))
    search(ordinary_loop, journal, checkpoints=str(tmp_path))
    found = [fact for fact in read_facts(journal) if isinstance(fact, ForkVerified)]
    assert [(fact.steps, fact.difference) for fact in found] == [(2, None)] * len(REGIMES)
    assert found[0].step == 1
    assert all(fact.seconds > 0 for fact in found)


def test_verify_all_verifies_every_chain_and_verify_off_verifies_none() -> None:
    journal = MemoryJournal()
    search(Small(), journal, verify="off")
    assert not any(isinstance(fact, ForkVerified) for fact in read_facts(journal))
    journal = MemoryJournal()
    search(Small(), journal, verify="all")
    facts = list(read_facts(journal))
    trained = Counter[str]()
    for fact in facts:
        if isinstance(fact, StateReached):
            trained[fact.chain] += fact.step - fact.start
    # On a busy machine a chain may give way to another, after one step perhaps.
    assert {fact.chain for fact in facts if isinstance(fact, ForkVerified)} == {c for c in trained if trained[c] > 1}


def test_verification_does_not_change_results() -> None:
    assert [t.values for t in search(Small(), verify="all").study.trials] == [
        t.values for t in search(Small(), verify="off").study.trials
    ]


class Forgetful:
    """Its state lacks what load_state_dict() reads."""

    def setup(self, hp: Any) -> None:
        self.weight = 1.0

    def train(self, step: int, hp: Any) -> None:
        self.weight *= 1 - hp["lr"]

    def evaluate(self) -> dict[str, float]:
        return {"loss": self.weight}

    def state_dict(self) -> object:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.weight = state["weight"]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_state_that_cannot_be_loaded_is_refused_even_in_short_trials(steps: int) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    with pytest.raises(StateError, match=r"the saved state cannot be loaded: KeyError: 'weight'"):
        hpstage.optimize(
            study,
            Forgetful(),
            lambda trial: {"lr": trial.suggest_float("lr", 0.1, 0.2)},
            metric="loss",
            steps=steps,
            n_trials=2,
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
        )


TICKETS = "HPSTAGE_TEST_TICKETS"


class Ticketed(Forgetful):
    """Draws a ticket in each step, from what is in no state and nowhere else that is looked at."""

    version = data_version = "1"

    def train(self, step: int, hp: Any) -> None:
        super().train(step, hp)
        self.ticket = int(os.environ[TICKETS])
        os.environ[TICKETS] = str(self.ticket + 1)

    def evaluate(self) -> dict[str, float]:
        return {"loss": self.weight}

    def state_dict(self) -> object:
        return {"weight": self.weight, "ticket": self.ticket}

    def load_state_dict(self, state: Any) -> None:
        self.weight, self.ticket = state["weight"], state["ticket"]


@pytest.mark.skipif(bool(obstacle()), reason="this process cannot be forked")
def test_verification_does_not_change_the_environment_of_the_training_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TICKETS, "0")
    search(Ticketed(), verify="off")
    assert os.environ[TICKETS] == str(2 * STEPS - 3)  # of two trials that share three steps
    monkeypatch.setenv(TICKETS, "0")
    with pytest.raises(StateError, match=r"the state|ticket"):  # a fork would draw other tickets
        search(Ticketed())
    assert 3 <= int(os.environ[TICKETS]) <= STEPS  # of the first trial, which trains on until the difference is known


class WithSharedTensor(Small):
    """Weights each loss by how many steps were trained, which other processes may see."""

    version = "1"

    def __init__(self) -> None:
        super().__init__()
        self.trained = self.shared()

    def shared(self) -> Any:
        return torch.zeros(1).share_memory_()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        self.trained[0] += 1
        optimizer.zero_grad()
        loss = self.loss(model, batch) * (1 + 0.01 * float(self.trained[0]))
        loss.backward()
        optimizer.step()
        return loss


class WithRawArray(WithSharedTensor):
    def shared(self) -> Any:
        return multiprocessing.RawArray("d", 1)


@pytest.mark.parametrize("kind", [WithSharedTensor, WithRawArray])
def test_verification_does_not_write_to_memory_shared_by_processes(kind: type[WithSharedTensor]) -> None:
    exact = search(kind(), verify="off")
    verified = search(kind(), verify="all", checkpoint_every=1)
    assert [trial.value for trial in verified.study.trials] == [trial.value for trial in exact.study.trials]
    assert all(trial.value is not None for trial in exact.study.trials)


@pytest.mark.skipif(bool(obstacle()), reason="this process cannot be forked")
def test_reading_a_file_in_a_fork_does_not_move_its_position_in_the_parent(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text("".join(f"{number:08d}\n" for number in range(10_000)))
    with (tmp_path / "numbers").open(buffering=1) as file:
        file.readline()
        at = os.lseek(file.fileno(), 0, os.SEEK_CUR)
        fork = Fork(lambda: b"%d" % len(file.read()))
        assert int(fork.wait(60) or b"0") == 9 * 9_999
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == at
        fork.close()


@pytest.mark.skipif(bool(obstacle()), reason="this process cannot be forked")
def test_a_fork_that_dies_is_an_error_and_a_fork_that_hangs_can_be_killed() -> None:
    dies = Fork(lambda: os._exit(3))
    with pytest.raises(ChildProcessError, match="status 3"):
        dies.wait(60)
    hangs = Fork(lambda: [time.sleep(3600), b""][1])
    assert hangs.wait(0.0) is None
    hangs.close(kill=True)
    with pytest.raises(ChildProcessError):
        hangs.wait(60)


class Threaded(Small):
    """Has another thread add up, which no fork of the process has; verified in place for that."""

    def loss(self, model: Any, batch: Any) -> Any:
        return _POOL.submit(super().loss, model, batch).result()


_POOL: Any = None


@pytest.mark.parametrize("known", [True, False])
def test_training_that_needs_a_thread_is_verified_in_its_own_process(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(verification, "_PATIENCE", 0.5)
        monkeypatch.setattr(verification, "_BRIEF", 0.1)
        monkeypatch.setattr(verification, "obstacle", lambda trainable: "")
    journal = MemoryJournal()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setitem(globals(), "_POOL", pool)
        alone = [trial.values for trial in search(Threaded(), verify="off").study.trials]
        assert obstacle()  # this, or what other tests have left
        assert [trial.values for trial in search(Threaded(), journal).study.trials] == alone
    found = [fact.difference for fact in read_facts(journal) if isinstance(fact, ForkVerified)]
    assert found == [None] * len(REGIMES)


def test_a_users_thread_pool_prevents_forks_while_it_has_threads() -> None:
    if other := obstacle():  # which other tests have left
        pytest.skip(other)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert "a pool or thread of the user's" in obstacle()


def test_thread_pools_of_hpstage_and_dask_do_not_prevent_forks() -> None:
    with ThreadPoolExecutor(1, "hpstage-saves") as own, ThreadPoolExecutor(1, "Dask-Offload") as other:
        before = obstacle()
        assert [own.submit(obstacle).result(), other.submit(obstacle).result()] == [before] * 2


def test_an_unknown_value_of_verify_is_refused() -> None:
    with pytest.raises(UsageError, match=r"verify is 'some'; give one of 'first-fork', 'all', 'off'"):
        search(Small(), verify="some")


def measuring_in_training_mode(run: Run) -> None:
    """Who measures has forgotten eval()."""
    x, y = samples()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        batch = run.indices(len(x), 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if run.wants_report:
            with torch.no_grad():
                run.report(loss=nn.functional.cross_entropy(model(x + 1), y).item())


def left_in_evaluation_mode(run: Run) -> None:
    """Who measures has forgotten train()."""
    x, y = samples()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        batch = run.indices(len(x), 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if run.wants_report:
            model.eval()
            run.report(loss=nn.functional.cross_entropy(model(x), y).item())


@pytest.mark.parametrize("function", [measuring_in_training_mode, left_in_evaluation_mode])
def test_evaluation_that_changes_training_is_an_error(function: Any) -> None:
    with pytest.raises(StateError, match=r"measuring changes training: model.*eval\(\)"):
        search(function)


def measuring_by_a_function(run: Run) -> None:
    """What measures is made where it is needed, and closes over local variables."""
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        batch = run.indices(len(x), 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if run.wants_report:
            measured = lambda: nn.functional.cross_entropy(model(x), y).item()  # noqa: E731
            model.eval()
            run.report(loss=measured())
            model.train()


def test_a_function_created_for_evaluation_passes_verification() -> None:
    search(measuring_by_a_function, verify="all", checkpoint_every=1)


def with_a_progress_bar(run: Run) -> None:
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    bar = tqdm(run.steps(), file=io.StringIO(), mininterval=0)
    for _ in bar:
        batch = run.indices(len(x), 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        bar.set_postfix(lr=run.hp["lr"])
        if run.wants_report:
            model.eval()
            run.report(loss=nn.functional.cross_entropy(model(x), y).item())
            model.train()


def test_a_tqdm_progress_bar_around_the_steps_passes_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # else it leaves a thread
    search(with_a_progress_bar, verify="all", checkpoint_every=1)


@pytest.mark.skipif(bool(obstacle()), reason="this process cannot be forked")
class FullOnce(Small):
    """Its device has no room for one of its steps, when that is trained for the first time in a process."""

    full = steps = 0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            FullOnce.steps += 1
            if FullOnce.steps == FullOnce.full:
                raise DeviceFull("CUDA out of memory. Tried to allocate 16 bytes")
        return super().loss(model, batch)

    stateless = ("steps", "full")


def test_a_full_device_during_verification_is_not_reported_as_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = search(Small(), verify="all").best_value
    for full in range(1, 13, 3):
        monkeypatch.setattr(FullOnce, "steps", 0)
        monkeypatch.setattr(FullOnce, "full", full)
        assert search(FullOnce(), verify="all").best_value == expected
        assert FullOnce.steps > full


def test_a_gpu_that_torch_sees_prevents_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on the CPU: torch begins threads for the gradients of each GPU, and fails in a fork, which has none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "torch sees a GPU" in obstacle()
