"""Where hpstage's own time goes: in a search of many trials, and between two stages on a worker.

    .venv/bin/python scripts/bench_profile.py [--json FILE] [--trials 10000] [--stages 60]

search    milliseconds of processor time a trial, by part, of a random study in memory with full training: three
          hyperparameters, 100 steps, 40 simulated workers, which train nothing. A part has what it calls of others
          taken off, so that the parts add up
between   milliseconds from a report of a worker to the first step of the stage that it trains next, medians on a
          local worker with an empty state: until the driver has the report, until it has decided and written that to
          the plan's file, until the worker trains
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import optuna
from command_line import parser_of, write
from optuna.storages import InMemoryStorage

import hpstage
from hpstage import schedule as s
from hpstage.cluster import DaskExecutor
from hpstage.driver.driver import Driver
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import StateReached
from hpstage.plan.messages import ChainEnded
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.scheduler import Scheduler
from hpstage.search import trials as search_trials
from hpstage.search.session import Session
from hpstage.store import MemoryJournal

PARTS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("the search between algorithm and study", Session, ("run",)),
    ("Optuna: ask and suggest", optuna.Study, ("ask",)),
    ("Optuna: ask and suggest", optuna.Trial, ("suggest_float", "suggest_int", "suggest_categorical")),
    ("Optuna: tell", optuna.Study, ("tell",)),
    ("Optuna: attributes and look-ups", InMemoryStorage, ("set_trial_user_attr", "get_trial", "get_all_trials")),
    ("the space, and its checks", search_trials, ("describe",)),
    ("planner: folding facts", SearchPlan, ("apply",)),
    ("scheduler: what each fact changes", Scheduler, ("fold",)),
    ("scheduler: deciding", Scheduler, ("decide", "propose", "carry_out", "tick")),
    ("driver: reports, writing, instructions", Driver, ("add", "ask", "wait", "finish")),
    ("journal: encoding and appending", MemoryJournal, ("append", "read_on")),
    ("simulated workers", SimulatedExecutor, ("start", "wait", "amend", "stop")),
]


class Shares:
    """Processor time by part; a part's own, without that of parts that it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = [0.0]

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                taken = time.thread_time() - began
                self.seconds[part] += taken - self._inner.pop()
                self._inner[-1] += taken

        return timed


def space(trial: optuna.Trial) -> dict[str, Any]:
    late = trial.suggest_categorical("late", [32, 64])
    lr = s.multistep(trial.suggest_float("lr", 1e-3, 1.0, log=True), [trial.suggest_int("drop_at", 10, 90)], gamma=0.1)
    return {"lr": lr, "batch_size": s.piecewise({0: 32, 50: late})}


def search(trials: int) -> dict[str, float]:
    """Milliseconds a trial, by part."""
    shares = Shares()
    for part, owner, names in PARTS:
        for name in names:
            setattr(owner, name, shares.of(part, getattr(owner, name)))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    began = time.thread_time()
    hpstage.optimize(
        study,
        object(),
        space,
        metric="value",
        steps=100,
        n_trials=trials,
        executor=SimulatedExecutor(40),
        store=MemoryJournal(),
    )
    whole = time.thread_time() - began
    found = {part: 1000 * seconds / trials for part, seconds in shares.seconds.most_common()}
    found["before, after and the rest"] = 1000 * (whole - sum(shares.seconds.values())) / trials
    return found | {"all": 1000 * whole / trials}


class First:
    """Reports as a metric when it has trained its first step."""

    def setup(self, hp: Any) -> None:
        self.first = 0.0

    def train(self, step: int, hp: Any) -> None:
        self.first = self.first or time.time()

    def evaluate(self) -> dict[str, float]:
        return {"first": self.first}

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: None) -> None:
        pass

    stateless = ("first",)


class Watched(DaskExecutor):
    """Notes when chains are over for the driver, and when it starts them."""

    def __init__(self) -> None:
        super().__init__(n_workers=1, gpus=0)
        self.received: list[float] = []
        self.started: list[float] = []

    def wait(self, timeout: float | None) -> Any:
        reports = super().wait(timeout)
        self.received += [time.time() for report in reports if isinstance(report, ChainEnded)]
        return reports

    def start(self, worker: Any, chain: Any) -> None:
        self.started.append(time.time())
        super().start(worker, chain)


def between(stages: int) -> dict[str, float]:
    """Medians in milliseconds."""
    executor = Watched()
    with tempfile.TemporaryDirectory() as folder:
        result = hpstage.optimize(
            optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)),
            First(),
            lambda trial: {"x": trial.suggest_float("x", 0, 1)},
            metric="first",
            steps=3,
            n_trials=stages,
            executor=executor,
            store=folder,
            verify="off",
        )
    reached = [fact for fact in result.journal if isinstance(fact, StateReached) and fact.metrics]
    reported = [fact.at for fact in reached]
    first = [dict(fact.metrics)["first"] for fact in reached if fact.metrics is not None]
    assert len(first) == len(executor.started) == len(executor.received) == stages
    spans: dict[str, list[float]] = {
        "from the report to the driver": [b - a for a, b in zip(reported, executor.received, strict=True)],
        "decided, written, sent": [b - a for a, b in zip(executor.received, executor.started[1:], strict=False)],
        "from the driver to the first step": [b - a for a, b in zip(executor.started, first, strict=True)],
        "from a report to the next first step": [b - a for a, (_, b) in zip(reported, pairwise(first), strict=False)],
    }
    return {name: 1000 * statistics.median(values) for name, values in spans.items()}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--stages", type=int, default=60)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = {"between": between(options.stages), "search": search(options.trials)}
    for title, unit in (("search", f"of {options.trials:,} trials, ms a trial"), ("between", "two stages, ms")):
        print(f"{title} {unit}")
        for name, value in found[title].items():
            print(f"  {name:<42} {value:8.3f}")
    write(options, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
