"""A finished trial is trained further, whatever its space looks like; a search that trains nothing says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, PopulationBasedTraining
from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone

optuna.logging.set_verbosity(optuna.logging.ERROR)
STEPS, MORE = 8, 12
Space = Callable[[optuna.Trial], Mapping[str, object]]


def one(trial: optuna.Trial) -> dict[str, object]:
    return {"lr": s.piecewise({0: 0.5, trial.suggest_int("drop_at", 3, 5): 0.25})}


def several(trial: optuna.Trial) -> dict[str, object]:
    return one(trial) | {"momentum": 0.9, "nesterov": True, "optimizer": trial.suggest_categorical("name", ["a", "b"])}


def curved(trial: optuna.Trial) -> dict[str, object]:
    decay = s.cosine(0.5, trial.suggest_int("period", 8, 9), eta_min=0.1)
    return {"lr": decay, "batch": s.linear(8, start_factor=1.0, end_factor=4.0, total_iters=STEPS)}


def with_an_end(trial: optuna.Trial) -> dict[str, object]:
    return several(trial) | {"steps": trial.suggest_int("length", 6, STEPS), "keep_at": [4]}


def decided_by_metrics(trial: optuna.Trial) -> dict[str, object]:
    return {"lr": s.plateau(1.0, metric="score", every=2, patience=0), "wd": trial.suggest_float("wd", 0, 1)}


SPACES: list[tuple[Space, Algorithm]] = [
    *((space, FullTraining()) for space in (one, several, curved, with_an_end, decided_by_metrics)),
    (several, PopulationBasedTraining(2)),
    (s.wsd_sweep(0.5, horizons=[6, STEPS], warmup=2, decay_fraction=0.25, hp={"wd": 0.1}), FullTraining()),
]


def search(study: str, space: object, store: MemoryJournal, steps: int = MORE, **options: object) -> hpstage.Result:
    created = optuna.create_study(study_name=study, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    settings = {"trainable": Tape(), "n_trials": 1, "executor": hpstage.InlineExecutor(), **options}
    return hpstage.optimize(created, space=space, metric="score", steps=steps, store=store, **settings)  # type: ignore[arg-type]


@pytest.mark.ci
@pytest.mark.parametrize(("space", "algorithm"), SPACES)
def test_the_best_trial_of_any_kind_of_space_can_be_trained_further(space: Space, algorithm: Algorithm) -> None:
    store = MemoryJournal()
    result = search("first", space, store, STEPS, n_trials=4, algorithm=algorithm)
    won = result.trial(result.best_trial)
    known = won.planned.steps
    longer = won.then({"lr": s.linear(0.5, start_factor=1.0, end_factor=0.5, total_iters=4)})
    further = search("further", lambda trial: longer, store)
    assert further.savings.steps_trained == MORE - known
    trained = further.trial(0)
    assert {name: schedule.until(known) for name, schedule in trained.schedules.items()} == won.schedules
    assert trained.metrics[MORE] == alone(longer, MORE).evaluate()
    for name in won.schedules.keys() - {"lr"}:
        assert trained.schedules[name].value(MORE - 1) == won.schedules[name].value(known - 1)


def test_continuing_a_trial_with_an_unknown_hyperparameter_is_refused() -> None:
    won = search("first", several, MemoryJournal(), STEPS).trial(0)
    with pytest.raises(UsageError, match="no hyperparameter 'rate'; it has lr, momentum, nesterov, optimizer"):
        won.then({"rate": 0.1})


class Ending(Tape):
    """Is complete after 6 steps."""

    version = "ending"

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        super().train(step, hp)
        if step == 5:
            raise hpstage.StopTraining


@pytest.mark.parametrize(
    ("trainable", "steps", "said"),
    [
        (Tape(), MORE, "Their schedules end at step 8, before steps=12: add steps to each of them"),
        (Tape(), STEPS, "already has the results of 1 trial up to step 8"),
        (Ending(), MORE, "up to step 6, where the training code ended the longest"),
    ],
)
def test_a_search_that_trains_nothing_says_why(
    trainable: object, steps: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryJournal()
    won = search("first", several, store, STEPS, trainable=trainable).trial(0)
    # Only one schedule continues, so that the others decide the trial's length.
    longer = won.then({}) if isinstance(trainable, Ending) else won.schedules | {"lr": won.schedules["lr"].then(0.1)}
    with caplog.at_level(logging.INFO, "hpstage"):
        assert "Nothing was trained" not in caplog.text
        assert search("further", lambda trial: longer, store, steps, trainable=trainable).savings.steps_trained == 0
    (record,) = [record for record in caplog.records if "Nothing was trained" in record.getMessage()]
    assert said in record.getMessage()
    assert record.levelno == (logging.INFO if steps == STEPS else logging.WARNING)
