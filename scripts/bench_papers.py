"""Studies in the spirit of the published ones, in simulation: GPU-hours and makespan against training each trial alone.

    python scripts/bench_papers.py [--json FILE] [--shapes ...] [--rehearsals 3]

The published spaces (stage-based execution, arXiv 1911.10504; Hippo, arXiv 2006.11972 and PVLDB 15(5)) are not at hand:
those below search the same parameters (sequences of learning rates and batch sizes) for the same models with the same
algorithms, on 20 and 40 GPUs. Seconds of an epoch are assumed; ratios depend on them only through evaluations and
states. Scheduling is that of a real search; metrics are drawn, three sets of them where an algorithm looks at them.

GPU-hours   those without sharing, by the busy ones
end-to-end  makespan of the same search without sharing, by the makespan
/ unique    busy GPU-hours, by training each unique step and evaluating each result once
/ bound     makespan, by the lower bound for the tree: what passes to a depth, and the work below it on all workers

Rungs of synchronous successive halving wait for their slowest trial, which the bound does not know.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import optuna
from command_line import parser_of, write

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import shortest_makespan
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import StateKey
from hpstage.store import MemoryJournal

Grid = dict[str, list[Any]]


@dataclass(frozen=True)
class Shape:
    """A study. ``published`` has what papers report for one of its kind: GPU-hours and end-to-end, as ratios."""

    name: str
    grid: Grid
    space: Callable[[dict[str, Any]], dict[str, Any]]
    epochs: int
    gpus: int
    epoch_seconds: float
    algorithm: Callable[[], Algorithm]
    published: str = ""
    most: int | None = None
    """Trials of the grid that are taken, from the first on."""

    @property
    def trials(self) -> list[dict[str, Any]]:
        points = (dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values()))
        return list(itertools.islice(points, self.most))


def residual(point: dict[str, Any]) -> dict[str, Any]:
    """Learning rate dropped at milestones, batch size raised once; in epochs."""
    lr = s.multistep(point["lr"], point["drops"], point["gamma"])
    late = {0: 128} if point["batch"] is None else {0: 128, point["batch"]: 256}
    return {"lr": lr, "batch_size": s.piecewise(late), "momentum": point.get("momentum", 0.9)}


def mobile(point: dict[str, Any]) -> dict[str, Any]:
    """A warm-up, then a step or exponential decay, or a cosine."""
    warm = s.linear(point["lr"], 0.1, 1.0, 5).until(5)
    ends = {
        "step": s.step(point["lr"], point["every"], 0.5),
        "exponential": s.exponential(point["lr"], 0.5 ** (1 / point["every"])),
        "constant": s.constant(point["lr"]),
    }
    return {"lr": warm.then(ends[point["form"]]), "batch_size": 128, "weight_decay": point["decay"]}


def bert(point: dict[str, Any]) -> dict[str, Any]:
    """Fine-tuning in hundreds of steps: a warm-up, then constant until a linear decay begins."""
    lr, begin = point["lr"], point["begin"]
    return {
        "lr": s.linear(lr, 0.1, 1.0, 10).until(begin).then(s.linear(lr, 1.0, 0.0, 220 - begin)),
        "batch_size": s.piecewise({0: 32, begin: point["late_batch"]}),
        "dropout": point["dropout"],
    }


def cooldowns(point: dict[str, Any]) -> dict[str, Any]:
    """One trunk and three cooldowns, in billions of tokens."""
    length, mixture = point["cooldown"]
    lr = s.constant(1e-3).until(TRUNK).then(s.linear(1e-3, 1.0, 0.0, length).until(length))
    return {"steps": TRUNK + length, "lr": lr, "mixture": s.piecewise({0: "web", TRUNK: mixture})}


TRUNK = 6056
COOLDOWNS: Grid = {"cooldown": [[100, "a"], [100, "b"], [300, "a"]]}
RESIDUAL: Grid = {
    "lr": [0.1, 0.05, 0.02],
    "drops": [[80, 120], [80, 140], [100, 120], [100, 140], [60, 120]],
    "gamma": [0.1, 0.2, 0.5],
    "batch": [None, 40, 80],
    "momentum": [0.9, 0.95],
}
WIDE: Grid = {
    "lr": [0.1, 0.05],
    "drops": [[60, 120, 160], [60, 120, 180], [60, 140, 160], [80, 120, 160], [80, 140, 180], [100, 150, 180]],
    "gamma": [0.1, 0.2, 0.3, 0.5],
    "batch": [None, 60, 120, 160],
}
MOBILE: Grid = {
    "lr": [0.1, 0.05, 0.01],
    "form": ["step", "exponential", "constant"],
    "every": [20, 30, 40, 60],
    "decay": [1e-4, 4e-5],
}
BERT: Grid = {
    "lr": [2e-5, 3e-5, 5e-5],
    "begin": [60, 110, 160, 190],
    "late_batch": [16, 32, 48],
    "dropout": [0.1, 0.2],
}


def halving(least: int) -> Callable[[], Algorithm]:
    return lambda: SuccessiveHalving(min_steps=least, reduction_factor=4)


def asha(least: int) -> Callable[[], Algorithm]:
    return lambda: ASHA(min_steps=least, reduction_factor=4)


SHAPES = [
    Shape("ResNet-20, grid", RESIDUAL, residual, 160, 20, 16.0, FullTraining, "up to 5.73 x (ResNet-20)"),
    Shape("ResNet-20, SHA", RESIDUAL, residual, 160, 20, 16.0, halving(10)),
    Shape("WideResNet-16-4, grid", WIDE, residual, 200, 20, 34.0, FullTraining, "up to 6.60 x / 4.13 x"),
    Shape("WideResNet-16-4, SHA", WIDE, residual, 200, 20, 34.0, halving(12)),
    Shape("WideResNet-16-4, ASHA", WIDE, residual, 200, 20, 34.0, asha(12)),
    Shape("ResNet-56, SHA", RESIDUAL, residual, 160, 40, 41.0, halving(10), "up to 4.81 x / 2.76 x (one study)"),
    Shape("ResNet-56, ASHA", RESIDUAL, residual, 160, 40, 41.0, asha(10)),
    Shape("MobileNetV2, grid", MOBILE, mobile, 120, 40, 30.0, FullTraining),
    Shape("MobileNetV2, ASHA", MOBILE, mobile, 120, 40, 30.0, asha(8)),
    Shape("BERT-Base, grid", BERT, bert, 220, 40, 45.0, FullTraining),
    Shape("BERT-Base, SHA", BERT, bert, 220, 40, 45.0, halving(14)),
    Shape("WSD, three cooldowns", COOLDOWNS, cooldowns, TRUNK + 300, 3, 3600.0, FullTraining, "2.85 x, by arithmetic"),
]


def proposed(shape: Shape) -> tuple[Callable[[optuna.Trial], dict[str, Any]], optuna.samplers.BaseSampler]:
    """Return the study's space, and a sampler that proposes all of it."""
    grid = {name: [json.dumps(value) for value in values] for name, values in shape.grid.items()}

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return shape.space({name: json.loads(trial.suggest_categorical(name, grid[name])) for name in grid})

    return space, optuna.samplers.GridSampler(grid, seed=0)


class Untrained:
    """Is never called: the executor simulates training."""

    version = "1"

    def setup(self, hp: Any) -> None: ...
    def train(self, step: int, hp: Any) -> None: ...
    def evaluate(self) -> dict[str, float]: ...  # type: ignore[empty-body]
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


@dataclass
class Plan:
    """What studies share; nothing unless they are to."""

    journal: MemoryJournal
    kept: set[StateKey]
    folder: str


@contextmanager
def plan() -> Iterator[Plan]:
    with TemporaryDirectory() as folder:
        yield Plan(MemoryJournal(), set(), folder)


def simulate(shape: Shape, seed: int, shared: Plan, *, sharing: bool = True) -> dict[str, float]:
    """Run a study on virtual workers, and return its seconds: busy, without sharing, and bounds."""
    space, sampler = proposed(shape)
    executor = SimulatedExecutor(
        shape.gpus,
        step_seconds=shape.epoch_seconds,
        evaluate_seconds=shape.epoch_seconds / 20,
        load_seconds=0.5,
        save_seconds=0.2,
        measure=lambda key, step: {"value": random.Random(f"{seed} {key}").random()},
        kept=shared.kept,
    )
    result = hpstage.optimize(
        optuna.create_study(direction="maximize", sampler=sampler),
        Untrained(),
        space,
        metric="value",
        steps=shape.epochs,
        n_trials=len(shape.trials),
        algorithm=shape.algorithm(),
        executor=executor,
        store=shared.journal,
        checkpoints=shared.folder,
        sharing=sharing,
    )
    savings = result.savings
    trials = [result.plan.trials[result.trial_id(trial.number)] for trial in result.study.trials]
    return {
        "merge_rate": savings.merge_rate,
        "used": savings.worker_seconds,
        "alone": savings.worker_seconds_alone,
        "makespan": executor.clock(),
        "unique": shortest_makespan(result.plan, trials, 1),
        "bound": shortest_makespan(result.plan, trials, shape.gpus),
    }


def rehearse(shape: Shape, rehearsals: int) -> dict[str, Any]:
    runs = []
    for seed in range(rehearsals):
        with plan() as shared, plan() as own:
            run = simulate(shape, seed, shared)
            runs.append(run | {"makespan_unshared": simulate(shape, seed, own, sharing=False)["makespan"]})
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {
        "gpus": shape.gpus,
        "trials": len(shape.trials),
        "merge_rate": median["merge_rate"],
        "gpu_hours": statistics.median(run["alone"] / run["used"] for run in runs),
        "end_to_end": statistics.median(run["makespan_unshared"] / run["makespan"] for run in runs),
        "by_unique": statistics.median(run["used"] / run["unique"] for run in runs),
        "by_bound": statistics.median(run["makespan"] / run["bound"] for run in runs),
        "published": shape.published,
        "runs": runs,
    }


# --- several studies on one plan ------------------------------------------------------------------------------


def studies(count: int, gpus: int = 40) -> dict[str, float]:
    """``count`` studies of ResNet-56 on one plan, one after the other: each searches half of the learning rates and
    milestones, so that any two have some of both in common. Makespans are summed."""
    shapes = [
        RESIDUAL
        | {
            name: [RESIDUAL[name][(number + offset) % len(RESIDUAL[name])] for offset in range(size)]
            for name, size in (("lr", 2), ("drops", 3), ("batch", 2))
        }
        for number in range(count)
    ]
    runs = []
    with plan() as shared:
        for grid in shapes:
            shape = Shape("ResNet-56", grid, residual, 160, gpus, 41.0, halving(10))
            with plan() as own:
                alone = simulate(shape, 0, own, sharing=False)
            runs.append(simulate(shape, 0, shared) | {"makespan_unshared": alone["makespan"]})
    used, alone_seconds, makespan, makespan_unshared = (
        sum(run[name] for run in runs) for name in ("used", "alone", "makespan", "makespan_unshared")
    )
    return {"gpu_hours": alone_seconds / used, "end_to_end": makespan_unshared / makespan}


def main() -> None:
    parser = parser_of(__doc__)
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, metavar="SHAPE")
    parser.add_argument("--studies", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rehearsals", type=int, default=3)
    parser.add_argument("--trials", type=int, help="of each study at most (default: all of its grid)")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found: dict[str, Any] = {}
    print(f"{'':22} GPUs trials  merge  GPU-hours  end-to-end  / unique  / bound   published")
    for shape in (replace(shape, most=options.trials) for shape in SHAPES):
        if shape.name in options.shapes:
            found[shape.name] = one = rehearse(shape, options.rehearsals)
            print(
                f"{shape.name:22} {one['gpus']:4} {one['trials']:6} {one['merge_rate']:6.2f} "
                f"{one['gpu_hours']:8.2f} x {one['end_to_end']:9.2f} x {one['by_unique']:9.3f} "
                f"{one['by_bound']:8.3f}   {one['published']}",
                flush=True,
            )
    for what in ("by_unique", "by_bound"):
        print(f"{what}: median {median(found.values(), what):.3f}, worst {worst(found, what)}")
    figures: dict[str, Any] = {"shapes": found, "studies": {}}
    for count in options.studies:
        figures["studies"][count] = several = studies(count)
        print(
            f"{count} studies on one plan: {several['gpu_hours']:.2f} x GPU-hours, "
            f"{several['end_to_end']:.2f} x end-to-end"
        )
    write(options, figures)


def median(found: Iterable[dict[str, Any]], what: str) -> float:
    return statistics.median(one[what] for one in found)


def worst(found: dict[str, dict[str, Any]], what: str) -> str:
    name = max(found, key=lambda each: float(found[each][what]))
    return f"{found[name][what]:.3f} ({name})"


if __name__ == "__main__":
    main()
