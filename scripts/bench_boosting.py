"""Rounds of LightGBM or XGBoost as steps, compared with the library's train for each trial: 24 trials of up to 400.

    .venv/bin/python scripts/bench_boosting.py [--library xgboost] [--rounds 400] [--rows 20000] [--repeats 3]

Trials are a grid over the size of trees, where the learning rate drops, and the number of rounds. Each repetition
runs both, in turns, in one process each with one thread.

rounds requested, unique, trained   by the search: of the same beginning of two trials, each round is trained once
equal                           trials whose metric is that of the library's own loop
alone, hpstage                  median seconds of all trials, and of the search
overhead                        milliseconds a round takes longer than a call of the library's Booster.update
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import optuna
from command_line import parser_of, write
from sklearn.datasets import make_classification

import hpstage
from hpstage import schedule as s
from hpstage.boosting import LightGBM, XGBoost

GRID = {"size": [0, 1], "at": [0.25, 0.5, 0.75], "rounds": [0.4, 0.6, 0.8, 1.0]}


class OfLightGBM:
    trainable, size, sizes, rate = LightGBM, "num_leaves", (15, 31), "learning_rate"
    params: ClassVar = {"objective": "binary", "metric": "auc"}
    own: ClassVar = {**params, "num_threads": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1}

    @staticmethod
    def booster(params: dict[str, Any], x: Any, y: Any) -> Callable[[int], Any]:
        """Return a function that trains a round."""
        import lightgbm

        booster = lightgbm.Booster(params, lightgbm.Dataset(x, y))
        return lambda step: booster.update()

    @staticmethod
    def train(params: dict[str, Any], data: tuple[Any, ...], rates: list[float]) -> float:
        import lightgbm

        measured: dict[str, Any] = {}
        x, y, x_valid, y_valid = data
        train = lightgbm.Dataset(x, y)
        lightgbm.train(
            *(params, train, len(rates)),
            valid_sets=[train.create_valid(x_valid, y_valid)],
            callbacks=[lightgbm.reset_parameter(learning_rate=rates), lightgbm.record_evaluation(measured)],
        )
        return float(measured["valid_0"]["auc"][-1])


class OfXGBoost:
    trainable, size, sizes, rate = XGBoost, "max_depth", (4, 5), "eta"
    params: ClassVar = {"objective": "binary:logistic", "eval_metric": "auc"}
    own: ClassVar = {**params, "nthread": 1, "seed_per_iteration": True, "verbosity": 0}

    @staticmethod
    def booster(params: dict[str, Any], x: Any, y: Any) -> Callable[[int], Any]:
        """Return a function that trains a round."""
        import xgboost

        train = xgboost.DMatrix(x, y)
        booster = xgboost.Booster(params, [train])
        return lambda step: booster.update(train, step)

    @staticmethod
    def train(params: dict[str, Any], data: tuple[Any, ...], rates: list[float]) -> float:
        import xgboost

        measured: dict[str, Any] = {}
        x, y, x_valid, y_valid = data
        xgboost.train(
            *(params, xgboost.DMatrix(x, y), len(rates)),
            evals=[(xgboost.DMatrix(x_valid, y_valid), "valid_0")],
            callbacks=[xgboost.callback.LearningRateScheduler([*rates[1:], rates[-1]])],  # sets them after a round
            evals_result=measured,
            verbose_eval=False,
        )
        return float(measured["valid_0"]["auc"][-1])


Library = type[OfLightGBM] | type[OfXGBoost]
LIBRARIES: dict[str, Library] = {"lightgbm": OfLightGBM, "xgboost": OfXGBoost}


def steps(share: float, rounds: int) -> int:
    return max(1, int(share * rounds))


def search(library: Library, data: tuple[Any, ...], rounds: int) -> tuple[Any, float]:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        at = steps(trial.suggest_categorical("at", GRID["at"]), rounds)
        return {
            library.size: library.sizes[trial.suggest_categorical("size", GRID["size"])],
            library.rate: s.multistep(0.1, [at], gamma=0.2),
            "steps": steps(trial.suggest_categorical("rounds", GRID["rounds"]), rounds),
        }

    x, y, x_valid, y_valid = data
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(GRID, seed=0))
    begun = time.perf_counter()
    result = hpstage.optimize(
        *(study, library.trainable((x, y), (x_valid, y_valid), library.params), space),
        metric="auc",
        steps=rounds,
        n_trials=math.prod(map(len, GRID.values())),  # known, all are proposed at once, and so it is where they branch
        executor=hpstage.InlineExecutor(),
        store=tempfile.mkdtemp(),
    )
    return result, time.perf_counter() - begun


def alone(library: Library, data: tuple[Any, ...], params: dict[str, Any], rounds: int) -> tuple[float, float]:
    """Return the metric of a trial of the library's own loop, and its seconds."""
    at = steps(params["at"], rounds)
    rates = [0.1 if step < at else 0.1 * 0.2 for step in range(steps(params["rounds"], rounds))]
    begun = time.perf_counter()
    fixed = {**library.own, library.size: library.sizes[params["size"]], library.rate: 0.1}
    return library.train(fixed, data, rates), time.perf_counter() - begun


def overhead(library: Library, data: tuple[Any, ...], rounds: int) -> float:
    """Return by how many milliseconds a step takes longer than an update, at the same round of the same model."""
    x, y, x_valid, y_valid = data
    subject = library.trainable((x, y), (x_valid, y_valid), library.params)
    hp = {library.size: library.sizes[1], library.rate: 0.1}
    update = library.booster({**library.own, **hp}, x, y)
    subject.setup(hp)
    subject.train(0, hp)
    update(0)
    longer = []
    for step in range(1, rounds):
        begun = time.perf_counter()
        update(step)
        between = time.perf_counter()
        subject.train(step, hp)
        longer.append((time.perf_counter() - between) - (between - begun))
    return 1000 * statistics.median(longer)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--library", choices=LIBRARIES, default="lightgbm")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    x, y = make_classification(arguments.rows, 20, n_informative=8, random_state=0)
    cut = arguments.rows * 4 // 5
    data = x[:cut], y[:cut], x[cut:], y[cut:]
    library = LIBRARIES[arguments.library]
    apart, together = [], []
    for _ in range(arguments.repeats):
        result, seconds = search(library, data, arguments.rounds)
        together.append(seconds)
        trials = result.study.trials
        measured = [alone(library, data, trial.params, arguments.rounds) for trial in trials]
        apart.append(sum(seconds for _, seconds in measured))
        equal = sum(trial.value == value for trial, (value, _) in zip(trials, measured, strict=True))
    savings = result.savings
    found = {
        "trials": len(trials),
        "rounds requested": sum(steps(trial.params["rounds"], arguments.rounds) for trial in trials),
        "rounds unique": savings.steps_unique,
        "rounds trained": savings.steps_trained,
        "equal": equal,
        "alone": statistics.median(apart),
        "hpstage": statistics.median(together),
        "ratio": statistics.median(np.array(apart) / np.array(together)),
        "overhead": overhead(library, data, arguments.rounds),
    }
    for name, value in found.items():
        print(f"{name:<18}{value:>10.3f}" if isinstance(value, float) else f"{name:<18}{value:>10}")
    write(arguments, found)


if __name__ == "__main__":
    main()
