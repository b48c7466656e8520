"""Spaces that reject parameters, by TrialPruned or an exception that is caught: as objectives do in Optuna."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.samplers import GridSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

import hpstage
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, Hyperband, PopulationBasedTraining, SuccessiveHalving
from hpstage.checking.ways import draw
from hpstage.errors import TrainingError, UsageError
from hpstage.errors.arguments import in_tuple
from hpstage.optuna.stage_tree_sampler import StageTreeSampler
from hpstage.plan.facts import TrialProposed
from hpstage.plan.log import read_facts
from hpstage.rehearsal.preflight import preflight
from hpstage.rehearsal.samplers import values_met
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape

pytestmark = pytest.mark.sampled(10)

optuna.logging.set_verbosity(optuna.logging.ERROR)

STEPS = 8


class Unstable(Exception):
    pass


def space(error: type[Exception] = optuna.TrialPruned) -> Callable[[optuna.Trial], dict[str, object]]:
    def suggest(trial: optuna.Trial) -> dict[str, object]:
        rate, layers = trial.suggest_categorical("rate", [0.1, 0.4]), trial.suggest_int("layers", 1, 3)
        if rate > 0.3 and layers == 3:
            raise error("too unstable")
        return {"rate": rate, "layers": layers}

    return suggest


def search(study: optuna.Study, space: Any, **options: Any) -> hpstage.Result:
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "n_trials": 12, "store": MemoryJournal()}
    return hpstage.optimize(study, Tape(), space, executor=hpstage.InlineExecutor(), **settings | options)


def in_optuna(space: Callable[[optuna.Trial], dict[str, object]], study: optuna.Study, **options: Any) -> None:
    def objective(trial: optuna.Trial) -> float:
        values = space(trial)
        tape = Tape()
        tape.setup(values)  # type: ignore[arg-type]
        for step in range(STEPS):
            tape.train(step, values)  # type: ignore[arg-type]
        return tape.evaluate()["score"]

    study.optimize(objective, n_trials=12, **options)


def found(study: optuna.Study) -> list[tuple[object, ...]]:
    return [(trial.params, trial.state, trial.values) for trial in study.trials]


@pytest.mark.parametrize("sampler", [RandomSampler, TPESampler], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("error", [optuna.TrialPruned, Unstable], ids=lambda kind: kind.__name__)
def test_a_space_that_rejects_parameters_gives_the_same_study_as_optuna(
    sampler: type[RandomSampler | TPESampler], error: type[Exception]
) -> None:
    study, plain = (optuna.create_study(sampler=sampler(seed=1)) for _ in range(2))
    in_optuna(space(error), plain, catch=(Unstable,))
    result = search(study, space(error), algorithm=FullTraining(window=1), catch=(Unstable,))
    assert found(study) == found(plain)
    ended = TrialState.PRUNED if error is optuna.TrialPruned else TrialState.FAIL
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE, ended}
    rejected = next(trial for trial in study.trials if trial.state == ended)
    with pytest.raises(UsageError, match=r"was not trained: the space rejected it \(.*too unstable\)"):
        result.trial(rejected)
    why = "hpstage:ended" if error is optuna.TrialPruned else "hpstage:failure"
    for trial in study.trials:
        assert ("too unstable" in trial.user_attrs.get(why, "")) == (trial.state == ended)


@pytest.mark.parametrize(
    "algorithm",
    [FullTraining(), SuccessiveHalving(2, 2), ASHA(2, 2), Hyperband(2, 2), PopulationBasedTraining(2, 0.4)],
    ids=lambda algorithm: type(algorithm).__name__,
)
@settings(max_examples=6)
@given(seed=st.integers(0, 100), after=st.integers(1, 12))
@pytest.mark.ci_one_in(2)
def test_an_interrupted_search_with_rejected_trials_resumes_and_finishes_every_trial(
    algorithm: Algorithm, seed: int, after: int
) -> None:
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(trial.state.is_finished() for trial in study.trials) == after:
            raise KeyboardInterrupt

    studies = [optuna.create_study(sampler=RandomSampler(seed=seed)) for _ in range(2)]
    whole = search(studies[0], space(), algorithm=algorithm)
    journal = MemoryJournal()
    try:
        search(studies[1], space(), algorithm=algorithm, store=journal, callbacks=[stop])
    except KeyboardInterrupt:
        studies[1].sampler = RandomSampler(seed=seed)
        search(studies[1], space(), algorithm=algorithm, store=journal)
    if algorithm.synchronous:
        assert found(studies[1]) == found(studies[0])
    assert all(trial.state.is_finished() for trial in studies[1].trials)
    assert sum(fact.rejected is not None for fact in proposals(journal)) == rejected(studies[1])
    assert sum(fact.fork is None for fact in proposals(journal)) == 12
    assert whole.savings.trials <= 12 or algorithm.forks


def proposals(journal: MemoryJournal) -> list[TrialProposed]:
    facts = read_facts(journal)
    return [fact for fact in facts if isinstance(fact, TrialProposed) and fact.number is not None]


def rejected(study: optuna.Study) -> int:
    return sum(trial.params["rate"] > 0.3 and trial.params["layers"] == 3 for trial in study.trials)


def test_a_search_that_an_uncaught_error_of_the_space_stopped_can_be_continued() -> None:
    journal = MemoryJournal()
    study = optuna.create_study(sampler=RandomSampler(seed=1))
    with pytest.raises(Unstable):
        search(study, space(Unstable), catch=(), store=journal)
    study.sampler = RandomSampler(seed=1)
    search(study, space(Unstable), catch=(Unstable,), store=journal)
    assert sum(trial.state == TrialState.COMPLETE for trial in study.trials) == 12 - len(
        [fact for fact in proposals(journal) if fact.rejected is not None]
    )


def test_a_resumed_search_may_begin_with_rejected_trials_if_its_space_worked_before() -> None:
    def rare(trial: optuna.Trial) -> dict[str, object]:
        if trial.suggest_float("rate", 0, 1) < 0.93:
            raise Unstable
        return {"rate": trial.params["rate"]}

    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 1:
            raise KeyboardInterrupt

    study, journal = optuna.create_study(sampler=RandomSampler(seed=0)), MemoryJournal()
    study.enqueue_trial({"rate": 0.99})
    options: dict[str, Any] = {"store": journal, "n_trials": 6, "catch": (Unstable,)}
    with pytest.raises(KeyboardInterrupt):
        search(study, rare, callbacks=[stop], algorithm=FullTraining(window=1), **options)
    study.sampler = RandomSampler(seed=0)
    search(study, rare, algorithm=FullTraining(window=1), **options)
    assert len(study.trials) == 6


def test_the_error_of_a_space_that_always_fails_is_raised_at_the_first_trial() -> None:
    def broken(trial: optuna.Trial) -> dict[str, object]:
        return {"rate": trial.suggest_float("rate", 0, 1), "layers": layers}  # type: ignore[name-defined]  # noqa: F821

    study = optuna.create_study()
    with pytest.raises(NameError, match="layers"):
        search(study, broken)
    assert len(study.trials) == 1


def test_a_search_warns_if_its_space_rejects_every_trial(caplog: pytest.LogCaptureFixture) -> None:
    def never(trial: optuna.Trial) -> dict[str, object]:
        raise optuna.TrialPruned(f"not {trial.suggest_int('a', 1, 3)}")

    study = optuna.create_study(sampler=RandomSampler(seed=0))
    search(study, never)
    assert [trial.state for trial in study.trials] == [TrialState.PRUNED] * 12
    assert "No trial of the search has a value: the space rejected all 12" in caplog.text


@pytest.mark.parametrize("state", [TrialState.COMPLETE, TrialState.FAIL, TrialState.WAITING], ids=lambda one: one.name)
@pytest.mark.parametrize("catch", [(), (Unstable,)], ids=repr)
def test_an_error_of_a_space_is_handled_by_catch_even_if_the_space_ended_its_trial(
    state: TrialState, catch: Any
) -> None:
    def suggest(trial: optuna.Trial) -> dict[str, object]:
        if trial.number == 3:
            if state == TrialState.WAITING:
                trial.storage.set_trial_state_values(trial._trial_id, state)
            else:
                trial.study.tell(trial, 1.0 if state == TrialState.COMPLETE else None, state=state)
            raise Unstable("mine")
        return {"rate": trial.suggest_float("rate", 0, 1)}

    study = optuna.create_study()
    if catch:
        search(study, suggest, catch=catch, n_trials=6)
    else:
        with pytest.raises(Unstable, match="mine"):
            search(study, suggest, catch=catch, n_trials=6)
    assert study.trials[3].state == state
    assert len(study.trials) == (6 if catch else 4)


def test_a_space_with_an_invalid_schedule_raises_an_error_instead_of_a_rejection() -> None:
    def wrong(trial: optuna.Trial) -> dict[str, object]:
        return {"rate": hpstage.schedule.piecewise({0: 1.0, trial.suggest_int("drop", -1, 5): 2.0})}

    study = optuna.create_study(sampler=GridSampler({"drop": [3, -1]}))
    with pytest.raises(UsageError):
        search(study, wrong)


def test_a_grid_counts_rejected_points_as_done() -> None:
    study = optuna.create_study(sampler=GridSampler({"rate": [0.1, 0.4], "layers": [1, 2, 3]}))
    search(study, space(), n_trials=None)
    states = sorted(trial.state.name for trial in study.trials)
    assert states == ["COMPLETE"] * 5 + ["PRUNED"]


def test_a_stage_tree_sampler_passes_rejections_of_the_space_on() -> None:
    study = optuna.create_study(sampler=StageTreeSampler(RandomSampler(seed=1), radius=0.2))
    search(study, space())
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE, TrialState.PRUNED}


def test_rejected_trials_keep_their_parameters_under_a_stage_tree_sampler() -> None:
    study = optuna.create_study(sampler=StageTreeSampler(RandomSampler(seed=1), radius=0.2))
    search(study, space(Unstable), catch=(Unstable,))
    failed = [trial for trial in study.trials if trial.state == TrialState.FAIL]
    assert failed and all(trial.params.keys() == {"rate", "layers"} for trial in failed)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_values_met_covers_a_space_with_rejections_under_a_brute_force_sampler() -> None:
    found = values_met(space(), 4, sampler=optuna.samplers.BruteForceSampler(seed=0), most=9)
    assert {(values["rate"], values["layers"]) for values in found} == {
        (0.1, 1), (0.1, 2), (0.1, 3), (0.4, 1), (0.4, 2)
    }  # fmt: skip


def test_an_extension_does_not_extend_trials_that_the_space_now_rejects(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def later(trial: optuna.Trial) -> dict[str, object]:
        if trial.suggest_int("layers", 1, 2) == 2:
            raise optuna.TrialPruned
        return {"layers": 1}

    study = optuna.create_study(sampler=GridSampler({"layers": [1, 2]}))
    search(study, lambda trial: {"layers": trial.suggest_int("layers", 1, 2)}, store=tmp_path, n_trials=2)
    result = search(study, later, store=tmp_path, n_trials=2, steps=12, extend=True)
    lengths = {trial.params["layers"]: trial.last_step for trial in study.trials}
    assert lengths == {1: 12, 2: 8}
    assert "is not extended: the space rejects it" in caplog.text
    assert result.savings.steps_trained == 4


def test_stopping_a_study_within_the_space_trains_the_trials_proposed_so_far() -> None:
    def stopping(trial: optuna.Trial) -> dict[str, object]:
        if trial.number == 4:
            trial.study.stop()
        return {"a": trial.suggest_int("a", 1, 9)}

    study = optuna.create_study(sampler=RandomSampler(seed=0))
    search(study, stopping, n_trials=50)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 5


def test_a_search_stopped_by_its_space_proposes_no_more_trials_when_it_is_resumed() -> None:
    def stopping(trial: optuna.Trial) -> dict[str, object]:
        if trial.number == 4:
            trial.study.stop()
        return {"a": trial.suggest_int("a", 1, 9)}

    def interrupt(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 3:
            raise KeyboardInterrupt

    study, options = optuna.create_study(), {"n_trials": 50, "store": MemoryJournal()}
    options["algorithm"] = FullTraining(window=2)
    with pytest.raises(KeyboardInterrupt):
        search(study, stopping, callbacks=[interrupt], **options)
    assert len(study.trials) == 5
    search(study, stopping, **options)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 5


# --- forks --------------------------------------------------------------------------------------------------


def dependent(trial: optuna.Trial) -> dict[str, object]:
    low = trial.suggest_int("low", 1, 10)
    return {"low": low, "high": trial.suggest_int("high", low, low + 5), "rate": trial.suggest_float("rate", 0.1, 1.0)}


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_forked_trials_stay_within_the_ranges_of_a_conditional_space(seed: int) -> None:
    study = optuna.create_study(direction="maximize", sampler=RandomSampler(seed=seed))
    algorithm = PopulationBasedTraining(2, 0.5, seed=seed)
    search(study, dependent, n_trials=6, algorithm=algorithm)
    assert len(study.trials) > 6
    for trial in study.trials:
        assert trial.params["low"] <= trial.params["high"] <= trial.params["low"] + 5
        assert 0.1 <= trial.params["rate"] <= 1.0


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_forks_rejected_by_the_space_are_explored_again(seed: int) -> None:
    def suggest(trial: optuna.Trial) -> dict[str, object]:
        a, b = trial.suggest_int("a", 1, 10), trial.suggest_int("b", 1, 10)
        if "hpstage:donor" in trial.user_attrs and (a + b) % 3:
            raise optuna.TrialPruned("not a multiple of 3")
        return {"a": a, "b": b}

    study = optuna.create_study(direction="maximize", sampler=RandomSampler(seed=seed))
    search(study, suggest, n_trials=6, algorithm=PopulationBasedTraining(2, 0.5, seed=seed))
    forks = [trial for trial in study.trials if "hpstage:donor" in trial.user_attrs]
    trained = [trial for trial in forks if trial.intermediate_values]
    assert trained and all((trial.params["a"] + trial.params["b"]) % 3 == 0 for trial in trained)
    assert all(trial.state == TrialState.PRUNED for trial in forks if trial not in trained)
    assert all(trial.state.is_finished() for trial in study.trials)


def test_a_fork_keeps_the_parameters_of_its_donor_if_the_space_rejects_all_other_parameters() -> None:
    def only_even(trial: optuna.Trial) -> dict[str, object]:
        a = trial.suggest_int("a", 1, 1000)
        donor = trial.user_attrs.get("hpstage:donor")
        if donor is not None and a != trial.study.trials[donor].params["a"]:
            raise optuna.TrialPruned
        return {"a": a}

    study = optuna.create_study(direction="maximize", sampler=RandomSampler(seed=0))
    search(study, only_even, n_trials=4, algorithm=PopulationBasedTraining(4, 0.5))
    ends = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert len(ends) == 4
    rejected = [trial for trial in study.trials if trial.state == TrialState.PRUNED and not trial.intermediate_values]
    assert 2 * 5 < len(rejected) <= 2 * 11  # two members are replaced, and equal parameters tried once


# --- what looks at a space ----------------------------------------------------------------------------------


def unstable(trial: optuna.Trial) -> dict[str, object]:
    layers = trial.suggest_int("layers", 1, 3)
    if trial.number % 2 == 0:
        raise Unstable("of no use")
    return {"layers": layers}


def wrong(trial: optuna.Trial) -> dict[str, object]:
    raise KeyError(f"rate of trial {trial.number}")


@pytest.mark.parametrize("catch", [(Exception,), (Unstable,), Unstable], ids=str)
def test_preflight_and_check_accept_the_exceptions_that_catch_names(catch: Any) -> None:
    planned = preflight(unstable, steps=4, sampler="grid", workers=(1,), catch=catch)
    assert planned.trials.median > 0
    assert draw(unstable, None, 0, {}, in_tuple(catch)).params.keys() == {"layers"}


def test_preflight_and_check_raise_errors_that_catch_does_not_name_or_that_always_occur() -> None:
    for space, catch, error in ((unstable, KeyError, Unstable), (wrong, Exception, KeyError)):
        with pytest.raises((error, TrainingError), match="of no use" if space is unstable else "rate of trial"):
            preflight(space, steps=4, n_trials=3, workers=(1,), catch=catch)
        with pytest.raises(error):
            draw(space, None, 0, {}, (catch,))
