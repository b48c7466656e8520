"""Whether siblings are trained as one is decided before a search, as how many in it; neither shows in the bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage.checkpoints.state_tree import digest
from hpstage.plan.facts import ChainStarted, StateReached, StepsTimed
from hpstage.plan.log import read_facts, read_header
from hpstage.plan.same_workload import NUMERICS
from hpstage.plan.step_times import among
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.torch.backends.siblings import StackedLoop
from hpstage.torch.backends.stacked import worth
from tests.torch.backends.searches import search
from tests.torch.backends.test_siblings import Siblings

pytestmark = pytest.mark.sampled(4)

HP = {"lr": 0.1, "batch_size": 6}


class Images(Siblings):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))

    def dataset(self) -> Any:
        x = torch.linspace(-2, 2, 320).reshape(20, 1, 4, 4)
        return TensorDataset(x, x.sin().mean((1, 2, 3)).unsqueeze(1))

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        x, y = self.dataset().tensors
        return {"loss": nn.functional.mse_loss(model(x), y).item()}


def trials_of(kind: type[Siblings], stacked: int, journal: MemoryJournal, n_trials: int = 6) -> list[Any]:
    subject = kind()
    subject.max_stacked = stacked
    grid = {"lr": [0.001 * (number + 1) for number in range(n_trials)]}
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.GridSampler(grid, seed=0))
    hpstage.optimize(
        study,
        subject,
        lambda trial: HP | {"lr": trial.suggest_categorical("lr", grid["lr"])},
        metric="loss",
        steps=200,
        n_trials=n_trials,
        executor=hpstage.InlineExecutor(),
        store=journal,
    )
    return sorted((trial.params["lr"], trial.values) for trial in study.trials)


@pytest.mark.ci
@pytest.mark.parametrize("kind", [Siblings, pytest.param(Images, marks=pytest.mark.ci)])
def test_values_do_not_depend_on_how_many_models_the_search_decides_to_stack(
    kind: type[Siblings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "_PAID", 0.0)  # so few steps are worth no further program
    journal = MemoryJournal()
    assert trials_of(kind, 4, journal) == trials_of(kind, 1, MemoryJournal())
    timed = [fact for fact in read_facts(journal) if isinstance(fact, StepsTimed)]
    assert timed and [len(fact.seconds) for fact in timed] == [*range(2, 2 + len(timed))]


@pytest.mark.ci
def test_auto_does_not_consider_stacking_if_several_models_exceed_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> Any:
        raise torch.OutOfMemoryError("three models are too many")

    monkeypatch.setattr("hpstage.torch.backends.measuring._in_turn", full)
    subject = Siblings()
    subject.numerics, subject.max_stacked = "auto", 2
    found = StackedLoop(subject).measure_backends(HP, math.inf)
    assert found["eager"] > 0 and not among(found)
    assert "'stacked' is not considered: OutOfMemoryError: three models are too many" in caplog.text


@pytest.mark.ci
@pytest.mark.parametrize("numerics", ["stacked", "auto"])
def test_measuring_stacked_training_does_not_change_training(numerics: str) -> None:
    def trained(measure: bool) -> str:
        subject = Siblings()
        subject.numerics, subject.max_stacked = "auto", 2
        loop = StackedLoop(subject)
        if measure:
            found = loop.measure_backends(HP, math.inf)
            assert among(found).keys() == {"stacked"} and found["stacked begins"] >= 0 and found["eager"] > 0
        slot = loop.members()[1]
        slot.train_by("stacked" if numerics == "stacked" else "eager")  # type: ignore[attr-defined]
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

    def measure(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
        return self.found


EAGER = {"eager": 1.0, "eager begins": 0.0}
PAYS = {"stacked, 1 at a time": 1.1, "stacked, 2 at a time": 1.2, "stacked begins": 0.1}
FASTER = {"stacked, 1 at a time": 0.9, "stacked, 2 at a time": 1.9, "stacked begins": 0.0}
LOSES = {"stacked, 1 at a time": 1.1, "stacked, 2 at a time": 2.3, "stacked begins": 0.1}


@pytest.mark.parametrize(
    ("found", "numerics", "slots"),
    [(PAYS, "stacked", 2), (FASTER, "stacked", 2), (LOSES, "eager", 1), ({}, "eager", 1)],
)
def test_auto_stacks_siblings_only_if_that_is_faster_than_eager_training(
    found: dict[str, float], numerics: str, slots: int
) -> None:
    journal = MemoryJournal()
    search("auto", journal, Measured(**EAGER, **found))
    assert read_header(journal).described[NUMERICS].startswith(numerics)
    facts = list(read_facts(journal))
    assert len({fact.worker for fact in facts if isinstance(fact, ChainStarted)}) == slots
    assert any(isinstance(fact, StateReached) and fact.workers < 1 for fact in facts) == (slots > 1)


@pytest.mark.parametrize(("found", "numerics"), [(PAYS, "eager"), (FASTER, "stacked")])
@pytest.mark.parametrize("n_trials", [8, None])
def test_auto_compares_steps_of_a_single_model_if_few_trials_run_concurrently(
    n_trials: int | None, found: dict[str, float], numerics: str
) -> None:
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
        timeout=None if n_trials else 30.0,
        algorithm=hpstage.algos.FullTraining(window=1) if n_trials else None,
        executor=Measured(**EAGER, **found),
        store=journal,
        callbacks=[lambda study, trial: study.stop()],
    )
    assert read_header(journal).described[NUMERICS].startswith(numerics)
