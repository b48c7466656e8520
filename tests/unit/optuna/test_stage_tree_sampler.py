"""StageTreeSampler: the base itself at radius 0, and else moved onto earlier beginnings, no further than stated."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, QMCSampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState

import hpstage
from hpstage import schedule as s
from hpstage.errors import UsageError
from hpstage.optuna import StageTreeSampler
from hpstage.optuna.companions import Companions, Wish
from hpstage.optuna.influence import begins, branch_point
from hpstage.optuna.sampler_state import SamplerState
from hpstage.testing.toys import Tape
from tests.unit.searches import schedules

STEPS = 100
Params = dict[str, Any]


def staged(trial: Any) -> Mapping[str, Any]:
    """Four numbers that matter from 0, 30, 60 and 90 on, suggested in another order."""
    last = trial.suggest_float("last", 0.01, 1.0, log=True)
    first = trial.suggest_float("first", 1e-4, 1.0, log=True)
    third = trial.suggest_float("third", 0.0, 1.0)
    second = trial.suggest_int("second", 1, 1000, log=True)
    return {
        "lr": s.piecewise({0: first, 90: first * last}),
        "momentum": s.piecewise({0: 0.5, 60: third}),
        "batch": s.piecewise({0: 8, 30: second}),
    }


def trunk(trial: Any) -> Mapping[str, Any]:
    return {"lr": s.piecewise({0: trial.suggest_float("a", 0, 1), STEPS - 1: trial.suggest_float("b", 0, 1)})}


BEGINS = {"first": 0, "second": 30, "third": 60, "last": 90}


def shared_steps(a: Params, b: Params) -> int:
    """Steps that two trials of ``staged`` share: up to the first parameter that differs."""
    return min([begin for name, begin in BEGINS.items() if a[name] != b[name]], default=STEPS)


def position(distribution: BaseDistribution, value: float) -> float:
    """A value in its parameter's own scale, from 0 to 1."""
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    scale: Callable[[float], float] = math.log if distribution.log else float
    low, high = scale(distribution.low), scale(distribution.high)
    return (scale(value) - low) / (high - low)


class Recorded(RandomSampler):
    """A random sampler that remembers what it proposed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.proposed: dict[int, Params] = {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        value = super().sample_independent(study, trial, param_name, param_distribution)
        self.proposed.setdefault(trial.number, {})[param_name] = value
        return value


def search(sampler: BaseSampler, space: Callable[[Trial], object], n_trials: int, **options: Any) -> optuna.Study:
    study = optuna.create_study(sampler=sampler, **options)
    for number in range(n_trials):
        trial = study.ask()
        space(trial)
        study.tell(trial, [math.sin(number)] * len(study.directions))
    return study


def params(study: optuna.Study) -> list[Params]:
    return [trial.params for trial in study.get_trials(deepcopy=False)]


# --- radius 0 ---------------------------------------------------------------------------------------------------


def _gp(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return GPSampler(seed=seed, n_startup_trials=3)


def _qmc(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)


def _cma_es(seed: int) -> BaseSampler:
    pytest.importorskip("cmaes")
    return CmaEsSampler(seed=seed, n_startup_trials=3, warn_independent_sampling=False)


BASES: dict[str, tuple[Callable[[int], BaseSampler], int]] = {
    "random": (RandomSampler, 20),
    "tpe": (lambda seed: TPESampler(seed=seed, n_startup_trials=5), 20),
    "tpe-univariate": (lambda seed: TPESampler(seed=seed, n_startup_trials=5, multivariate=False), 20),
    "cma-es": (_cma_es, 20),
    "nsga-ii": (lambda seed: NSGAIISampler(seed=seed, population_size=5), 20),
    "qmc": (_qmc, 20),
    "gp": (_gp, 6),
}


def conditional(trial: Any) -> Mapping[str, Any]:
    kind = trial.suggest_categorical("kind", ["flat", "drop"])
    lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    if kind == "flat":
        return {"lr": lr, "wd": s.piecewise({0: 0.0, 50: trial.suggest_float("wd", 0.0, 1.0)})}
    at = trial.suggest_int("at", 20, 80, step=5)
    return {"lr": s.piecewise({0: lr, at: lr * trial.suggest_float("factor", 0.0, 1.0)}), "wd": 0.0}


@pytest.mark.parametrize("known", [{}, {"space": conditional, "steps": STEPS}], ids=["order", "space"])
@pytest.mark.parametrize("base", list(BASES))
def test_a_stage_tree_sampler_with_radius_0_proposes_and_draws_exactly_as_its_base_sampler(
    base: str, known: dict[str, Any]
) -> None:
    make, n_trials = BASES[base]
    alone, wrapped = make(7), StageTreeSampler(make(7), radius=0, **known)
    assert params(search(wrapped, conditional, n_trials)) == params(search(alone, conditional, n_trials))
    drawn = {f"base_sampler.{path}": state for path, state in SamplerState(alone).take().items()}
    assert SamplerState(wrapped).take() == drawn


# --- what is proposed -------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), radius=st.floats(0.01, 1.0))
def test_values_move_at_most_by_the_scaled_radius_and_the_last_parameter_never_moves(seed: int, radius: float) -> None:
    base = Recorded(seed)
    study = search(StageTreeSampler(base, radius=radius, space=staged, steps=STEPS), staged, 25)
    trials = study.get_trials(deepcopy=False)
    for trial in trials:
        saved = max((shared_steps(trial.params, other.params) for other in trials[: trial.number]), default=0)
        allowed = radius * math.sqrt(10 / max(10, trial.number)) * saved / STEPS
        proposed = base.proposed[trial.number]
        for name, distribution in trial.distributions.items():
            moved = position(distribution, trial.params[name]) - position(distribution, proposed[name])
            assert abs(moved) <= allowed + 1e-9
        assert trial.params["last"] == proposed["last"]


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), radius=st.floats(0.02, 1.0))
def test_each_trial_shares_the_most_steps_that_the_radius_allows_with_an_earlier_trial(
    seed: int, radius: float
) -> None:
    base = Recorded(seed)
    study = search(StageTreeSampler(base, radius=radius, space=staged, steps=STEPS), staged, 25)
    trials = study.get_trials(deepcopy=False)
    in_order = sorted(BEGINS, key=lambda name: BEGINS[name])
    for trial in trials:
        proposed = base.proposed[trial.number]
        possible = [0]
        for other in trials[: trial.number]:
            away = [
                abs(
                    position(trial.distributions[name], other.params[name]) - position(trial.distributions[name], value)
                )
                for name, value in ((name, proposed[name]) for name in in_order)
            ]
            for depth in (1, 2, 3):
                saved = BEGINS[in_order[depth]]
                allowed = radius * math.sqrt(10 / max(10, trial.number)) * saved / STEPS
                if max(away[:depth]) <= allowed:
                    possible.append(saved)
        shared = max((shared_steps(trial.params, other.params) for other in trials[: trial.number]), default=0)
        assert shared == max(possible)


def test_no_trial_repeats_another_trial_even_if_all_trials_are_within_the_radius() -> None:
    known = StageTreeSampler(RandomSampler(seed=1), radius=1.0, space=staged, steps=STEPS)
    assert len({tuple(sorted(trial.items())) for trial in params(search(known, staged, 60))}) == 60

    def two(trial: Any) -> None:
        trial.suggest_float("a", 0, 1)
        trial.suggest_float("b", 0, 1)

    for base in (RandomSampler(seed=1), TPESampler(seed=1)):
        assert len({trial["b"] for trial in params(search(StageTreeSampler(base, radius=1.0), two, 60))}) == 60


def test_all_trials_share_their_first_steps_if_all_are_within_the_radius() -> None:
    study = search(StageTreeSampler(RandomSampler(seed=1), radius=1.0, space=trunk, steps=STEPS), trunk, 11)
    assert len({trial["a"] for trial in params(study)}) == 1
    assert len({trial["b"] for trial in params(study)}) == 11


def test_no_value_is_moved_if_all_parameters_matter_from_the_first_step() -> None:
    def space(trial: Any) -> Mapping[str, Any]:
        return {"lr": trial.suggest_float("lr", 0, 1), "wd": trial.suggest_float("wd", 0, 1)}

    base = Recorded(3)
    study = search(StageTreeSampler(base, radius=1.0, space=space, steps=STEPS), space, 20)
    assert params(study) == list(base.proposed.values())


def test_categories_are_never_changed_and_values_are_borrowed_only_within_a_category() -> None:
    def space(trial: Any) -> Mapping[str, Any]:
        return {"optimizer": trial.suggest_categorical("optimizer", ["sgd", "adam", "lion"]), **trunk(trial)}

    base = Recorded(3)
    study = search(StageTreeSampler(base, radius=1.0, space=space, steps=STEPS), space, 11)
    trials = params(study)
    assert [trial["optimizer"] for trial in trials] == [p["optimizer"] for p in base.proposed.values()]
    assert len({(trial["optimizer"], trial["a"]) for trial in trials}) == 3
    assert len({trial["a"] for trial in trials}) == 3


def test_a_parameter_that_sets_a_milestone_matters_from_the_earliest_milestone_within_the_radius() -> None:
    def space(trial: Any) -> Mapping[str, Any]:
        drop = trial.suggest_int("drop", 10, 90)
        return {"lr": s.piecewise({0: 1.0, drop: trial.suggest_float("low", 0.0, 0.5)})}

    numbers: dict[str, BaseDistribution] = {"drop": IntDistribution(10, 90), "low": FloatDistribution(0.0, 0.5)}
    at_50 = begins(space, STEPS, {"drop": 50, "low": 0.1}, numbers, 0.1)
    assert at_50 == {"drop": 42, "low": 50}  # 8 steps earlier is the nearest that a tenth of the range allows
    assert begins(space, STEPS, {"drop": 10, "low": 0.1}, numbers, 0.01) == {"drop": 10, "low": 10}


def test_parameters_of_a_plateau_schedule_matter_from_the_first_step_that_they_can_change() -> None:
    def space(trial: Any) -> Mapping[str, Any]:
        factor, patience = trial.suggest_float("factor", 0.1, 0.9), trial.suggest_int("patience", 1, 9)
        plateau = s.plateau(trial.suggest_float("lr", 0.1, 1.0), factor=factor, patience=patience, every=5)
        return {"lr": s.linear(0.1, total_iters=10).until(10).then(plateau)}

    numbers: dict[str, BaseDistribution] = {
        "factor": FloatDistribution(0.1, 0.9),
        "patience": IntDistribution(1, 9),
        "lr": FloatDistribution(0.1, 1.0),
    }
    found = begins(space, STEPS, {"factor": 0.5, "patience": 3, "lr": 0.5}, numbers, 0.1)
    assert found == {"lr": 10, "patience": 10 + 5 * (1 + 2 + 1), "factor": 10 + 5 * (1 + 3 + 1)}


def test_a_parameter_without_effect_does_not_prevent_sharing() -> None:
    def space(trial: Any) -> Mapping[str, Any]:
        trial.suggest_float("unused", 0, 1)
        return trunk(trial)

    study = search(StageTreeSampler(RandomSampler(seed=1), radius=1.0, space=space, steps=STEPS), space, 11)
    assert len({trial["a"] for trial in params(study)}) == 1


def test_the_base_samplers_proposal_is_kept_if_the_space_fails_for_nearby_values() -> None:
    def space(trial: Any) -> Mapping[str, Any]:
        warmup, decay = trial.suggest_int("warmup", 0, 60), trial.suggest_int("decay", 40, 100)
        return {"lr": s.wsd(1.0, STEPS, warmup=min(warmup, STEPS - decay), decay=decay)}

    def broken_nearby(trial: Any) -> Mapping[str, Any]:
        value = trial.suggest_float("a", 0, 1)
        if value not in (0.25, 0.75):
            raise RuntimeError("no such network")
        return {"a": value, "lr": trial.suggest_float("b", 0, 1)}

    search(StageTreeSampler(RandomSampler(seed=2), radius=0.5, space=space, steps=STEPS), space, 20)
    study = optuna.create_study(sampler=StageTreeSampler(RandomSampler(seed=2), space=broken_nearby, steps=STEPS))
    for value in (0.25, 0.75):
        study.enqueue_trial({"a": value})
        trial = study.ask()
        assert broken_nearby(trial)["a"] == value
        study.tell(trial, 0.0)


def test_values_are_borrowed_from_running_and_pruned_but_not_from_failed_or_forked_trials() -> None:
    def begun_as(state: TrialState, reported: int | None = None, *, fork: bool = False) -> int:
        sampler = StageTreeSampler(RandomSampler(seed=5), radius=1.0, space=staged, steps=STEPS)
        study = optuna.create_study(sampler=sampler)
        first = study.ask()
        staged(first)
        if fork:
            first.set_user_attr("hpstage:donor", 0)
        if reported is not None:
            first.report(0.0, reported)
        if state != TrialState.RUNNING:
            study.tell(first, 0.0 if state == TrialState.COMPLETE else None, state=state)
        second = study.ask()
        staged(second)
        return shared_steps(first.params, second.params)

    assert begun_as(TrialState.COMPLETE) == begun_as(TrialState.RUNNING) == 90
    assert begun_as(TrialState.FAIL) == begun_as(TrialState.COMPLETE, fork=True) == 0
    assert begun_as(TrialState.PRUNED) == 0
    assert begun_as(TrialState.PRUNED, 10) == 30  # "first" is borrowed, and nothing that the pruned trial never saw
    assert begun_as(TrialState.PRUNED, 30) == 30
    assert begun_as(TrialState.PRUNED, 31) == 60


def test_enqueued_values_are_kept_and_other_values_do_not_repeat_those_of_earlier_trials() -> None:
    study = optuna.create_study(sampler=StageTreeSampler(RandomSampler(seed=5), radius=1.0, space=trunk, steps=STEPS))
    by_hand: list[Params] = [{"a": 0.3}, {"a": 0.4}, {"a": 0.3}, {"b": 0.5}, {"a": 0.5, "b": 0.5}]
    trials = []
    for fixed in by_hand:
        study.enqueue_trial(fixed)
        trial = study.ask()
        trunk(trial)
        trials.append(trial.params)
        assert trials[-1].items() >= fixed.items()
    assert trials[2]["b"] not in (trials[0]["b"], trials[1]["b"])
    assert trials[3]["a"] not in (0.3, 0.4)  # where b is fixed, a is the last that is free


def test_trials_of_a_conditional_space_share_first_steps_with_trials_of_the_same_category() -> None:
    def space(trial: Any) -> Mapping[str, Any]:
        if trial.suggest_categorical("kind", ["one", "two"]) == "one":
            return trunk(trial)
        c, d = trial.suggest_float("c", 0, 1), trial.suggest_float("d", 0, 1)
        return {"lr": s.piecewise({0: c, STEPS - 1: d})}

    trials = params(search(StageTreeSampler(RandomSampler(seed=5), radius=1.0, space=space, steps=STEPS), space, 11))
    assert [len({trial[name] for trial in trials if name in trial}) for name in "ac"] == [1, 1]
    assert sum(len({trial[name] for trial in trials if name in trial}) for name in "bd") == 11


@pytest.mark.parametrize("base", list(BASES))
def test_a_stage_tree_sampler_shares_values_over_every_base_sampler(base: str) -> None:
    make, n_trials = BASES[base]
    for known in ({}, {"space": conditional, "steps": STEPS}):
        study = search(StageTreeSampler(make(7), radius=0.5, **known), conditional, n_trials)
        begun = {(trial["kind"], trial["lr"]) for trial in params(study)}
        assert len(begun) < n_trials


@pytest.mark.ci
@pytest.mark.parametrize("seed", [1, 2])
def test_optimize_with_a_stage_tree_sampler_trains_shared_steps_once(seed: int, tmp_path: Path) -> None:
    sampler = StageTreeSampler(TPESampler(seed=seed, n_startup_trials=5), space=staged, steps=STEPS)
    result = hpstage.optimize(
        study := optuna.create_study(sampler=sampler),
        Tape(),
        staged,
        metric="score",
        steps=STEPS,
        n_trials=20,
        executor=hpstage.InlineExecutor(),
        store=tmp_path,
    )
    distinct = set()
    for trial in params(study):
        described = {name: s.as_schedule(value) for name, value in staged(optuna.trial.FixedTrial(trial)).items()}
        line = list(zip(*(schedule.values(STEPS) for schedule in described.values()), strict=True))
        distinct |= {tuple(line[:stop]) for stop in range(1, STEPS + 1)}
    assert result.savings.steps_trained == len(distinct) < 0.8 * 20 * STEPS


# --- without the space ------------------------------------------------------------------------------------------


def in_order(trial: Any) -> None:
    trial.suggest_float("z", 0, 1)
    trial.suggest_float("a", 1e-3, 1, log=True)
    trial.suggest_int("m", 0, 10**6)


@pytest.mark.parametrize("multivariate", [False, True])
@settings(max_examples=5)
@given(seed=st.integers(0, 100))
def test_parameters_matter_in_the_order_of_suggestion_if_no_space_is_given(multivariate: bool, seed: int) -> None:
    base = TPESampler(seed=seed, n_startup_trials=4, multivariate=multivariate)
    trials = params(search(StageTreeSampler(base, radius=1.0), in_order, 14))
    assert len({trial["z"] for trial in trials}) <= 4  # three are a third of the range apart
    assert len({(trial["z"], trial["a"]) for trial in trials}) < 10
    assert len({trial["m"] for trial in trials}) == 14
    begun_by: dict[float, Any] = {}
    for trial in trials:
        assert (
            begun_by.setdefault(trial["a"], trial["z"]) == trial["z"]
        )  # borrowed only where what comes before is equal


def test_a_stage_tree_sampler_shares_values_in_study_optimize_with_four_threads() -> None:
    study = optuna.create_study(sampler=StageTreeSampler(TPESampler(seed=3), radius=0.5))

    def objective(trial: Trial) -> float:
        in_order(trial)
        return float(trial.params["z"])

    study.optimize(objective, n_trials=40, n_jobs=4)
    assert len({trial["z"] for trial in params(study)}) < 30


def test_an_outdated_list_of_trials_from_another_thread_removes_no_known_parameters() -> None:
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    running = study.ask({"a": FloatDistribution(0, 1)})
    earlier = study.get_trials()
    running.suggest_float("b", 0, 1)
    later = study.get_trials()
    companions = Companions()
    for read in (earlier, later, earlier):
        companions.refresh(SimpleNamespace(get_trials=lambda deepcopy, read=read: read))  # type: ignore[arg-type]
    b = FloatDistribution(0, 1)
    found = companions.find(99, [Wish("b", b, running.params["b"], radius=0.1)], [0.0, 1.0], steps=None)
    assert found is not None and found.trial.params == running.params


def test_a_found_companion_trial_keeps_its_parameters_while_another_thread_reads_trials() -> None:
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    study.tell(study.ask({"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)}), 0.0)
    running = study.ask({"a": FloatDistribution(0, 1)})
    companions = Companions()
    companions.refresh(study)

    class Interrupted(FloatDistribution):
        """Another thread reads on while this one compares ``a``."""

        def to_internal_repr(self, value: float) -> float:
            running.suggest_float("b", 0, 1)
            companions.refresh(study)
            return super().to_internal_repr(value)

    b = FloatDistribution(0, 1)
    wishes = [Wish("a", Interrupted(0, 1), running.params["a"], 0.0), Wish("b", b, 0.5, radius=10.0)]
    found = companions.find(99, wishes, [0.0, 0.5, 1.0], steps=None)
    assert found is not None and found.trial.number == running.number
    assert (found.depth, list(found.trial.params)) == (1, ["a"])


def test_values_borrowed_from_earlier_trials_are_in_the_new_range() -> None:
    study = optuna.create_study(sampler=StageTreeSampler(RandomSampler(seed=1), radius=1.0))
    spaces: list[dict[str, BaseDistribution]] = [
        {"a": FloatDistribution(0, 10, step=0.5), "b": FloatDistribution(0, 1)},
        {"a": FloatDistribution(5, 20, step=2.5), "b": FloatDistribution(0, 1)},
    ]
    for space in spaces * 10:
        trial = study.ask(space)
        study.tell(trial, 0.0)
        assert space["a"]._contains(trial.params["a"])


# --- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [{}, {"space": staged, "steps": STEPS}], ids=["order", "space"])
def test_an_interrupted_search_resumes_with_the_proposals_of_an_uninterrupted_search(known: dict[str, Any]) -> None:
    def fresh(seed: int) -> StageTreeSampler:
        return StageTreeSampler(TPESampler(seed=seed, n_startup_trials=4), radius=0.3, **known)

    whole = params(search(fresh(7), staged, 14))
    for cut in (1, 4, 9):
        study = search(first := fresh(7), staged, cut)
        states = SamplerState(first).take()
        study.sampler = fresh(8)
        SamplerState(study.sampler).put([states])
        for number in range(cut, 14):
            trial = study.ask()
            staged(trial)
            study.tell(trial, math.sin(number))
        assert params(study) == whole


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])  # noqa: S301
def test_a_copied_sampler_continues_like_the_original(copied: Callable[[Any], Any]) -> None:
    sampler = StageTreeSampler(RandomSampler(seed=7), radius=0.3, space=staged, steps=STEPS)
    study = search(sampler, staged, 10)
    twin = copied(sampler)
    study_of_twin = optuna.create_study(sampler=twin)
    study_of_twin.add_trials(study.get_trials())
    for each in (study, study_of_twin):
        staged(each.ask())
    assert params(study)[-1] == params(study_of_twin)[-1]


def test_constructor_arguments_take_precedence_over_an_attached_space() -> None:
    def other(trial: Any) -> Mapping[str, Any]:
        raise AssertionError("not this space")

    stated = StageTreeSampler(RandomSampler(seed=1), space=staged, steps=STEPS)
    stated.attach(other, 10)
    attached = StageTreeSampler(RandomSampler(seed=1))
    attached.attach(other, 10)
    attached.attach(staged, STEPS)
    assert params(search(stated, staged, 15)) == params(search(attached, staged, 15))


@pytest.mark.parametrize(
    "wrong",
    [
        {"radius": -0.1},
        {"radius": 1.5},
        {"radius": math.nan},
        {"radius": "wide"},
        {"space": staged},
        {"steps": 10},
    ],
)
def test_invalid_arguments_of_the_stage_tree_sampler_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        StageTreeSampler(**wrong)


def test_importing_hpstage_optuna_does_not_import_optuna() -> None:
    script = "import sys, hpstage.optuna; print('optuna' in sys.modules, hpstage.optuna.__all__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False ['StageTreeSampler', 'save_stage_tree']"


# --- the parts --------------------------------------------------------------------------------------------------


@given(a=st.tuples(schedules(8), schedules(8)), b=st.tuples(schedules(8), schedules(8)), steps=st.integers(1, 8))
def test_schedules_diverge_at_the_first_step_at_which_a_value_differs(a: Any, b: Any, steps: int) -> None:
    ours, theirs = dict(zip("xy", a, strict=True)), dict(zip("xy", b, strict=True))
    lines = [list(zip(*(schedule.values(steps) for schedule in each), strict=True)) for each in (a, b)]
    differing = [step for step, (x, y) in enumerate(zip(*lines, strict=True)) if x != y]
    assert branch_point(ours, theirs, steps) == min(differing, default=steps)


DISTRIBUTIONS: list[BaseDistribution] = [
    FloatDistribution(0.0, 1.0, step=0.25),
    FloatDistribution(0.01, 1.0, log=True),
    IntDistribution(1, 9, step=2),
    CategoricalDistribution(["x", "y"]),
]


@st.composite
def values(draw: st.DrawFn) -> Params:
    """Few values, so that trials coincide and ties come up; some parameters were not suggested."""
    choices: list[list[Any]] = [[0.0, 0.25, 0.5, 1.0], [0.01, 0.02, 0.1, 1.0], [1, 3, 5, 9], ["x", "y"]]
    count = draw(st.integers(1, 4))
    return {f"p{i}": draw(st.sampled_from(choices[i])) for i in range(count)}


@given(
    trials=st.lists(
        st.tuples(values(), st.sampled_from(["complete", "running", "fail", "pruned"]), st.integers(0, 4)), max_size=8
    ),
    proposal=st.tuples(
        st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.sampled_from([1, 3, 5, 7, 9]), st.sampled_from(["x", "y"])
    ),
    radius=st.sampled_from([0.1, 0.26, 0.6]),
    own=st.integers(0, 8),
    in_steps=st.booleans(),
)
def test_the_companion_trial_is_the_one_with_most_gain_then_the_nearest_then_the_earliest(
    trials: list[tuple[Params, str, int]], proposal: tuple[Any, ...], radius: float, own: int, in_steps: bool
) -> None:
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    companions = Companions()
    for given_params, state, reached in trials:
        distributions = {name: DISTRIBUTIONS[int(name[1])] for name in given_params}
        study.enqueue_trial(given_params)
        trial = study.ask(distributions)
        companions.refresh(study)  # while it runs; what becomes of it is read again
        if reached:
            trial.report(0.0, reached)
        if state != "running":
            study.tell(trial, 0.0 if state == "complete" else None, state=TrialState[state.upper()])
    companions.refresh(study)
    worth = [0, 0.25, 0.5, 0.75, 1]
    wishes = [Wish(f"p{i}", DISTRIBUTIONS[i], value, radius if i < 3 else 0.0) for i, value in enumerate(proposal)]

    ranked = []
    for number, (given_params, state, reached) in enumerate(trials):
        if number == own or state == "fail" or (state == "pruned" and not reached):
            continue
        away = []  # of the wishes one after the other, in radii; infinitely far where another value cannot do
        for wish in wishes:
            if wish.name not in given_params:
                away.append(math.inf)
            elif wish.radius:
                places = (position(wish.distribution, value) for value in (given_params[wish.name], wish.value))
                away.append(abs(next(places) - next(places)) / radius)
            else:
                away.append(0.0 if given_params[wish.name] == wish.value else math.inf)
        depth = max(d for d in range(5) if all(off <= min(1, worth[d]) for off in away[:d]))
        gain = min(worth[depth], reached / 4) if in_steps and state == "pruned" else worth[depth]
        ranked.append((-gain, sum(away[:depth]), number, depth))
    best = min(ranked, default=(0.0, 0.0, 0, 0))

    found = companions.find(own, wishes, worth, steps=4 if in_steps else None)
    if best[0] == 0:
        assert found is None
    else:
        assert found is not None
        assert (-found.gain, found.trial.number, found.depth) == (best[0], best[2], best[3])
