"""Records the plan that notebooks/saved_gpu_hours.ipynb looks at: two studies of the demo, one after the other.

    .venv/bin/python scripts/record.py

It replaces notebooks/recorded/digits. What would tell of this machine (host, addresses, process numbers) is replaced
by plain names; all else is as it was trained.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import optuna

import hpstage
from hpstage.algorithm import Algorithm
from hpstage.algos import MedianStopping, SuccessiveHalving
from hpstage.cluster import DaskExecutor
from hpstage.plan.facts import ChainLost, ChainStarted, DriverJoined, Fact, StateReached, WorkerId
from hpstage.plan.log import read_facts
from hpstage.store import Journal, SQLiteJournal

sys.path.insert(0, str(Path(__file__).parent))
from demo_digits import STEPS, Digits, space

RECORDED = Path(__file__).parent.parent / "notebooks" / "recorded" / "digits"


def train(store: Path) -> None:
    studies: list[tuple[str, int, int, Algorithm]] = [
        ("digits", 0, 48, MedianStopping(interval=10, grace=20)),
        ("a week later", 1, 32, SuccessiveHalving(min_steps=20, reduction_factor=4)),
    ]
    for name, seed, n_trials, algorithm in studies:
        study = optuna.create_study(
            study_name=name, direction="minimize", sampler=optuna.samplers.RandomSampler(seed=seed)
        )
        result = hpstage.optimize(
            study,
            Digits(),
            space,
            metric="loss",
            steps=STEPS,
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
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        store = Path(name)
        train(store)
        shutil.rmtree(RECORDED, ignore_errors=True)
        with closing(SQLiteJournal(store / "plan.sqlite", read_only=True)) as journal:
            records = [msgspec.json.encode(fact) for fact in unnamed(journal)]
    file = RECORDED / "plan.sqlite"
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
