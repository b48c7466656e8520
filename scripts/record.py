"""Records the plans that the book shows.

    .venv/bin/python scripts/record.py demo      the demo, for README's picture
    .venv/bin/python scripts/record.py digits    two studies of the demo, one after the other
    .venv/bin/python scripts/record.py text      four studies of a model of text, 384 trials: some ten minutes

It replaces notebooks/recorded/NAME. What identifies this machine (host, addresses, process numbers) is replaced by
plain names; all else is as it was trained.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import optuna
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, Hyperband, MedianStopping, SuccessiveHalving
from hpstage.cluster import DaskExecutor
from hpstage.plan.facts import ChainLost, ChainStarted, DriverJoined, Fact, StateReached, WorkerId
from hpstage.plan.log import read_facts
from hpstage.schedule.space import Space
from hpstage.store import Journal, SQLiteJournal

sys.path.insert(0, str(Path(__file__).parent))
from demo_digits import N_TRIALS, STEPS, Digits, space

RECORDED = Path(__file__).parent.parent / "notebooks" / "recorded"


class Text(hpstage.torch.TorchTrainable):
    """Predicts a character of Python's help texts from the 16 before it."""

    step_unit = "batch"
    context = 16

    def dataset(self) -> TensorDataset:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")[:300_000]
        windows = torch.tensor(list(text)).clamp(max=127).unfold(0, self.context + 1, 2)
        held_out = len(windows) // 20
        self.test = windows[-held_out:]
        return TensorDataset(windows[:-held_out])

    def model(self, hp: dict[str, float]) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * self.context, 384), nn.GELU(), nn.Linear(384, 128)
        )

    def optimizer(self, model: nn.Module, hp: dict[str, float]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=hp["lr"], weight_decay=hp["weight_decay"])

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        (windows,) = batch
        return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": nn.functional.cross_entropy(model(self.test[:, :-1]), self.test[:, -1]).item()}


TEXT_STEPS = 810


def text_space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
    """Three rates and two warm-ups; when the rate falls and the batch grows; weight decay from the middle on."""
    lr = trial.suggest_categorical("lr", [0.01, 0.003, 0.001])
    drop = trial.suggest_categorical("drop_at", [90, 270, 540, 720])
    gamma = trial.suggest_categorical("gamma", [0.1, 0.3])
    grow = trial.suggest_categorical("grow_batch_at", [180, 360, 630])
    late = trial.suggest_categorical("late_weight_decay", [0.01, 0.1])
    return {
        "lr": s.multistep(lr, milestones=[drop], gamma=gamma),
        "batch_size": s.piecewise({0: 192, grow: 768}),
        "weight_decay": s.piecewise({0: 0.01, TEXT_STEPS // 2: late}),
    }


def demo(store: Path) -> None:
    halving = SuccessiveHalving(min_steps=15, reduction_factor=4, tree_aware=False)
    train(store, "digits", 0, N_TRIALS, halving, Digits(), space, STEPS, metric="accuracy", direction="maximize")


def digits(store: Path) -> None:
    for name, seed, n_trials, algorithm in (
        ("digits", 0, 48, MedianStopping(interval=10, grace=20)),
        ("a week later", 1, 32, SuccessiveHalving(min_steps=20, reduction_factor=4)),
    ):
        train(store, name, seed, n_trials, algorithm, Digits(), space, STEPS)


def text(store: Path) -> None:
    for name, seed, n_trials, algorithm in (
        ("first look", 0, 144, ASHA(min_steps=30, reduction_factor=3)),
        ("a colleague", 1, 96, Hyperband(min_steps=30, reduction_factor=3)),
        ("a second seed", 2, 96, MedianStopping(interval=90, grace=90)),
        ("for the paper", 3, 48, hpstage.algos.FullTraining()),
    ):
        train(store, name, seed, n_trials, algorithm, Text(), text_space, TEXT_STEPS)


def train(
    store: Path,
    name: str,
    seed: int,
    n_trials: int,
    algorithm: Algorithm,
    trainable: hpstage.torch.TorchTrainable,
    space: Space,
    steps: int,
    *,
    metric: str = "loss",
    direction: str = "minimize",
) -> None:
    study = optuna.create_study(study_name=name, direction=direction, sampler=optuna.samplers.RandomSampler(seed=seed))
    result = hpstage.optimize(
        study,
        trainable,
        space,
        metric=metric,
        steps=steps,
        n_trials=n_trials,
        algorithm=algorithm,
        executor=DaskExecutor(n_workers=2),
        store=store,
    )
    print(f"{name}\n{result.savings}\n")


def unnamed(journal: Journal) -> Iterator[Fact]:
    """The facts, with workers numbered and without a host."""
    workers: dict[WorkerId, WorkerId] = {}
    for fact in read_facts(journal):
        match fact:
            case DriverJoined():
                yield msgspec.structs.replace(fact, host="workstation", pool="workers", pid=1)
            case StateReached() | ChainStarted() | ChainLost():
                worker = workers.setdefault(fact.worker, WorkerId(f"worker {len(workers)}"))
                yield msgspec.structs.replace(fact, worker=worker)
            case _:
                yield fact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["demo", "digits", "text"])
    which = parser.parse_args().which
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = RECORDED / which
    with tempfile.TemporaryDirectory() as name:
        store = Path(name)
        {"demo": demo, "digits": digits, "text": text}[which](store)
        keep(store, folder)


def keep(store: Path, folder: Path) -> None:
    """Replace a recorded plan by that of a store."""
    shutil.rmtree(folder, ignore_errors=True)
    with closing(SQLiteJournal(store / "plan.sqlite", read_only=True)) as journal:
        records = [msgspec.json.encode(fact) for fact in unnamed(journal)]
    file = folder / "plan.sqlite"
    with closing(SQLiteJournal(file)) as copy:
        copy.append(records)
    with closing(sqlite3.connect(file)) as opened:
        # One file, that readers leave as it is.
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        opened.execute("PRAGMA journal_mode=DELETE")
        opened.execute("VACUUM")
    print(f"{file}: {len(records)} records, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
