"""Any of Optuna's pruners decides as it does in Optuna's own loop, on a real study, however many trials are open."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)
from optuna.trial import TrialState

from hpstage.algorithm import Action, Ask, Finish, Setting, Trials
from hpstage.algos import OptunaPruner
from hpstage.errors import UsageError

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning")

STEPS, TRIALS = 16, 30
PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "median": lambda: MedianPruner(n_startup_trials=3, n_warmup_steps=4),
    "median-sparse": lambda: MedianPruner(n_startup_trials=1, interval_steps=3, n_min_trials=2),
    "percentile": lambda: PercentilePruner(30.0, n_startup_trials=2),
    "halving": lambda: SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "halving-auto": lambda: SuccessiveHalvingPruner(reduction_factor=3),
    "halving-bootstrap": lambda: SuccessiveHalvingPruner(min_resource=2, reduction_factor=3, bootstrap_count=2),
    "hyperband": lambda: HyperbandPruner(min_resource=1, max_resource=STEPS, reduction_factor=2),
    "patient": lambda: PatientPruner(MedianPruner(n_startup_trials=2), patience=2),
    "patient-alone": lambda: PatientPruner(None, patience=5),
    "threshold": lambda: ThresholdPruner(lower=-0.5, upper=1.3),
    "wilcoxon": lambda: WilcoxonPruner(p_threshold=0.2, n_startup_steps=2),
    "nop": NopPruner,
}


def value(trial: optuna.Trial, step: int) -> float:
    """A learning curve with noise: the same for the same parameters."""
    level, speed = trial.suggest_float("level", 0.0, 1.0), trial.suggest_float("speed", 0.05, 1.0)
    noise = random.Random(f"{level}/{speed}/{step}").gauss(0.0, 0.2)
    return level * (1 - (1 - speed) ** step) + noise


def create(pruner: BasePruner, *, learning: bool = False, maximize: bool = True) -> optuna.Study:
    sampler = optuna.samplers.TPESampler(seed=4, n_startup_trials=3) if learning else optuna.samplers.RandomSampler(4)
    direction = "maximize" if maximize else "minimize"
    return optuna.create_study(study_name="one", sampler=sampler, pruner=pruner, direction=direction)


def outcome(study: optuna.Study) -> list[tuple[object, ...]]:
    """All that is known of the trials, up to the pruner's own notes."""
    return [(t.number, t.state, t.params, t.value, t.intermediate_values, t.system_attrs) for t in study.trials]


def setting(n_trials: int | None = TRIALS, steps: int = STEPS) -> Setting:
    return Setting(steps=steps, n_trials=n_trials, maximize=True, adaptive=False)


class OnStudy(Trials):
    """Looks up in a study what a session does: the pruner's opinion, or what became of a trial before."""

    def __init__(self, study: optuna.Study) -> None:
        self.study = study
        self.trials: list[optuna.Trial] = []
        self.before: list[optuna.trial.FrozenTrial] = []
        self.questions: list[tuple[int, int]] = []

    def should_prune(self, index: int, step: int) -> bool:
        self.questions.append((index, step))
        if index < len(self.before):
            known = self.before[index]
            return known.state == TrialState.PRUNED and max(known.intermediate_values) == step
        return self.trials[index].should_prune()


def run(
    algorithm: OptunaPruner,
    study: optuna.Study,
    *,
    n_trials: int = TRIALS,
    failing: frozenset[tuple[int, int]] = frozenset(),
    before: list[optuna.trial.FrozenTrial] | None = None,
) -> OnStudy:
    """Do what a session does. ``before``: trials of a search that is replayed, all proposed at once."""
    about = setting(n_trials)
    algorithm.check(about)
    trials = OnStudy(study)
    search = algorithm.start(about, trials)
    requests: deque[tuple[int, int]] = deque()
    ends: dict[int, str] = {}

    def perform(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask(index, step):
                    assert index not in ends and all(index != other for other, _ in requests)
                    requests.append((index, step))
                case Finish(index, state):
                    reached = max(trials.trials[index]._cached_frozen_trial.intermediate_values)
                    assert (state == "complete") == (reached == STEPS)
                    end(index, state)

    def end(index: int, state: str) -> None:
        assert index not in ends
        ends[index] = state
        trial = trials.trials[index]
        final = value(trial, STEPS) if state == "complete" else None
        study.tell(trial, final, state=TrialState[{"failed": "FAIL"}.get(state, state.upper())])

    for _ in before or []:
        trials.trials.append(study.ask())
        perform(search.added(len(trials.trials) - 1))
    trials.before = before or []
    while True:
        while len(trials.trials) < n_trials and search.room() > 0:
            trials.trials.append(study.ask())
            perform(search.added(len(trials.trials) - 1))
        if not requests:
            break
        index, step = requests.popleft()
        if (index, step) in failing:
            end(index, "failed")
            perform(search.failed(index))
            continue
        result = value(trials.trials[index], step)
        trials.trials[index].report(result, step)
        perform(search.reported(index, step, result))
    assert set(ends) == set(range(n_trials))
    return trials


def optunas_own_loop(study: optuna.Study, grace: int, interval: int, n_trials: int = TRIALS) -> None:
    """As Optuna's documentation writes an objective that may be pruned."""

    def objective(trial: optuna.Trial) -> float:
        step = grace
        while step < STEPS:
            trial.report(value(trial, step), step)
            if trial.should_prune():
                raise optuna.TrialPruned
            step += interval
        trial.report(value(trial, STEPS), STEPS)
        return value(trial, STEPS)

    study.optimize(objective, n_trials=n_trials)


@pytest.mark.ci
@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize(("grace", "interval"), [(1, 1), (3, 2), (4, 5)])
@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.one_in(5)
def test_optuna_pruner_with_a_window_of_one_gives_the_trials_of_optunas_own_loop(pruner, grace, interval, learning):
    mine, reference = create(PRUNERS[pruner](), learning=learning), create(PRUNERS[pruner](), learning=learning)
    run(OptunaPruner(interval, grace, window=1), mine)
    optunas_own_loop(reference, grace, interval)
    assert outcome(mine) == outcome(reference)
    assert len(mine.trials) == TRIALS


@pytest.mark.parametrize("pruner", [pruner for pruner in PRUNERS if pruner != "nop"])
def test_every_pruner_tested_here_prunes_some_trials_and_completes_others(pruner):
    study = create(PRUNERS[pruner]())
    run(OptunaPruner(window=1), study)
    states = [trial.state for trial in study.trials]
    assert TrialState.PRUNED in states and TrialState.COMPLETE in states


def open_side_by_side(study: optuna.Study, grace: int, interval: int, window: int, failing: Any) -> None:
    """The same loop with a line of trials: each is evaluated once and stands in line again, a new one comes last."""
    steps = [*range(grace, STEPS, interval), STEPS]
    line: list[tuple[optuna.Trial, int]] = []
    numbers = iter(range(TRIALS))
    while True:
        while len(line) < window and next(numbers, None) is not None:
            line.append((study.ask(), 0))
        if not line:
            return
        trial, at = line.pop(0)
        if (trial.number, steps[at]) in failing:
            study.tell(trial, state=TrialState.FAIL)
            continue
        seen = value(trial, steps[at])
        trial.report(seen, steps[at])
        if steps[at] == STEPS:
            study.tell(trial, seen)
        elif trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
        else:
            line.append((trial, at + 1))


@pytest.mark.ci
@given(
    st.sampled_from(sorted(PRUNERS)),
    st.integers(1, 15),
    st.integers(1, 16),
    st.integers(1, 12),
    st.frozensets(st.tuples(st.integers(0, TRIALS - 1), st.integers(1, STEPS)), max_size=30),
)
@settings(max_examples=15)
def test_the_pruner_is_called_in_the_order_of_requests_when_trials_are_concurrent(
    pruner, grace, interval, window, failing
):
    mine, reference = create(PRUNERS[pruner]()), create(PRUNERS[pruner]())
    run(OptunaPruner(interval, grace, window), mine, failing=failing)
    open_side_by_side(reference, grace, interval, window, failing)
    assert outcome(mine) == outcome(reference)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("pruner", ["median", "halving", "hyperband", "patient"])
def test_a_search_replayed_from_the_trials_of_a_study_requests_the_same_pruning_decisions(pruner, window):
    algorithm, study = OptunaPruner(2, 2, window), create(PRUNERS[pruner]())
    first = run(algorithm, study)
    again = create(NopPruner())  # whose opinion would be another
    replayed = run(algorithm, again, before=study.get_trials())
    assert replayed.questions == first.questions
    assert [(t.state, t.intermediate_values) for t in again.trials] == [
        (t.state, t.intermediate_values) for t in study.trials
    ]


def test_every_trial_is_complete_with_the_nop_pruner():
    study = create(NopPruner())
    trials = run(OptunaPruner(interval=5, grace=2, window=4), study, n_trials=4)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 4
    assert [list(trial.intermediate_values) for trial in study.trials] == [[2, 7, 12, 16]] * 4
    assert trials.questions == [(index, step) for step in (2, 7, 12) for index in range(4)]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (OptunaPruner(0), "interval is 0; give a whole number of at least 1"),
        (OptunaPruner(1.5), "interval is 1.5"),
        (OptunaPruner(grace=0), "grace is 0"),
        (OptunaPruner(grace=16), "grace is 16, but a trial has only 16 steps: none could be stopped. Lower grace"),
        (OptunaPruner(window=0), "window is 0"),
    ],
    ids=repr,
)
def test_invalid_parameters_of_optuna_pruner_are_refused_with_a_remedy(algorithm, message):
    with pytest.raises(UsageError, match=message):
        algorithm.check(setting())
