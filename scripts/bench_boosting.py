"""Rounds of LightGBM as steps, compared with lightgbm.train for each trial: 24 trials of up to 400 rounds.

    .venv/bin/python scripts/bench_boosting.py [--json FILE] [--rounds 400] [--rows 20000] [--repeats 3]

Trials are a grid over the number of leaves, where the learning rate drops, and the number of rounds. Each repetition
runs both, in turns, in one process each with one thread.

rounds requested, unique, trained   by the search: of the same beginning of two trials, each round is trained once
equal                           trials whose metric is that of LightGBM's own loop
alone, hpstage                  median seconds of all trials, and of the search
overhead                        milliseconds a round takes longer than a call of lightgbm.Booster.update
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import optuna
from sklearn.datasets import make_classification

import hpstage
from hpstage import schedule as s
from hpstage.boosting import LightGBM

PARAMS = {"objective": "binary", "metric": "auc"}
GRID = {"leaves": [15, 31], "at": [0.25, 0.5, 0.75], "rounds": [0.4, 0.6, 0.8, 1.0]}


def rate(at: float, rounds: int) -> Any:
    return s.multistep(0.1, [max(1, int(at * rounds))], gamma=0.2)


def hp_of(trial: optuna.Trial, rounds: int) -> dict[str, Any]:
    return {
        "num_leaves": trial.suggest_categorical("leaves", GRID["leaves"]),
        "learning_rate": rate(trial.suggest_categorical("at", GRID["at"]), rounds),
        "steps": max(1, int(trial.suggest_categorical("rounds", GRID["rounds"]) * rounds)),
    }


def search(data: tuple[Any, ...], rounds: int) -> tuple[Any, float]:
    x, y, x_valid, y_valid = data
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(GRID, seed=0))
    begun = time.perf_counter()
    result = hpstage.optimize(
        *(study, LightGBM((x, y), (x_valid, y_valid), PARAMS), lambda trial: hp_of(trial, rounds)),
        metric="auc",
        steps=rounds,
        executor=hpstage.InlineExecutor(),
        store=tempfile.mkdtemp(),
    )
    return result, time.perf_counter() - begun


def alone(data: tuple[Any, ...], params: dict[str, Any], rounds: int) -> tuple[float, float]:
    """Return the metric of a trial of LightGBM's own loop, and its seconds."""
    x, y, x_valid, y_valid = data
    at = max(1, int(params["at"] * rounds))
    steps = max(1, int(params["rounds"] * rounds))
    fixed = {"num_threads": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1}
    measured: dict[str, Any] = {}
    begun = time.perf_counter()
    train = lightgbm.Dataset(x, y)
    lightgbm.train(
        {**PARAMS, **fixed, "num_leaves": params["leaves"], "learning_rate": 0.1},
        train,
        steps,
        valid_sets=[train.create_valid(x_valid, y_valid)],
        callbacks=[
            lightgbm.reset_parameter(learning_rate=[0.1 if step < at else 0.1 * 0.2 for step in range(steps)]),
            lightgbm.record_evaluation(measured),
        ],
    )
    return measured["valid_0"]["auc"][-1], time.perf_counter() - begun


def overhead(data: tuple[Any, ...], rounds: int) -> float:
    """Return by how many milliseconds a step takes longer than an update, at the same round of the same model."""
    x, y, x_valid, y_valid = data
    subject = LightGBM((x, y), (x_valid, y_valid), PARAMS)
    params = {**PARAMS, "num_threads": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1}
    booster = lightgbm.Booster({**params, "learning_rate": 0.1, "num_leaves": 31}, lightgbm.Dataset(x, y))
    subject.setup({"num_leaves": 31})
    subject.train(0, {"num_leaves": 31, "learning_rate": 0.1})
    booster.update()
    longer = []
    for step in range(1, rounds):
        begun = time.perf_counter()
        booster.update()
        between = time.perf_counter()
        subject.train(step, {"num_leaves": 31, "learning_rate": 0.1})
        longer.append((time.perf_counter() - between) - (between - begun))
    return 1000 * statistics.median(longer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    x, y = make_classification(arguments.rows, 20, n_informative=8, random_state=0)
    cut = arguments.rows * 4 // 5
    data = x[:cut], y[:cut], x[cut:], y[cut:]
    apart, together = [], []
    for _ in range(arguments.repeats):
        result, seconds = search(data, arguments.rounds)
        together.append(seconds)
        trials = result.study.trials
        measured = [alone(data, trial.params, arguments.rounds) for trial in trials]
        apart.append(sum(seconds for _, seconds in measured))
        equal = sum(trial.value == value for trial, (value, _) in zip(trials, measured, strict=True))
    savings = result.savings
    found = {
        "trials": len(trials),
        "rounds requested": sum(max(1, int(trial.params["rounds"] * arguments.rounds)) for trial in trials),
        "rounds unique": savings.steps_unique,
        "rounds trained": savings.steps_trained,
        "equal": equal,
        "alone": statistics.median(apart),
        "hpstage": statistics.median(together),
        "ratio": statistics.median(np.array(apart) / np.array(together)),
        "overhead": overhead(data, arguments.rounds),
    }
    for name, value in found.items():
        print(f"{name:<18}{value:>10.3f}" if isinstance(value, float) else f"{name:<18}{value:>10}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
