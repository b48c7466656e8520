"""What users of Optuna write to continue an interrupted study: as many trials as are missing."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

import hpstage
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, PopulationBasedTraining, SuccessiveHalving
from hpstage.plan.facts import SearchEnded, SearchStarted
from hpstage.plan.log import read_facts
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate
from tests.unit.search.test_resume import Fuse, Fused

pytestmark = pytest.mark.sampled(4)

optuna.logging.set_verbosity(optuna.logging.ERROR)

N = 20
OPEN = FullTraining(window=3)


class Searched:
    """A study and its store, called again and again as by new processes."""

    def __init__(self, algorithm: Algorithm = OPEN) -> None:
        self.journal, self.algorithm = MemoryJournal(), algorithm
        self.study = optuna.create_study(direction="maximize")

    def call(self, n_trials: int | None, *, until: int = 1000, fuse: int = 0, **options: Any) -> hpstage.Result:
        def stop(study: optuna.Study, trial: FrozenTrial) -> None:
            if sum(one.state.is_finished() for one in study.get_trials(deepcopy=False)) == until:
                raise KeyboardInterrupt

        self.study.sampler = optuna.samplers.TPESampler(seed=1)
        Fused.fuse = Fuse(fuse)
        settings: dict[str, Any] = {"metric": "score", "steps": 4, "store": self.journal, "callbacks": [stop]}
        settings |= {"executor": hpstage.InlineExecutor(), "algorithm": self.algorithm} | options
        result = hpstage.optimize(
            self.study, Fused(), lambda trial: {"a": trial.suggest_int("a", 1, 1000)}, n_trials=n_trials, **settings
        )
        validate(result.plan)
        return result

    def interrupted(self, n_trials: int | None, **how: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.call(n_trials, **how)

    @property
    def states(self) -> list[str]:
        return [trial.state.name for trial in self.study.trials]

    def count(self, kind: type) -> int:
        return sum(isinstance(fact, kind) for fact in read_facts(self.journal))


@pytest.mark.ci
def test_calling_with_the_number_of_incomplete_trials_continues_an_interrupted_search(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = Searched()
    whole.call(N)
    one = Searched()
    one.interrupted(N, until=10)
    assert one.states == ["COMPLETE"] * 10 + ["RUNNING"] * 2
    one.call(N - one.states.count("COMPLETE"))
    assert [trial.params for trial in one.study.trials] == [trial.params for trial in whole.study.trials]
    assert one.states == ["COMPLETE"] * N and one.count(SearchEnded) == 1
    line = "continues with n_trials=10: 10 of its trials have finished, and 10 more will (2 open, 8 new)"
    assert caplog.text.count(line) == 1


def test_calling_again_with_the_same_n_trials_continues_an_interrupted_search() -> None:
    one = Searched()
    one.interrupted(N, until=5)
    one.interrupted(12, until=9)
    one.interrupted(12, until=11)
    one.call(12)
    assert one.states == ["COMPLETE"] * (5 + 12) and one.count(SearchEnded) == 1


@pytest.mark.ci
@pytest.mark.parametrize(("again", "found"), [(N, N), (25, 25), (6, 9 + 6)])
def test_n_trials_counts_all_trials_if_it_is_larger_than_in_the_interrupted_call(again: int, found: int) -> None:
    one = Searched()
    one.interrupted(N, until=5)
    one.interrupted(12, until=9)
    one.call(again)
    assert one.states == ["COMPLETE"] * found


def test_repeated_calls_for_the_number_of_missing_trials_complete_the_search() -> None:
    one = Searched()
    one.interrupted(N, until=10)
    calls = []
    while N - one.states.count("COMPLETE"):
        calls.append(N - len(one.study.trials))
        one.call(calls[-1])
    assert calls == [8, 2] and one.states == ["COMPLETE"] * N


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", [FullTraining(window=N), SuccessiveHalving(2, 2), ASHA(2, 2)], ids=repr)
def test_calling_with_n_trials_0_finishes_the_unfinished_trials(algorithm: Algorithm) -> None:
    one = Searched(algorithm)
    one.interrupted(8, fuse=7)
    number = len(one.study.trials)
    assert "RUNNING" in one.states and (number == 8 or isinstance(algorithm, ASHA))
    one.call(0)
    assert len(one.study.trials) == number and {*one.states} <= {"COMPLETE", "PRUNED"}
    assert one.states.count("COMPLETE") >= 1 and one.count(SearchEnded) == 1


def test_calling_with_fewer_trials_than_are_unfinished_finishes_all_unfinished_trials() -> None:
    one = Searched(FullTraining(window=6))
    one.interrupted(N, until=4)
    open = one.states.count("RUNNING")
    assert open > 2
    one.call(2)
    assert one.states == ["COMPLETE"] * (4 + open)


def test_calling_with_n_trials_0_adds_no_trial_to_a_finished_study(caplog: pytest.LogCaptureFixture) -> None:
    one = Searched()
    one.call(4)
    before = one.count(SearchStarted)
    result = one.call(0)
    assert result.best_trial.number == one.study.best_trial.number
    assert len(one.study.trials) == 4 and one.count(SearchStarted) == before
    assert "Nothing was trained" not in caplog.text and "interrupted" not in caplog.text
    one.call(6, extend=True)  # still the search of four
    assert one.states == ["COMPLETE"] * 6


def test_calling_with_n_trials_0_and_other_steps_leaves_an_interrupted_search_as_it_is() -> None:
    one = Searched()
    one.interrupted(4, until=1)
    open = one.states.count("RUNNING")
    one.call(0, steps=5)
    assert one.states.count("RUNNING") == open
    one.call(4)
    assert one.states == ["COMPLETE"] * 4


def test_a_new_study_may_be_searched_with_n_trials_0() -> None:
    one = Searched()
    one.call(0)
    assert not one.states
    one.call(2)
    assert one.states == ["COMPLETE"] * 2


@pytest.mark.parametrize("algorithm", [SuccessiveHalving(2, 2), PopulationBasedTraining(2)], ids=repr)
def test_calling_with_the_number_of_unfinished_trials_continues_a_synchronous_search(algorithm: Algorithm) -> None:
    whole = Searched(algorithm)
    whole.call(8)
    one = Searched(algorithm)
    one.interrupted(8, until=2)
    finished = sum(trial.state.is_finished() and "hpstage:donor" not in trial.user_attrs for trial in one.study.trials)
    one.call(8 - finished)
    assert one.states == whole.states
    assert [trial.params for trial in one.study.trials] == [trial.params for trial in whole.study.trials]


def test_a_trial_whose_proposal_was_interrupted_is_finished_by_the_next_call() -> None:
    def broken(trial: optuna.Trial) -> dict[str, object]:
        if trial.study is study and trial.number == 2:
            raise KeyboardInterrupt
        return {"a": trial.suggest_int("a", 1, 1000)}

    study, journal = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1)), MemoryJournal()
    settings: dict[str, Any] = {"metric": "score", "steps": 4, "store": journal, "executor": hpstage.InlineExecutor()}
    settings |= {"algorithm": FullTraining(window=1)}
    with pytest.raises(KeyboardInterrupt):
        hpstage.optimize(study, Tape(), broken, n_trials=5, **settings)
    assert study.trials[2].state == TrialState.RUNNING
    hpstage.optimize(study, Tape(), lambda trial: {"a": trial.suggest_int("a", 1, 1000)}, n_trials=0, **settings)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
