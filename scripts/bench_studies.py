"""Two overlapping studies on one plan, each in a process of its own: GPU-hours against running them apart, and alone.

    .venv/bin/python scripts/bench_studies.py [--rounds 5] [--workers 1] [--json FILE]

Both search the demo's model; of 8 trials each, the two have 4 learning-rate sequences in common, and every two of them
begin with the same rates. The plan is on a Redis server of this script; one Dask cluster serves all. In each round:

alone       every trial of both trained by itself (sharing=False)
apart       a plan for each study, one study after the other
together    one plan, both started at once
after       one plan, the second study started when the first has ended

Predicted, from the plans' trees before anything is measured: requested steps over unique steps. Measured: seconds of
workers (training, evaluating, loading, saving), as the journals have them. Takes about ten minutes on two cores; with a
worker on each of them the drivers would be timed as well.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import optuna
from bench_store import own_server
from command_line import parser_of, shown, write
from demo_digits import Digits
from distributed import Client, LocalCluster

import hpstage
from hpstage import schedule as s
from hpstage.accounting.accounting import accounted
from hpstage.accounting.sums import Sums
from hpstage.plan.log import open_plan
from hpstage.store.redis_plans import open_redis

STEPS = 30
RATES = {"low": (0.05, 0.1), "high": (0.1, 0.2)}


def drive(name: str, address: str, store: str, folder: str, sharing: bool) -> None:
    """One study, in this process."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
        rate = trial.suggest_categorical("lr", RATES[name])
        drops = [trial.suggest_categorical("first", [8, 15]), trial.suggest_categorical("second", [22, 25])]
        return {"lr": s.multistep(rate, milestones=drops, gamma=0.2), "momentum": 0.9, "batch_size": 64}

    grid = {"lr": list(RATES[name]), "first": [8, 15], "second": [22, 25]}
    study = optuna.create_study(
        study_name=name, direction="maximize", sampler=optuna.samplers.GridSampler(grid, seed=0)
    )
    with Client(address) as client:
        hpstage.optimize(
            study,
            Digits(),
            space,
            metric="accuracy",
            steps=STEPS,
            n_trials=8,
            executor=client,
            store=store,
            checkpoints=folder,
            sharing=sharing,
        )


class Round:
    """One run of each kind, on a fresh plan each."""

    def __init__(self, address: str, server: str, folder: Path) -> None:
        self._address = address
        self._server = server
        self._folder = folder
        self._plans = 0

    def search(self, *groups: tuple[str, ...], sharing: bool = True) -> Sums:
        """Studies on one plan: those of a group at once, one group after the other. Returns the sums of the plan."""
        self._plans += 1
        prefix = f"bench-studies-{self._folder.name}-{self._plans}"
        store, folder = f"{self._server}?prefix={prefix}", self._folder / str(self._plans)
        for group in groups:
            words = [self._address, store, str(folder), "shared" if sharing else "alone"]
            drivers = [subprocess.Popen([sys.executable, __file__, "--drive", name, *words]) for name in group]
            if sum(driver.wait() for driver in drivers):
                raise SystemExit("a study failed")
        journal = open_redis(store, "")
        header = msgspec.json.decode(journal.read(0, 1)[0])
        plan = open_plan(journal, header["workload"], header["described"], sharing=sharing)
        sums = accounted(plan, journal).whole()
        journal.close()
        shutil.rmtree(folder)
        return sums

    def measure(self) -> dict[str, float]:
        alone = self.search(("low", "high"), sharing=False)
        apart = [self.search((name,)) for name in RATES]
        together = self.search(("low", "high"))
        after = self.search(("low",), ("high",))
        seconds_apart = sum(sums.worker_seconds for sums in apart)
        steps_apart = sum(sums.steps_unique for sums in apart)
        figures: dict[str, float] = {
            "steps requested": together.steps_asked,
            "unique steps, apart": steps_apart,
            "unique steps, one plan": together.steps_unique,
            "predicted alone / one plan": together.merge_rate,
            "predicted apart / one plan": steps_apart / together.steps_unique,
        }
        for name, sums in (("together", together), ("after", after)):
            assert sums.steps_unique == together.steps_unique
            figures[f"{name}: steps trained"] = sums.steps_trained + sums.steps_wasted
            figures[f"{name}: alone / measured"] = alone.worker_seconds / sums.worker_seconds
            figures[f"{name}: apart / measured"] = seconds_apart / sums.worker_seconds
        figures["seconds per step, alone"] = alone.worker_seconds / alone.steps_trained
        figures["seconds per step, together"] = together.worker_seconds / together.steps_trained
        return figures


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="fewer than there are cores: the drivers need one")
    parser.add_argument("--drive", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive is not None:
        name, address, store, folder, how = options.drive
        drive(name, address, store, folder, how == "shared")
        return 0
    rounds: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as place,
        own_server(Path(place)) as server,
        LocalCluster(options.workers, threads_per_worker=1, memory_limit=0, dashboard_address=":0") as cluster,
    ):
        for number in range(options.rounds):
            rounds.append(Round(cluster.scheduler_address, server, Path(place) / str(number)).measure())
            print(f"round {number + 1} of {options.rounds} is done", file=sys.stderr)
    figures = {figure: [found[figure] for found in rounds] for figure in rounds[0]}
    shown(figures, f"{options.rounds} rounds")
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
