"""What a running search shows: estimates, words, a terminal's lines and a log's."""

from __future__ import annotations

import itertools
from dataclasses import replace

import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage import front_door
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.outlook import Outlook
from hpstage.progress import Progress, ProgressView, line
from hpstage.progress.eta import Asked, Busy, growth, seconds_left, still_to_ask
from hpstage.progress.progress import Display
from hpstage.simulate import SimulatedExecutor
from hpstage.store import MemoryJournal
from tests.toys import Failing

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Views(Display):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.all: list[ProgressView] = []

    def begin(self, view: ProgressView) -> None:
        self.all.append(view)

    show = end = begin


def grid(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 40: trial.suggest_int("a late", 1, 4)}),
        "b": s.piecewise({0: 1, 60: trial.suggest_int("b", 1, 4), 80: trial.suggest_int("b late", 1, 4)}),
    }


def views_of(
    monkeypatch: pytest.MonkeyPatch, executor: SimulatedExecutor, study: optuna.Study, **options: object
) -> list[ProgressView]:
    """All that a search on virtual time shows, its times on that clock."""
    views = Views()
    monkeypatch.setattr(
        front_door, "Progress", lambda _, study, deadline: Progress(views, study, clock=executor.clock)
    )
    settings: dict[str, object] = {"metric": "value", "steps": 100, "n_trials": 64, "store": MemoryJournal()}
    hpstage.optimize(study, Failing(), options.pop("space", grid), executor=executor, **(settings | options))  # type: ignore[arg-type]
    return views.all


@pytest.mark.parametrize("workers", [1, 2, 7, 32])
@pytest.mark.parametrize("step_seconds", [0.01, 1.0, lambda hp: 30.0 * hp["a"] + hp["b"]])
@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_at_half_time_of_full_training_the_time_left_is_estimated_within_a_quarter(
    monkeypatch, workers, step_seconds, sampler
):
    executor = SimulatedExecutor(workers, step_seconds=step_seconds, evaluate_seconds=0.02, save_seconds=0.01)
    space = {"a": [1, 2], "a late": [1, 2, 3, 4], "b": [1, 2, 3, 4], "b late": [1, 2, 3, 4]}
    samplers = {
        "random": optuna.samplers.RandomSampler(seed=0),
        "tpe": optuna.samplers.TPESampler(seed=0, n_startup_trials=64),
        "grid": optuna.samplers.GridSampler(space, seed=0),
    }
    views = views_of(monkeypatch, executor, optuna.create_study(sampler=samplers[sampler]))
    end = views[-1].elapsed
    half = min(views, key=lambda view: abs(view.elapsed - end / 2))
    assert half.seconds_left == pytest.approx(end - half.elapsed, rel=0.25)
