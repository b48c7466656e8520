"""A learning rate, a decay in mid-training and a final one: trials share their beginnings in a plain Optuna loop."""

from __future__ import annotations

import optuna
import optunahub


def objective(trial: optuna.Trial) -> float:
    """Ask first for what matters first."""
    first = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    middle = trial.suggest_float("lr_from_60", 1e-3, 1.0, log=True)
    last = trial.suggest_float("lr_from_90", 1e-4, 1.0, log=True)
    x = 1.0
    for step in range(120):
        x -= (first if step < 60 else middle if step < 90 else last) * (x**3 - 0.1 * x)
    return abs(x - 0.1)


if __name__ == "__main__":
    sampler = optunahub.load_module("samplers/stage_tree").StageTreeSampler(optuna.samplers.TPESampler(seed=0))
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=50)
    print(f"{len({trial.params['lr'] for trial in study.trials})} learning rates to start with, in 50 trials")
    print(study.best_trial.params)
