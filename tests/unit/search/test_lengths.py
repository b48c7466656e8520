"""A length per trial: where schedules end, or as the space states."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algorithm import Algorithm
from hpstage.algos import (
    ASHA,
    FullTraining,
    Hyperband,
    MedianStopping,
    OptunaPruner,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from hpstage.errors import UsageError
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Counter, Tape, alone
from tests.invariants import validate
from tests.unit.search.test_resume import Fuse, Fused

pytestmark = pytest.mark.sampled(4)

STEPS = 12
ALGORITHMS = [
    FullTraining(),
    FullTraining(window=2),
    SuccessiveHalving(2, 2),
    SuccessiveHalving(2, 2, tree_aware=False),
    Hyperband(2, 2),
    ASHA(2, 2),
    ASHA(2, 2, variant="stopping"),
    MedianStopping(2, 2, 2),
    OptunaPruner(2, 2),
]


def stated(trial: optuna.Trial) -> dict[str, object]:
    """Many trials begin equally, and end at different steps."""
    lr = s.piecewise({0: trial.suggest_int("first", 1, 2), 4: trial.suggest_int("late", 1, 2)})
    return {"lr": lr, "steps": trial.suggest_int("length", 1, STEPS)}


def ending(trial: optuna.Trial) -> dict[str, object]:
    return {"lr": stated(trial)["lr"].until(trial.suggest_int("length", 1, STEPS)), "wd": 0.1}  # type: ignore[attr-defined]


def mixed(trial: optuna.Trial) -> dict[str, object]:
    """Half of the trials say nothing of their length."""
    described = stated(trial)
    return {"lr": described["lr"]} if trial.params["length"] % 2 else described


def search(
    space: Callable[..., Any] = stated, trainable: object = None, n_trials: int = 12, **options: Any
) -> hpstage.Result:
    study = options.pop("study", None) or optuna.create_study(
        study_name="study", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=5)
    )
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "checkpoint_every": 3, "store": MemoryJournal()}
    settings |= {"executor": hpstage.InlineExecutor(), "n_trials": n_trials} | options
    return hpstage.optimize(study, trainable or Tape(), space, **settings)


def length(trial: optuna.trial.FrozenTrial, space: Callable[..., Any]) -> int:
    number = int(trial.params["length"])
    return STEPS if space is mixed and number % 2 else number


def check_trials(result: hpstage.Result, space: Callable[..., Any]) -> None:
    """Trials are complete at their own ends, or pruned before, with the values that they have alone."""
    validate(result.plan)
    for trial in result.study.trials:
        trained = result.trial(trial)
        end = length(trial, space)
        assert trained.planned.steps == end >= trained.planned.requested == trial.user_attrs["hpstage:steps"]
        assert trial.state == (TrialState.COMPLETE if trained.planned.requested == end else TrialState.PRUNED)
        assert max(trial.intermediate_values) == trained.planned.requested
        for step, value in trial.intermediate_values.items():
            assert value == alone(trained.schedules, step).score
        assert all(schedule.length == end for schedule in trained.schedules.values())


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("space", [stated, ending, mixed])
@pytest.mark.ci_one_in(2)
def test_each_trial_ends_at_its_own_length_under_every_algorithm(
    algorithm: Algorithm, space: Callable[..., Any]
) -> None:
    result = search(space, algorithm=algorithm)
    check_trials(result, space)
    assert TrialState.COMPLETE in {trial.state for trial in result.study.trials}


def test_a_length_given_by_steps_or_by_the_end_of_a_schedule_gives_the_same_trials() -> None:
    result, other = search(stated), search(lambda trial: {"lr": ending(trial)["lr"]})
    assert [trial.value for trial in result.study.trials] == [trial.value for trial in other.study.trials]
    assert result.savings.steps_trained == other.savings.steps_trained == result.savings.steps_unique
    assert result.savings.steps_asked == sum(int(trial.params["length"]) for trial in result.study.trials)


@pytest.mark.parametrize(("short", "requested"), [(5, [3, 4, 4, 4]), (1, [3, 12, 12, 4])])
def test_a_trial_that_ends_before_a_rung_is_compared_at_the_rung_by_its_last_value(
    short: int, requested: list[int]
) -> None:
    """Trials 1 and 2 are one line. At step 4, one candidate of three continues; the trial that is over is complete."""
    values, lengths = [short, 2, 2, 1], [3, 12, 12, 12]
    result = search(
        lambda trial: {"x": values[trial.number], "steps": lengths[trial.number]},
        Counter(),
        metric="total",
        algorithm=SuccessiveHalving(4, 2),
        n_trials=4,
    )
    assert [result.trial(number).planned.requested for number in range(4)] == requested
    assert [trial.state for trial in result.study.trials] == [
        TrialState.COMPLETE if requested[number] == lengths[number] else TrialState.PRUNED for number in range(4)
    ]
    assert result.study.trials[0].value == 3 * short


def test_halving_treats_trials_of_one_branch_with_different_lengths_as_two_candidates() -> None:
    result = search(
        lambda trial: {"x": 1, "steps": [4, 12][trial.number]},
        Counter(),
        metric="total",
        algorithm=SuccessiveHalving(4, 2),
        n_trials=2,
    )
    # At step 4 they are one candidate, which continues; at step 8 they are two, of which one does.
    assert [(trial.state, result.trial(trial).planned.requested) for trial in result.study.trials] == [
        (TrialState.COMPLETE, 4),
        (TrialState.COMPLETE, 12),
    ]
    assert result.savings.steps_trained == 12


def test_intermediate_evaluations_end_with_the_trial() -> None:
    result = search(evaluate_every=2)
    for trial in result.study.trials:
        end = int(trial.params["length"])
        assert sorted(trial.intermediate_values) == sorted({*range(2, end, 2), end})
    assert result.savings.steps_trained == result.savings.steps_unique


# --- contradictions ---------------------------------------------------------------------------------------


class Unopened(hpstage.InlineExecutor):
    def open(self, *arguments: Any) -> Any:
        raise AssertionError("workers were started")


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"lr": s.onecycle(1, 8), "steps": 10}, r"'lr' ends at step 8, but space\(\) returned 10 steps; add \.then"),
        ({"lr": s.onecycle(1, 11), "steps": 10}, r"'lr' ends at step 11, .* 10 steps; bound it with \.until\(10\)"),
        ({"lr": 1, "steps": STEPS + 1}, rf"returned {STEPS + 1} steps, but a trial of this call has at most {STEPS}"),
        ({"lr": s.onecycle(1, 8), "wd": s.onecycle(1, 9)}, r"different steps .*'lr' at 8, 'wd' at 9.*\.until\(8\)"),
        ({"lr": s.sampled([])}, "the schedule of 'lr' has no steps"),
        ({"lr": 1, "steps": 0}, "'steps': the trial's length is 0; it must be a whole number of steps, at least 1"),
        ({"lr": 1, "steps": 2.5}, "'steps': the trial's length is 2.5"),
        ({"lr": 1, "steps": True}, "'steps': the trial's length is True"),
        ({"lr": 1, "steps": s.linear(3.0)}, "'steps': this name is reserved for the trial's length"),
        ({"steps": 3}, "no hyperparameters"),
    ],
)
@pytest.mark.parametrize("rare", [False, True])
def test_contradictory_lengths_are_named_before_workers_start_and_leave_no_trial(
    described: dict[str, object], message: str, rare: bool
) -> None:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"kind": ["good", "fine", "bad"]}, seed=0))

    def space(trial: optuna.Trial) -> dict[str, object]:
        kind = trial.suggest_categorical("kind", ["good", "fine", "bad"])
        return {"lr": 1, "steps": 4} if rare and kind != "bad" else described

    with pytest.raises(UsageError, match=rf"{message}.*tried out with \{{'kind': "):
        search(space, study=study, executor=Unopened())
    assert study.trials == []


def test_an_algorithm_that_forks_trials_requires_equal_lengths() -> None:
    study = optuna.create_study()
    with pytest.raises(UsageError, match=rf"has 5 steps, but the algorithm forks .* must all have {STEPS}"):
        search(
            lambda trial: {"lr": 1, "steps": 5}, study=study, executor=Unopened(), algorithm=PopulationBasedTraining(4)
        )
    assert study.trials == []
    result = search(lambda trial: {"lr": s.constant(1).until(STEPS + 5)}, algorithm=PopulationBasedTraining(4))
    assert len(result.study.trials) > 12


@pytest.mark.parametrize(
    "sampler",
    [
        optuna.samplers.RandomSampler(seed=3),
        optuna.samplers.TPESampler(seed=3, n_startup_trials=2),
        optuna.samplers.GridSampler({"x": [0.0, 1.0, 2.0, 3.0, 4.0], "y": [1]}, seed=3),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_trying_out_the_space_changes_no_proposal_of_a_seeded_study(sampler: Any) -> None:
    def suggest(trial: optuna.Trial) -> dict[str, int | float]:
        return {"x": trial.suggest_float("x", 0, 5), "y": trial.suggest_int("y", 1, 2)}

    plain = optuna.create_study(sampler=copy.deepcopy(sampler))
    plain.optimize(lambda trial: alone(constants(suggest(trial)), 3).score, n_trials=5)
    study = optuna.create_study(sampler=sampler)
    search(suggest, study=study, n_trials=5, steps=3, algorithm=FullTraining(window=1))
    assert [trial.params for trial in study.trials] == [trial.params for trial in plain.trials]


def constants(values: dict[str, int | float]) -> dict[str, s.Schedule]:
    return {name: s.constant(value) for name, value in values.items()}


def test_trying_out_a_space_leaves_the_global_random_generators_unchanged() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    with pytest.raises(AssertionError, match="workers were started"):
        search(lambda trial: {"lr": random.random() + np.random.random()}, executor=Unopened())
    assert (random.random(), np.random.random()) == expected


def test_a_space_draws_the_same_numbers_from_global_random_generators_as_without_training() -> None:
    found, study = [], optuna.create_study()

    def draw() -> float:
        return random.random() + np.random.random()

    def space(trial: Any) -> dict[str, float]:
        value = draw()
        if trial.study is study:
            found.append(value)
        return {"lr": value}

    random.seed(1)
    np.random.seed(1)
    search(space, study=study, n_trials=4, algorithm=FullTraining(window=1), callbacks=[lambda *_: random.random()])
    random.seed(1)
    np.random.seed(1)
    expected = []
    for _ in range(4):
        expected.append(draw())
        random.random()
    assert found == expected


def test_a_space_that_fails_when_tried_out_but_works_in_the_study_is_accepted() -> None:
    """In the one in memory there is no history."""
    study = optuna.create_study()
    study.set_user_attr("lr", 3)
    result = search(lambda trial: {"lr": trial.study.user_attrs["lr"]}, study=study, n_trials=1)
    assert result.best_value == alone({"lr": s.constant(3)}, STEPS).score


# --- further ----------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(2, 2)], ids=repr)
def test_extended_trials_are_trained_to_their_own_lengths(algorithm: Algorithm, tmp_path: Path) -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        end = trial.suggest_int("length", 1, STEPS)
        lr = s.piecewise({0: trial.suggest_int("first", 1, 2), 4: trial.suggest_int("late", 1, 2)})
        return {"lr": lr if end % 3 == 0 else lr.until(end)}

    study = optuna.create_study(study_name="study", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=5))
    first = search(space, study=study, store=tmp_path, steps=4, algorithm=algorithm)
    second = search(space, study=study, store=tmp_path, extend=True, algorithm=algorithm)
    whole = search(space, algorithm=algorithm)
    grown = {trial.user_attrs.get("hpstage:extends", trial.number): trial for trial in study.trials}
    for trial in whole.study.trials:
        other = grown[trial.number]
        assert (other.state, other.value, other.params) == (trial.state, trial.value, trial.params)
        assert second.schedules(other) == whole.schedules(trial)
    trained = first.savings.steps_trained + second.savings.steps_trained
    assert trained == merged(second.plan).steps_unique


def test_an_extension_that_would_shorten_a_trial_is_refused() -> None:
    store, study = MemoryJournal(), optuna.create_study()
    search(lambda trial: {"lr": 1, "steps": 5}, study=study, store=store, n_trials=1, steps=8)
    with pytest.raises(UsageError, match="trial 0 had 5 steps, and the space now gives it 4"):
        search(lambda trial: {"lr": 1, "steps": 4}, study=study, store=store, n_trials=1, extend=True)


@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(2, 2)], ids=repr)
def test_an_interrupted_search_of_several_lengths_ends_as_an_uninterrupted_search(
    algorithm: Algorithm, tmp_path: Path
) -> None:
    Fused.fuse = Fuse()
    expected = search(trainable=Fused(), algorithm=algorithm)
    for at in range(1, Fused.fuse.touched, 7):
        store = tmp_path / f"{at}"
        study = optuna.create_study(
            study_name="study", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=5)
        )
        Fused.fuse = Fuse(at)
        with pytest.raises(KeyboardInterrupt):
            search(study=study, trainable=Fused(), algorithm=algorithm, store=store)
        again = search(study=study, trainable=Fused(), algorithm=algorithm, store=store)
        check_trials(again, stated)
        assert [(t.params, t.state, t.value) for t in again.study.trials] == [
            (t.params, t.state, t.value) for t in expected.study.trials
        ]


@pytest.mark.ci
def test_preflight_predicts_the_steps_of_a_search_of_several_lengths() -> None:
    planned = hpstage.preflight(stated, steps=STEPS, n_trials=12, sampler=optuna.samplers.RandomSampler(seed=5))
    saved = search(stated).savings
    assert (planned.steps_asked.median, planned.steps_unique.median) == (saved.steps_asked, saved.steps_unique)
    assert math.isclose(planned.merge_rate.median, saved.merge_rate)


def test_a_search_without_sharing_trains_each_trial_to_its_own_length() -> None:
    alone, shared = search(stated, sharing=False), search(stated)
    assert alone.savings.steps_trained == shared.savings.steps_asked
    assert [trial.value for trial in alone.study.trials] == [trial.value for trial in shared.study.trials]
