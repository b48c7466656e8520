"""The demo: 48 trials of learning-rate and batch-size sequences on scikit-learn's digits, under successive halving.

    ./scripts/demo                  as a stage tree
    ./scripts/demo --compare        and without sharing as well, checked bit for bit
    ./scripts/demo --tree-aware     trials that are one state at a rung as one candidate (hpstage's default)
    ./scripts/demo --json FILE      write all figures
    ./scripts/demo --wait           keep the dashboard's page open at the end

Without --tree-aware this is successive halving as published: it trains more, and keeps two workers busier.

An interrupted demo resumes when it is started again; a finished one begins from scratch.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.cli.terminal import columns
from hpstage.errors.text import folded
from hpstage.plan.messages import Auditing

if TYPE_CHECKING:  # Dask is imported by functions, since `hpstage plan` needs none
    from distributed import Client

    from hpstage.cluster import DaskExecutor

STEPS = 120
N_TRIALS = 48
NOISE = 0.25
"""Standard deviation of what is added to pixels of 0 to 1."""


class Digits(hpstage.torch.TorchTrainable):
    """A small CNN on 1,797 images of 8 x 8 pixels, under noise; a step is an epoch over 1,437 of them."""

    step_unit = "epoch"

    def data(self) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
        from sklearn.datasets import load_digits  # here, since `hpstage plan` reads no data

        images, labels = load_digits(return_X_y=True)
        random = np.random.default_rng(0)
        order = random.permutation(len(images))
        # Without noise every schedule is near 0.997 by step 15, and there would be nothing to search for.
        noisy = images[order] / 16 + random.normal(scale=NOISE, size=images.shape)
        x = torch.tensor(noisy, dtype=torch.float32).reshape(-1, 1, 8, 8)
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


def open_study(folder: Path) -> optuna.Study:
    folder.mkdir(parents=True, exist_ok=True)
    return optuna.create_study(
        study_name="digits",
        storage=JournalStorage(JournalFileBackend(str(folder / "optuna.log"))),
        sampler=optuna.samplers.RandomSampler(seed=0),
        direction="maximize",
        load_if_exists=True,
    )


def search(
    folder: Path, executor: DaskExecutor, *, sharing: bool, tree_aware: bool, quiet: bool, audit: Auditing
) -> hpstage.Result:
    study = open_study(folder)
    if sum(trial.state.is_finished() for trial in study.trials) >= N_TRIALS:
        # Killed after its end, before its figures were written: another call would add trials to it.
        shutil.rmtree(folder)
        study = open_study(folder)
    return hpstage.optimize(
        study,
        Digits(),
        space,
        metric="accuracy",
        steps=STEPS,
        n_trials=N_TRIALS,
        algorithm=SuccessiveHalving(min_steps=15, reduction_factor=4, tree_aware=tree_aware),
        executor=executor,
        store=folder,
        show_progress_bar=not quiet,
        sharing=sharing,
        audit=audit,
    )


def states(result: hpstage.Result) -> dict[str, list[object]]:
    """Metrics and digest of the weights of every state that was evaluated, by "trial number/step"."""
    found: dict[str, list[object]] = {}
    for id, trial in result.plan.trials.items():
        for step in range(1, trial.requested + 1):
            state = trial.node_at(step).states.get(step)
            if state is not None and state.metrics is not None and state.kept is not None:
                found[f"{id.rpartition('/')[2]}/{step}"] = [state.metrics, state.kept.digest]
    return found


def phase(folder: Path, options: argparse.Namespace, client: Client | None, *, sharing: bool) -> dict[str, Any]:
    """Figures of the search; taken from the file that an interrupted demo left, if it had come so far."""
    place = folder / ("stage-tree" if sharing else "alone")
    written = place / "figures.json"
    if written.exists():
        return json.loads(written.read_text())
    began = time.perf_counter()
    resumed = place.exists()
    from hpstage.cluster import DaskExecutor

    executor = DaskExecutor(client) if client is not None else DaskExecutor(n_workers=options.workers)
    result = search(
        place, executor, sharing=sharing, tree_aware=options.tree_aware, quiet=options.quiet, audit=options.audit
    )
    wall = time.perf_counter() - began
    best = result.best_trial
    figures: dict[str, Any] = {
        **result.savings.as_dict(),
        "wall": None if resumed else wall,
        "best_value": best.value,
        "best_trial": best.number,
        "best_params": best.params,
        "audit": str(result.audit),
        "table": str(result.savings),
        "report": str(result.write_report(place / "report")),
        "states": states(result),
    }
    written.with_suffix(".part").write_text(json.dumps(figures))
    written.with_suffix(".part").rename(written)
    return figures


def compared(ours: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """The stage tree against the same trials without sharing."""
    theirs: dict[str, Any] = alone["states"]
    ideal = alone["worker_seconds"] / ours["cost_weighted_merge_rate"]
    return {
        "worker_seconds_alone": alone["worker_seconds"],
        "wall_seconds_alone": alone["wall"],
        "makespan_unshared": alone["makespan"],
        "steps_trained_unshared": alone["steps_trained"],
        "states_compared": len(theirs),
        "metrics_equal": bool(theirs) and all(ours["states"].get(target) == found for target, found in theirs.items()),
        "worker_seconds_over_ideal": ours["worker_seconds"] / ideal,
    }


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """Return the book's table of a compared demo."""
    return [
        ["steps requested", f"{figures['steps_asked']:,}"],
        ["steps trained", f"{figures['steps_trained']:,}"],
        ["merge rate", f"{figures['merge_rate']:.2f}"],
        ["evaluated states with bit-identical metrics and weights", f"all {figures['states_compared']}"],
        ["makespan / lower bound", f"{figures['makespan_over_bound']:.3f}"],
        [
            "worker-seconds / (those without sharing / cost-weighted merge rate)",
            f"{figures['worker_seconds_over_ideal']:.3f}",
        ],
        [
            "makespan with / without sharing",
            f"{figures['makespan']:.0f} s / {figures['makespan_unshared']:.0f} s",
        ],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--compare", action="store_true", help="train the same trials without sharing as well")
    parser.add_argument("--tree-aware", action="store_true", help="trials that are one state are one candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--record", action="store_true", help="with --compare: write the figures into README and book")
    parser.add_argument("--folder", type=Path, default=Path(".hpstage/demo"), help="default: .hpstage/demo")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument(
        "--audit", choices=get_args(Auditing), default="idle", help="what is trained again to compare (default: idle)"
    )
    parser.add_argument("--wait", action="store_true", help="keep the dashboard's page open at the end, until Ctrl-C")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder: Path = options.folder
    if (folder / "finished").exists():
        print(f"The demo that was finished makes way for a new one ({folder})", file=sys.stderr)
        shutil.rmtree(folder)

    try:
        return run(folder, options)
    except KeyboardInterrupt:
        again = shlex.join(["./scripts/demo", *sys.argv[1:]])
        print(f"\nStopped. To resume from there, with nothing trained twice: {again}", file=sys.stderr)
        return 130


def run(folder: Path, options: argparse.Namespace) -> int:
    """Run the demo, and with ``--wait`` leave its page open."""
    if not options.wait:
        return compare(folder, options, None)
    from distributed import Client

    from hpstage.cluster.dashboard import page_of

    with hpstage.local_cluster(options.workers) as cluster, Client(cluster) as client:
        status = compare(folder, options, client)
        print(f"\n{page_of(client) or cluster.dashboard_link} stays open until Ctrl-C", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
        print("\nClosing", file=sys.stderr)
    return status


def compare(folder: Path, options: argparse.Namespace, client: Client | None) -> int:
    """Train what is requested, and print the figures."""
    ours = phase(folder, options, client, sharing=True)
    bound = ours["lower_bound_seconds"]
    over = ours["makespan"] / bound if bound else None
    requested, trained = ours["steps_asked"], ours["steps_trained"]
    less = f"{ours['merge_rate']:.2f}× less training: " if trained else ""  # nothing, if an earlier call trained all
    print(f"\n{less}{trained:,} steps where {requested:,} were requested.")
    best = f"Best trial {ours['best_trial']}: accuracy {ours['best_value']:.4f} with {ours['best_params']}"
    print(f"{folded(best, columns())}\n")
    print(ours["table"])
    if bound:
        print(f"{'lower bound':<21}  {bound:.1f} s (makespan / bound = {over:.3f})")
    print(f"{'report':<21}  {ours['report']}")
    figures = {name: value for name, value in ours.items() if name not in ("states", "table", "wall")}
    figures |= {"wall_seconds": ours["wall"], "wall_seconds_alone": None, "metrics_equal": None}
    figures["makespan_over_bound"] = over
    failed = False
    if options.compare:
        alone = phase(folder, options, client, sharing=False)
        figures |= compared(ours, alone)
        print(f"\n{'':<19} {'stage tree':>12} {'without sharing':>16}")
        for name, key, style in (
            ("steps trained", "steps_trained", ",d"),
            ("worker-seconds", "worker_seconds", ",.1f"),
            ("makespan, s", "makespan", ",.1f"),
            ("best accuracy", "best_value", ".4f"),
        ):
            print(f"{name:<19} {ours[key]:>12{style}} {alone[key]:>16{style}}")
        if ours["wall"] is None or alone["wall"] is None:
            print("interrupted searches count from their beginning, without the pauses between their calls")
        ratio = figures["worker_seconds_over_ideal"]
        print(f"worker-seconds / (those without sharing / cost-weighted merge rate) = {ratio:.3f}")
        verdict = "equal bit for bit" if figures["metrics_equal"] else "NOT EQUAL"
        print(f"metrics and weights of all {figures['states_compared']} evaluated states: {verdict}")
        failed = not figures["metrics_equal"] or ours["steps_trained"] != ours["steps_unique"]
        if options.record and not failed:
            from figures import record  # the file next to this one, which the demo's trainable does not need

            record("demo", rows(figures), "./scripts/demo --compare")
    (folder / "finished").touch()
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted. All progress is kept: the same command continues from here.", file=sys.stderr)
        sys.exit(130)
