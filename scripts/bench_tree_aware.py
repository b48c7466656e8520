"""Tree-aware against plain successive halving on the demo's study: best value, and steps that each would train.

    .venv/bin/python scripts/bench_tree_aware.py [--seeds 8] [--metric accuracy|loss] [--workers 2] [--json FILE]

All searches share one store, so that nothing is trained twice over all of them; what a search would train on a store
of its own are its unique steps. Takes about four minutes on two cores, and less when it is called again.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import optuna
from command_line import parser_of, write
from demo_digits import N_TRIALS, STEPS, Digits, space
from distributed import Client

import hpstage
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, Hyperband, SuccessiveHalving
from hpstage.cluster import local_cluster

ALGORITHMS: dict[str, tuple[Algorithm, Algorithm]] = {
    "SHA": (SuccessiveHalving(15, 4), SuccessiveHalving(15, 4, tree_aware=False)),
    "Hyperband": (Hyperband(15, 2), Hyperband(15, 2, tree_aware=False)),
    "ASHA": (ASHA(15, 4), ASHA(15, 4, tree_aware=False)),
}


def measure(metric: str, algorithm: Algorithm, seed: int, client: Any, folder: Path) -> dict[str, float]:
    direction = "maximize" if metric == "accuracy" else "minimize"
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(seed=seed))
    result = hpstage.optimize(
        study,
        Digits(),
        space,
        metric=metric,
        steps=STEPS,
        n_trials=N_TRIALS,
        algorithm=algorithm,
        executor=client,
        store=folder,
    )
    return {
        "best": result.best_value,
        "steps_asked": result.savings.steps_asked,
        "steps_unique": result.savings.steps_unique,
        "complete": sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="studies of each kind (default: 8)")
    parser.add_argument("--metric", choices=["accuracy", "loss"], default="accuracy")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(".hpstage/tree-aware"))
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    figures: dict[str, Any] = {}
    with local_cluster(options.workers) as cluster, Client(cluster) as client:
        title = f"median of {options.seeds} seeds"
        print(f"{title:<24}{'requested':>10}{'unique':>8}{'complete':>10}{'best':>9}")
        for name, pair in ALGORITHMS.items():
            for kind, algorithm in zip(("tree-aware", "plain"), pair, strict=True):
                runs = [
                    measure(options.metric, algorithm, seed, client, options.folder) for seed in range(options.seeds)
                ]
                middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                figures[f"{name}, {kind}"] = {"median": middle, "runs": runs}
                print(
                    f"{name + ', ' + kind:<24}{middle['steps_asked']:>10.0f}{middle['steps_unique']:>8.0f}"
                    f"{middle['complete']:>10.0f}{middle['best']:>9.4f}"
                )
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
