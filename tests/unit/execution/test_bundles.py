"""Chains trained side by side by one worker end as they would one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, SuccessiveHalving
from hpstage.plan.facts import ChainStarted, StateReached
from hpstage.plan.invariants import validate
from hpstage.plan.log import read_facts
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing, Tape, alone
from hpstage.trainable import Bundling, Trainable
from hpstage.training.adapter import Adapter
from tests.unit.search.test_resume import Fuse

STEPS = 12


class Lane:
    """A member, which trains only what was trained together before it is told to."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.done: list[tuple[int, dict[str, Scalar], Exception | None]] = []
        self.setup, self.evaluate = tape.setup, tape.evaluate
        self.state_dict, self.load_state_dict = tape.state_dict, tape.load_state_dict

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if not self.done:
            self.tape.train(step, hp)  # alone: it verifies a fork
            return
        before, values, error = self.done.pop()
        assert (step, dict(hp)) == (before, values)
        if error is not None:
            raise error


class Tapes(Adapter):
    """A bundle of tapes that counts how many were trained together."""

    def __init__(self, subject: Tape, count: int = 3) -> None:
        self.subject = subject
        self.fuse = Fuse()
        self.together: Counter[int] = Counter()
        self.lanes = count
        self._lanes = [Lane(type(subject)()) for _ in range(count)]

    def members(self) -> Sequence[Trainable]:
        return self._lanes

    def train_together(self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]]) -> None:
        self.together[len(steps)] += 1
        for index, (step, hp) in steps.items():
            self.fuse.touch()
            lane, error = self._lanes[index], None
            try:
                lane.tape.train(step, hp)
            except Exception as raised:
                error = raised
            lane.done.append((step, dict(hp), error))

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self._lanes[0].setup(hp)

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self._lanes[0].train(step, hp)

    def evaluate(self) -> Mapping[str, float]:
        return self._lanes[0].evaluate()

    def state_dict(self) -> object:
        return self._lanes[0].state_dict()

    def load_state_dict(self, state: object) -> None:
        self._lanes[0].load_state_dict(state)


def space(trial: optuna.Trial) -> dict[str, Any]:
    first, late = trial.suggest_int("first", 1, 3), trial.suggest_int("late", 1, 3)
    return {"a": s.piecewise({0: first, 4: late}), "b": trial.suggest_int("b", 1, 2)}


def search(trainable: object, space: Any = space, **options: Any) -> hpstage.Result:
    study = options.pop("study", None) or optuna.create_study(
        study_name="study", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=3)
    )
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "n_trials": 12, "executor": hpstage.InlineExecutor()}
    return hpstage.optimize(study, trainable, space, **(settings | {"store": MemoryJournal()} | options))


def test_the_port_is_recognised() -> None:
    assert isinstance(Tapes(Tape()), Bundling)
    assert not isinstance(Tape(), Bundling)


@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(2, 2), ASHA(2, 2)], ids=repr)
def test_a_bundle_trains_what_a_worker_alone_trains(algorithm: Algorithm) -> None:
    tapes = Tapes(Tape())
    bundled, single = search(tapes, algorithm=algorithm), search(Tape(), algorithm=algorithm)
    validate(bundled.plan)
    for trial in bundled.study.trials:
        planned = bundled.trial(trial).planned
        for step, value in trial.intermediate_values.items():
            assert value == alone(planned.schedules, step).score
    assert tapes.together[3] > 3
    savings = bundled.savings
    assert savings.steps_trained == savings.steps_unique == sum(size * n for size, n in tapes.together.items())
    if algorithm.synchronous:
        assert [trial.value for trial in bundled.study.trials] == [trial.value for trial in single.study.trials]
        assert savings.steps_trained == single.savings.steps_trained


def test_lanes_of_a_worker_are_one_worker() -> None:
    journal = MemoryJournal()
    result = search(Tapes(Tape()), store=journal)
    facts = list(read_facts(journal))
    assert {fact.worker for fact in facts if isinstance(fact, ChainStarted)} == {"inline", "inline#1", "inline#2"}
    assert result.savings.workers == 1
    # A state that one lane has kept is live for all.
    assert "disk" not in {fact.source for fact in facts if isinstance(fact, StateReached)}


def test_seconds_of_a_step_are_shared_by_those_it_trained() -> None:
    result = search(Tapes(Tape()))
    savings = result.savings
    assert 0 < savings.worker_seconds <= savings.makespan


def test_a_failure_is_that_of_one_member() -> None:
    tapes = Tapes(Failing())
    result = search(tapes, lambda trial: {"a": s.piecewise({0: 1, 3: [2, 7, 3][trial.number]})}, n_trials=3)
    assert [trial.state for trial in result.study.trials] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert "the user's own error at step 3" in result.study.trials[1].user_attrs["hpstage:failure"]
    assert tapes.together[2] >= 8


@pytest.mark.parametrize("at", [1, 5, 12, 20, 33])
def test_an_interrupted_bundle_goes_on(at: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": tmp_path / "store"}
    storage = f"sqlite:///{tmp_path}/study.db"

    def once(tapes: Tapes) -> hpstage.Result:
        study = optuna.create_study(
            study_name="study",
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=3),
            storage=storage,
            load_if_exists=True,
        )
        return search(tapes, study=study, **options)

    tapes = Tapes(Tape())
    tapes.fuse = Fuse(at)
    with pytest.raises(KeyboardInterrupt):
        once(tapes)
    result = once(Tapes(Tape()))
    validate(result.plan)
    expected = search(Tape())
    assert [trial.value for trial in result.study.trials] == [trial.value for trial in expected.study.trials]
