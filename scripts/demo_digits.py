"""The demo: 48 trials of learning-rate and batch-size sequences on scikit-learn's digits, under successive halving.

    ./scripts/demo                  as a stage tree
    ./scripts/demo --compare        and without sharing as well, checked bit for bit
    ./scripts/demo --json FILE      write all figures

A demo that was interrupted goes on where it was when it is started again; one that was finished begins anew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving

STEPS = 120
N_TRIALS = 48


class Digits(hpstage.torch.TorchTrainable):
    """A small CNN on 1,797 images of 8 x 8 pixels; a step is an epoch over 1,437 of them."""

    step_unit = "epoch"

    def data(self) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(images))
        x = torch.tensor(images[order], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        y = torch.tensor(labels[order])
        cut = len(x) * 4 // 5
        return TensorDataset(x[:cut], y[:cut]), x[cut:], y[cut:]

    def dataset(self) -> TensorDataset:
        train, self.test_x, self.test_y = self.data()
        return train

    def model(self, hp: dict[str, float]) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(32 * 4 * 4, 10),
        )

    def optimizer(self, model: nn.Module, hp: dict[str, float]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=hp["momentum"], weight_decay=5e-4)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        logits = model(self.test_x)
        loss = nn.functional.cross_entropy(logits, self.test_y)
        return {"accuracy": (logits.argmax(1) == self.test_y).double().mean().item(), "loss": loss.item()}


def space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
    """Learning rates that drop once or twice, batches that grow: sequences with common beginnings."""
    lr = trial.suggest_categorical("lr", [0.2, 0.1, 0.05])
    first = trial.suggest_categorical("first_drop", [10, 30, 60])
    second = trial.suggest_categorical("second_drop", [80, 100])
    grow = trial.suggest_categorical("grow_batch_at", [20, 40, 80])
    return {
        "lr": s.multistep(lr, milestones=[first, second], gamma=0.2),
        "momentum": 0.9,
        "batch_size": s.piecewise({0: 64, grow: 256}),
    }


def search(folder: Path, executor: object, *, sharing: bool, quiet: bool) -> hpstage.Result:
    study = optuna.create_study(
        study_name="digits" if sharing else "digits-alone",
        storage=JournalStorage(JournalFileBackend(str(folder / "optuna.log"))),
        sampler=optuna.samplers.RandomSampler(seed=0),
        direction="maximize",
        load_if_exists=True,
    )
    return hpstage.optimize(
        study,
        Digits(),
        space,
        metric="accuracy",
        steps=STEPS,
        n_trials=N_TRIALS,
        algorithm=SuccessiveHalving(min_steps=15, reduction_factor=4),
        executor=executor,
        store=folder / ("plan" if sharing else "plan-alone"),
        show_progress_bar=not quiet,
        sharing=sharing,
    )


def states(result: hpstage.Result) -> dict[tuple[int, int], tuple[dict[str, float], str]]:
    """Metrics and digest of the weights of every (trial number, step) that was evaluated."""
    found = {}
    for id, trial in result.plan.trials.items():
        for step in range(1, trial.asked + 1):
            state = trial.node_at(step).states.get(step)
            if state is not None and state.metrics is not None and state.kept is not None:
                found[int(id.rpartition("/")[2]), step] = (state.metrics, state.kept.digest)
    return found


def equal(shared: hpstage.Result, alone: hpstage.Result) -> tuple[bool, int]:
    """Do all states that the trials alone were evaluated at have the same metrics and weights, bit for bit?"""
    ours, theirs = states(shared), states(alone)
    return bool(theirs) and all(ours.get(target) == found for target, found in theirs.items()), len(theirs)


def figures(result: hpstage.Result, wall: float) -> dict[str, object]:
    savings = result.savings
    return {
        **savings.as_dict(),
        "wall_seconds": wall,
        "wall_seconds_alone": None,
        "worker_seconds_alone_measured": None,
        "metrics_equal": None,
        "best_value": result.best_value,
        "best_trial": result.best_trial.number,
        "makespan_over_bound": savings.makespan / savings.lower_bound_seconds if savings.lower_bound_seconds else None,
    }


def timed(folder: Path, workers: int, *, sharing: bool, quiet: bool) -> tuple[hpstage.Result, float]:
    from hpstage.cluster import DaskExecutor

    began = time.perf_counter()
    result = search(folder, DaskExecutor(n_workers=workers), sharing=sharing, quiet=quiet)
    return result, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compare", action="store_true", help="train the same trials without sharing as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--folder", type=Path, default=Path(".hpstage/demo"), help="where the study is kept")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder: Path = options.folder
    finished = folder / "finished"
    if finished.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)

    result, wall = timed(folder, options.workers, sharing=True, quiet=options.quiet)
    written = figures(result, wall)
    best = result.best_trial
    print(f"\nBest trial     {best.number}: accuracy {best.value:.4f} with {best.params}")
    print(result.savings)
    print(f"{'bound':<19} {result.savings.lower_bound_seconds:.1f} s (makespan / bound {written['makespan_over_bound']:.2f})")
    print(f"{'report':<19} {result.write_report(folder / 'report')}")
    failed = False
    if options.compare:
        alone, wall_alone = timed(folder, options.workers, sharing=False, quiet=options.quiet)
        same, compared = equal(result, alone)
        ours, theirs = result.savings, alone.savings
        share = ours.worker_seconds / (theirs.worker_seconds / ours.cost_weighted_merge_rate)
        written |= {
            "wall_seconds_alone": wall_alone,
            "makespan_alone": theirs.makespan,
            "steps_trained_alone": theirs.steps_trained,
            "worker_seconds_alone_measured": theirs.worker_seconds,
            "metrics_equal": same,
            "states_compared": compared,
            "worker_seconds_over_ideal": share,
        }
        written["worker_seconds_alone"] = theirs.worker_seconds
        print(f"\n{'':<19} {'stage tree':>14} {'alone':>14}")
        rows = [
            ("steps trained", ours.steps_trained, theirs.steps_trained, ",d"),
            ("worker-seconds", ours.worker_seconds, theirs.worker_seconds, ",.1f"),
            ("makespan, s", ours.makespan, theirs.makespan, ",.1f"),
            ("best accuracy", result.best_value, alone.best_value, ".4f"),
        ]
        for name, mine, other, style in rows:
            print(f"{name:<19} {mine:>14{style}} {other:>14{style}}")
        print(f"worker-seconds / (alone / cost-weighted merge rate) = {share:.3f}")
        verdict = "equal bit for bit" if same else "NOT EQUAL"
        print(f"metrics and weights of all {compared} evaluated states: {verdict}")
        failed = not same or ours.steps_trained != ours.steps_unique
    finished.touch()
    if options.json is not None:
        options.json.write_text(json.dumps(written, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
