"""How many siblings are trained as one is measured before it is done, and it is not done where it does not pay."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import hpstage
from hpstage.checkpoints.state_tree import digest
from hpstage.plan.facts import ChainStarted, StateReached, StepsTimed
from hpstage.plan.log import NUMERICS, read_facts, read_header
from hpstage.plan.step_times import among
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.torch.backends.measuring_stacks import StackMeasurement
from hpstage.torch.backends.siblings import StackedLoop
from tests.torch.backends.searches import search
from tests.torch.backends.test_siblings import Siblings

pytestmark = pytest.mark.sampled(4)

HP = {"lr": 0.1, "batch_size": 6}


class Sleepers:
    """Siblings whose steps take a time of their own making, and of which no more than some fit."""

    device = torch.device("cpu")
    loads_elsewhere = True  # measured by what passes, not by what is computed

    def __init__(self, exponent: float, most: int = 100) -> None:
        self.exponent, self.most = exponent, most
        self.trained: Counter[int] = Counter()

    def train_together(self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]]) -> Mapping[int, int]:
        if len(steps) > self.most:
            raise MemoryError("no room")
        self.trained[len(steps)] += 1
        time.sleep(0.002 * len(steps) ** self.exponent)
        return dict.fromkeys(steps, len(steps))

    def train_by(self, numerics: str) -> bool:
        return True

    def setup(self, hp: Mapping[str, Scalar]) -> None: ...
    def train(self, step: int, hp: Mapping[str, Scalar]) -> None: ...
    def synchronize(self) -> None: ...


def measured(sleepers: Sleepers, most: int) -> list[int]:
    times = StackMeasurement(sleepers, [sleepers] * most, HP).times()
    return [times.best, *dict(times.seconds)]


def test_more_are_tried_as_long_as_that_pays() -> None:
    assert measured(Sleepers(0.0), 6) == [6, 1, 2, 4, 6]
    assert measured(Sleepers(2.0), 64) == [1, 1, 2, 4]


def test_as_many_as_no_memory_holds_are_named_before_training(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        assert measured(Sleepers(0.0, most=3), 16) == [2, 1, 2]
    assert "max_stacked = 16, but 4 siblings cannot be trained as one here (MemoryError: no room)" in caplog.text


def test_a_failure_without_stacking_is_not_blamed_on_it() -> None:
    with pytest.raises(MemoryError):
        measured(Sleepers(0.0, most=0), 4)


@pytest.mark.parametrize("numerics", ["stacked", pytest.param("auto", marks=pytest.mark.slow)])
def test_measuring_leaves_no_trace_in_training(numerics: str) -> None:
    def trained(measure: bool) -> str:
        subject = Siblings()
        subject.numerics, subject.max_stacked = numerics, 2
        loop = StackedLoop(subject)
        if measure:
            found = loop.measure_backends(HP, math.inf)
            assert among(found).keys() == {"stacked"} and found["stacked begins"] >= 0
            assert ("eager" in found) == (numerics == "auto")
        slot = loop.members()[1]
        slot.train_by("stacked")  # type: ignore[attr-defined]
        slot.setup(HP)
        for step in range(4):
            slot.train(step, HP)
        state = digest(slot.state_dict())
        loop.close()
        return state

    assert trained(measure=True) == trained(measure=False)


class Measured(hpstage.InlineExecutor):
    """Has measured this."""

    def __init__(self, **found: float) -> None:
        super().__init__()
        self.found = found
        self.measurements = 0

    def measure(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
        self.measurements += 1
        return self.found


EAGER = {"eager": 1.0, "eager begins": 0.0}
PAYS = {"stacked, 1 at a time": 1.1, "stacked, 2 at a time": 1.2, "stacked, 8 at a time": 9.0, "stacked begins": 0.1}
LOSES = {"stacked, 1 at a time": 1.1, "stacked, 2 at a time": 2.3, "stacked, 4 at a time": 5.0, "stacked begins": 0.1}


@pytest.mark.parametrize(("found", "numerics", "slots"), [(PAYS, "stacked", 2), (LOSES, "eager", 1), ({}, "eager", 1)])
def test_auto_trains_siblings_as_one_where_that_pays(found: dict[str, float], numerics: str, slots: int) -> None:
    journal = MemoryJournal()
    result = search("auto", journal, Measured(**EAGER, **found))
    assert read_header(journal).described[NUMERICS].startswith(numerics)
    facts = list(read_facts(journal))
    assert len({fact.worker for fact in facts if isinstance(fact, ChainStarted)}) == slots
    assert sum(isinstance(fact, StepsTimed) for fact in facts) == (slots > 1)
    stacked = [fact for fact in facts if isinstance(fact, StateReached) and fact.workers < 1]
    assert bool(stacked) == (slots > 1)
    for fact in stacked:
        assert fact.alone_seconds == pytest.approx(fact.train_seconds / fact.workers * 1.1 / 1.2, rel=0.5)
    assert (result.savings.fused_seconds > 0) == (slots > 1)


def test_bundles_are_not_expected_where_few_trials_are_trained_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    def one_by_one(n_trials: int | None) -> str:
        journal = MemoryJournal()
        subject = Siblings()
        subject.numerics, subject.max_stacked = "auto", 8
        hpstage.optimize(
            optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)),
            subject,
            lambda trial: HP | {"lr": trial.suggest_float("lr", 0.1, 0.2)},
            metric="loss",
            steps=2,
            n_trials=n_trials,
            timeout=None if n_trials else 3.0,
            algorithm=hpstage.algos.FullTraining(window=1) if n_trials else None,
            executor=Measured(**EAGER, **PAYS),
            store=journal,
            callbacks=[lambda study, trial: study.stop()],
        )
        return read_header(journal).described[NUMERICS]

    assert one_by_one(8).startswith("eager")
    with caplog.at_level(logging.WARNING, "hpstage"):
        assert one_by_one(None).startswith("eager")
    assert "how many trials are trained at a time is not known" in caplog.text


def test_a_plan_remembers_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = Measured(**PAYS), Measured(**PAYS)
    search("stacked", tmp_path, first, show_progress_bar=True)
    assert "Measuring how many siblings to train as one" in capsys.readouterr().err
    search("stacked", tmp_path, again, show_progress_bar=True)
    assert "Measuring" not in capsys.readouterr().err
    assert (first.measurements, again.measurements) == (1, 0)


def test_where_it_does_not_pay_siblings_are_trained_one_by_one() -> None:
    journal = MemoryJournal()
    result: Any = search("stacked", journal, Measured(**LOSES))
    assert {fact.worker for fact in read_facts(journal) if isinstance(fact, ChainStarted)} == {"inline"}
    assert result.plan.step_times.best == 1
