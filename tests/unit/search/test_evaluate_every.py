"""evaluate_every: curves that cost no training, and that neither the algorithm nor the order of arrival sees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, MedianStopping, PopulationBasedTraining, SuccessiveHalving
from hpstage.errors import UsageError
from hpstage.plan.facts import TrialId, UserFailure
from hpstage.plan.messages import Report
from hpstage.scheduler.answers import Answer
from hpstage.search.targets import Targets
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone

pytestmark = pytest.mark.sampled(8)

STEPS = 16


def space(trial: optuna.Trial) -> dict[str, object]:
    drop = trial.suggest_categorical("drop", [4, 7, 12])
    return {"lr": s.multistep(trial.suggest_float("lr", 0.1, 1.0, step=0.3), [drop])}


def search(
    store: object, *, n_trials: int = 8, trainable: object = None, steps: int = STEPS, **options: object
) -> hpstage.Result:
    study = options.pop("study", None) or optuna.create_study(
        study_name="study", sampler=optuna.samplers.RandomSampler(seed=1)
    )
    return hpstage.optimize(
        study,  # type: ignore[arg-type]
        trainable or Tape(),
        space,
        metric="score",
        steps=steps,
        n_trials=n_trials,
        executor=options.pop("executor", None) or hpstage.InlineExecutor(),  # type: ignore[arg-type]
        store=store,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def outcome(result: hpstage.Result) -> list[tuple[object, ...]]:
    return [(trial.params, trial.state, trial.value) for trial in result.study.trials]


@pytest.mark.ci
@pytest.mark.parametrize("every", [1, 3, 5, 16, 100])
@pytest.mark.parametrize(
    "algorithm",
    [FullTraining(), SuccessiveHalving(2, 2), MedianStopping(4, 4, 2), ASHA(2, 2), PopulationBasedTraining(4)],
    ids=lambda algorithm: type(algorithm).__name__,
)
@pytest.mark.ci_one_in(2)
def test_intermediate_values_are_exact_and_change_neither_outcomes_nor_trained_steps(
    algorithm: Algorithm, every: int
) -> None:
    plain = search(MemoryJournal(), algorithm=algorithm)
    result = search(MemoryJournal(), algorithm=algorithm, evaluate_every=every)
    assert outcome(result) == outcome(plain)
    assert result.savings.steps_trained == plain.savings.steps_trained == result.savings.steps_unique
    for trial, without in zip(result.study.trials, plain.study.trials, strict=True):
        last = max(without.intermediate_values)
        points = set(range(every, last, every))
        assert trial.intermediate_values.keys() == points | without.intermediate_values.keys()
        schedules = result.schedules(trial)
        for step, value in trial.intermediate_values.items():
            assert value == alone(schedules, step).score
        assert {step: metrics["score"] for step, metrics in result.trial(trial).metrics.items()}.items() >= (
            trial.intermediate_values.items()
        )


def test_an_interrupted_search_resumes_with_the_same_intermediate_values() -> None:
    class Interrupted(hpstage.InlineExecutor):
        left = 10

        def wait(self, timeout: float | None) -> list[Report]:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return super().wait(timeout)

    storage = optuna.storages.InMemoryStorage()
    whole = search(MemoryJournal(), evaluate_every=3)
    journal = MemoryJournal()
    study = optuna.create_study(study_name="study", storage=storage, sampler=optuna.samplers.RandomSampler(seed=1))
    with pytest.raises(KeyboardInterrupt):
        search(journal, study=study, executor=Interrupted(), evaluate_every=3)
    again = optuna.load_study(study_name="study", storage=storage, sampler=optuna.samplers.RandomSampler(seed=1))
    result = search(journal, study=again, evaluate_every=3)
    assert outcome(result) == outcome(whole)
    assert [t.intermediate_values for t in result.study.trials] == [t.intermediate_values for t in whole.study.trials]


def test_steps_trained_by_an_earlier_call_get_no_intermediate_values_and_are_not_retrained(tmp_path: Path) -> None:
    first = search(tmp_path, n_trials=2)
    longer = search(tmp_path, n_trials=2, study=first.study, steps=24, extend=True, evaluate_every=5)
    assert longer.savings.steps_trained == longer.savings.steps_unique - first.savings.steps_unique
    for trial in longer.study.trials[2:]:
        assert sorted(trial.intermediate_values) == [STEPS, 20, 24]


def test_intermediate_values_that_are_nan_are_left_out() -> None:
    class Late(Tape):
        def evaluate(self) -> Mapping[str, float]:
            return {"score": float("nan") if self.score < 1 else self.score}

    result = search(MemoryJournal(), trainable=Late(), n_trials=3, evaluate_every=1)
    assert all(value == value for trial in result.study.trials for value in trial.intermediate_values.values())


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "5"])
def test_an_invalid_evaluate_every_is_refused(every: object) -> None:
    with pytest.raises(UsageError, match="evaluate_every"):
        search(MemoryJournal(), evaluate_every=every)


# --- targets ----------------------------------------------------------------------------------------------


def answered(step: int) -> Answer:
    return Answer(TrialId("study/0"), step, {"score": float(step)})


def next_target(targets: Targets) -> tuple[int, list[int]]:
    """The next target's step, and the steps of the answers that it waited for."""
    found = targets.next()
    assert found is not None
    return found[0], [answer.step for answer in found[1]]


def test_synchronous_targets_come_back_in_order_with_all_their_intermediate_steps() -> None:
    targets = Targets(synchronous=True)
    assert targets.ask(0, 8, [2, 4]) == [2, 4, 8]
    assert targets.ask(1, 8) == [8]
    targets.answer(1, answered(8))
    for step in (8, 2):
        targets.answer(0, answered(step))
        assert targets.next() is None
    targets.answer(0, answered(4))
    assert next_target(targets) == (8, [2, 4, 8])
    assert next_target(targets) == (8, [8])
    assert targets.next() is None and not len(targets)


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_target_requests_no_step_that_was_already_answered(synchronous: bool) -> None:
    targets = Targets(synchronous=synchronous)
    targets.ask(0, 8, [4])
    for _ in range(2):  # the second time, it is no news
        targets.answer(0, answered(4))
    assert targets.ask(0, 4) == []
    targets.answer(0, answered(8))
    targets.answer(0, answered(8))
    assert sorted(next_target(targets) for _ in range(2)) == [(4, [4]), (8, [4, 8])]
    assert targets.next() is None and not len(targets)


@given(st.permutations([(index, step) for index in range(3) for step in (2, 4, 8)]), st.booleans())
def test_each_target_comes_back_once_whatever_the_order_of_its_answers(
    order: list[tuple[int, int]], synchronous: bool
) -> None:
    targets = Targets(synchronous=synchronous)
    for index in range(3):
        targets.ask(index, 4, [2])
        assert targets.ask(index, 8, [4]) == [8]
    back = []
    for index, step in order:
        failure = UserFailure("x", "") if step == 8 else None
        targets.answer(index, Answer(TrialId(f"study/{index}"), step, None if failure else {}, failure))
        while (found := targets.next()) is not None:
            back.append((found[1][-1].trial, [answer.step for answer in found[1]]))
    expected = [(f"study/{index}", steps) for index in range(3) for steps in ([2, 4], [4, 8])]
    assert sorted(back) == expected
    assert not synchronous or back == expected


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_target_beyond_the_end_of_its_trial_is_answered_at_the_end(synchronous: bool) -> None:
    targets = Targets(synchronous=synchronous)
    assert targets.ask(0, 4, end=5) == [4]
    targets.answer(0, answered(4))
    assert next_target(targets) == (4, [4])
    for step in (8, 16):  # the second time, it is known
        assert targets.ask(0, step, end=5) == [5]
        targets.answer(0, answered(5))
        assert next_target(targets) == (step, [5])
    assert targets.reach(0) == 5
