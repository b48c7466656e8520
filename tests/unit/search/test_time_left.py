"""The time left: forecasts, compared with how long simulated searches then take. Virtual time, so nothing is flaky."""

from __future__ import annotations

import copy
from collections.abc import Callable

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm, Ask, Finish, Setting, Trials
from hpstage.algos import (
    ASHA,
    FullTraining,
    Hyperband,
    MedianStopping,
    OptunaPruner,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.search import call as front_door
from hpstage.search import forecast
from hpstage.search.history import History
from hpstage.search.progress import Progress, ProgressView
from hpstage.search.progress.view import Display
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing

pytestmark = pytest.mark.sampled(8)

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Views(Display):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.all: list[ProgressView] = []

    def begin(self, view: ProgressView) -> None:
        self.all.append(view)

    def write(self, text: str) -> None:
        raise AssertionError("there is nothing to write")

    show = end = begin


Space = Callable[[optuna.Trial], dict[str, object]]


def grid(trial: optuna.Trial) -> dict[str, object]:
    """256 trials of 2 roots: most of what early rungs train is shared."""
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 40: trial.suggest_int("a late", 1, 4)}),
        "b": s.piecewise({0: 1, 60: trial.suggest_int("b", 1, 4), 80: trial.suggest_int("b late", 1, 4)}),
    }


def apart(trial: optuna.Trial) -> dict[str, object]:
    """Nothing is shared."""
    return {"a": s.piecewise({0: trial.suggest_float("a", 0.0, 1.0), 40: trial.suggest_int("late", 1, 4)})}


def trunks(trial: optuna.Trial) -> dict[str, object]:
    """6 trunks, from which each trial leaves."""
    return {"a": s.piecewise({0: trial.suggest_int("a", 1, 6), 30: trial.suggest_float("late", 0.0, 1.0)})}


def watched(
    monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm, space: Space, workers: int, seed: int, n_trials: int = 64
) -> list[ProgressView]:
    """All that a search shows, its times on the executor's clock."""
    views = Views()
    executor = SimulatedExecutor(workers, evaluate_seconds=0.5, save_seconds=0.2, load_seconds=0.2)
    monkeypatch.setattr(
        front_door,
        "Progress",
        lambda _, study, page, **options: Progress(views, study, page, clock=executor.clock, **options),
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed), pruner=optuna.pruners.MedianPruner(4))
    hpstage.optimize(
        study, Failing(), space, metric="value", steps=100, n_trials=n_trials, algorithm=algorithm, executor=executor,
        store=MemoryJournal(),
    )  # fmt: skip
    return views.all


def errors(views: list[ProgressView]) -> list[float]:
    """Estimated / true time left of each view, from a quarter of the search on. Of its last twentieth, nothing is
    requested: there, a single trial more or less is many times what is left."""
    end = views[-1].elapsed
    judged = [view for view in views[:-1] if 0.25 * end <= view.elapsed <= 0.95 * end]
    assert judged and all(view.seconds_left is not None for view in judged)
    return [(view.seconds_left or 0.0) / (end - view.elapsed) for view in judged]


@pytest.mark.ci
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("space", [grid, apart, trunks])
@pytest.mark.parametrize(
    "algorithm",
    [FullTraining(), SuccessiveHalving(10), ASHA(10, 3), Hyperband(4, 3)],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.one_in(4)
@pytest.mark.ci_one_in(2)
def test_the_time_left_is_within_a_factor_of_two_after_a_quarter_of_a_search(
    monkeypatch, algorithm, space, workers, seed
):
    found = errors(watched(monkeypatch, algorithm, space, workers, seed))
    assert min(found) >= 0.5 and max(found) <= 2.0


@pytest.mark.parametrize("space", [grid, apart, trunks])
@pytest.mark.parametrize(
    "algorithm",
    [
        FullTraining(window=8),
        ASHA(4, 3, window=8),
        ASHA(10, 3, variant="stopping"),
        Hyperband(4, 3, variant="asynchronous"),
        MedianStopping(20, grace=20),
    ],
    ids=repr,
)
@pytest.mark.one_in(4)
def test_nine_of_ten_estimates_of_the_time_left_are_within_a_factor_of_two_in_adaptive_searches(
    monkeypatch, algorithm, space
):
    found = errors(watched(monkeypatch, algorithm, space, 4, 0))
    assert sum(0.5 <= error <= 2.0 for error in found) >= 0.9 * len(found)


def test_the_time_left_is_within_a_factor_of_two_if_not_all_trials_can_be_simulated(monkeypatch):
    monkeypatch.setattr(forecast, "_MOST", 200)
    found = errors(watched(monkeypatch, MedianStopping(10, min_trials=10_000), apart, 4, 0, n_trials=100))
    assert min(found) >= 0.5 and max(found) <= 2.0


@pytest.mark.ci
@pytest.mark.parametrize("space", [grid, apart, trunks])
def test_the_time_left_under_an_optuna_pruner_is_within_a_factor_of_three(monkeypatch, space):
    found = errors(watched(monkeypatch, OptunaPruner(20, grace=20, window=16), space, 4, 0))
    assert min(found) >= 1 / 3 and max(found) <= 3.0


def test_the_time_left_accounts_for_trials_that_an_algorithm_will_fork(monkeypatch):
    algorithm = PopulationBasedTraining(interval=20)
    found = errors(watched(monkeypatch, algorithm, apart, 4, 0, n_trials=16))
    assert min(found) >= 0.5 and max(found) <= 2.0


def test_a_forecast_of_the_time_left_does_not_change_the_search(monkeypatch):
    """With and without a display, the requests are the same."""
    found = []
    for shown in (True, False):
        executor, study = SimulatedExecutor(3), optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        views = Views()
        monkeypatch.setattr(
            front_door,
            "Progress",
            lambda _, study, page, views=views, executor=executor, shown=shown, **options: Progress(
                views if shown else None, study, clock=executor.clock
            ),
        )
        result = hpstage.optimize(
            study, Failing(), trunks, metric="value", steps=81, n_trials=60, executor=executor, store=MemoryJournal(),
            algorithm=Hyperband(3, 3, variant="asynchronous"),
        )  # fmt: skip
        assert bool(views.all) == shown
        found.append(
            (
                [(trial.params, trial.state, trial.intermediate_values) for trial in study.trials],
                result.savings.steps_asked,
            )
        )
    assert found[0] == found[1]


def test_a_replay_of_an_algorithm_makes_the_same_requests() -> None:
    setting = Setting(steps=81, n_trials=None, maximize=False, adaptive=False)
    history = History(ASHA(3, 3, window=4), setting, Trials())
    open = [action for index in range(4) for action in history.added(index)]
    requested: list[object] = list(open)
    for number in range(40):
        action = open.pop(0)
        if isinstance(action, Finish):
            continue
        assert isinstance(action, Ask)
        actions = history.reported(action.index, action.step, float((7 * number) % 11))
        if history.room():
            actions += history.added(100 + number)
        open += actions
        requested += actions
    calls = copy.deepcopy(history.calls)
    replay = history.again(Trials())
    assert list(replay.open) == [(one.index, one.step) for one in open if isinstance(one, Ask)]
    replay.reported(*next(iter(replay.open)), 0.0)
    assert history.calls == calls, "the replay is another search"


# --- trials by what they wait for ---------------------------------------------------------------------------


def test_paused_and_queued_trials_are_reported_separately(monkeypatch):
    views = watched(monkeypatch, SuccessiveHalving(10), apart, 2, 0)
    first = views[0]
    assert (first.paused, first.queued, first.running) == (0, 62, 2)
    assert all(view.paused + view.queued + view.finished <= 64 for view in views)
    early = [view for view in views if not view.finished]
    assert [view.queued for view in early] == sorted((view.queued for view in early), reverse=True)
    waiting = early[-1]  # nearly all have their first result, and wait for the others'
    assert waiting.paused > 56 and waiting.queued == 0
    assert f"{waiting.paused} paused" in hpstage.search.progress.line(waiting)
    assert (views[-1].paused, views[-1].queued, views[-1].finished) == (0, 0, 64)


@pytest.mark.ci
def test_trials_still_to_be_proposed_are_reported_as_queued(monkeypatch):
    views = watched(monkeypatch, ASHA(10, 3, window=4), apart, 2, 0)
    assert views[0].queued >= 60
    assert any(view.paused and view.queued for view in views)
    assert "queued" not in hpstage.search.progress.line(views[-1])


def test_trials_whose_first_steps_another_trial_trained_are_not_reported_as_queued(monkeypatch):
    views = watched(monkeypatch, FullTraining(), grid, 2, 0)
    assert {view.queued for view in views if view.used_seconds > 40} == {0}
