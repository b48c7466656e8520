"""StageTreeSampler against its base sampler, at equal trained steps.

    .venv/bin/python scripts/bench_sampler.py [--json FILE] [--seeds 20]

Every seed is another learning task: a small network with a hidden layer, in NumPy, trained for 120 steps by SGD with
momentum and weight decay on 384 noisy samples of a random teacher; the objective is its error against the teacher's own
outputs on 512 more. Steps are counted by hpstage's search plan: those that the stage tree trains, each once.

staged      five numbers that matter from different steps on: the learning rate (0), its first factor (30), weight
            decay (45), momentum (60), the last factor (90)
wsd         four numbers: the learning rate (0), momentum (20), weight decay (60), and the length of the final decay,
            which says itself from where on it matters (30 to 110)
flat        four numbers that matter from the first step on: here there is nothing to share
in order    StageTreeSampler without a space: it assumes that parameters matter in the order of their suggestion

merge       steps of all trials / steps trained, when as many steps are trained as 60 trials alone take
error       the best error after as many trained steps as 15, 30 and 60 trials alone take
ratio       error / error of the base sampler, seed by seed, at the same trained steps (below 1: it pays)
better      share of the seeds where it is below 1
All are medians, with the quartiles in brackets. The sampler's radius was chosen on other seeds than these.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from command_line import parser_of, write
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.optuna import StageTreeSampler
from hpstage.plan.facts import StateKey, TargetAsked, TrialAdded, TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.schedule import Schedule

STEPS = 120
BATCH = 32
BUDGETS = (15, 30, 60)  # in whole trials
MOST_TRIALS = 600
FIRST_SEED = 1000


class Task:
    """A regression that a network is trained on; data, initial weights and batches follow from the seed."""

    def __init__(self, seed: int, inputs: int = 8, hidden: int = 12, samples: int = 384) -> None:
        draw = np.random.default_rng(seed)
        x = draw.normal(size=(samples + 512, inputs))
        teacher, output = draw.normal(size=(inputs, 6)), draw.normal(size=6)
        clean = np.tanh(x @ teacher * 1.5 / np.sqrt(inputs)) @ output
        clean = (clean - clean.mean()) / clean.std()
        noisy = clean + 0.3 * draw.normal(size=clean.shape)
        self.x, self.y = x[samples:], clean[samples:]
        self.first, self.second = draw.normal(size=(inputs, hidden)) / np.sqrt(inputs), draw.normal(size=hidden) / 3.5
        rows = draw.integers(samples, size=(STEPS, BATCH))
        self.batches = [(x[row], noisy[row]) for row in rows]

    def error(self, schedules: Mapping[str, Schedule]) -> float:
        """The mean squared error of a network trained under the schedules; 10 if training diverged."""
        lr, momentum, decay = (list(schedules[name].values(STEPS)) for name in ("lr", "momentum", "weight_decay"))
        w, v = self.first, self.second
        speed_w, speed_v = np.zeros_like(w), np.zeros_like(v)
        with np.errstate(over="ignore", invalid="ignore"):
            for step, (x, y) in enumerate(self.batches):
                hidden = np.tanh(x @ w)
                off = (hidden @ v - y) / BATCH
                grad_w = x.T @ (np.outer(off, v) * (1 - hidden * hidden))
                speed_w = momentum[step] * speed_w + grad_w + decay[step] * w
                speed_v = momentum[step] * speed_v + hidden.T @ off + decay[step] * v
                w, v = w - lr[step] * speed_w, v - lr[step] * speed_v
            error = float(np.mean((np.tanh(self.x @ w) @ v - self.y) ** 2))
        return min(error, 10.0) if np.isfinite(error) else 10.0


def staged(trial: Any) -> dict[str, Any]:
    lr = trial.suggest_float("lr", 1e-3, 3, log=True)
    factor = trial.suggest_float("factor", 0.03, 3, log=True)
    decay = trial.suggest_float("weight_decay", 1e-5, 0.1, log=True)
    momentum = trial.suggest_float("momentum", 0.0, 0.98)
    last = trial.suggest_float("last", 0.01, 1, log=True)
    return {
        "lr": s.piecewise({0: lr, 30: lr * factor, 90: lr * factor * last}),
        "weight_decay": s.piecewise({0: 0.0, 45: decay}),
        "momentum": s.piecewise({0: 0.5, 60: momentum}),
    }


def wsd(trial: Any) -> dict[str, Any]:
    lr, length = trial.suggest_float("lr", 1e-3, 3, log=True), trial.suggest_int("length", 10, 90)
    momentum, decay = trial.suggest_float("momentum", 0.0, 0.98), trial.suggest_float("decay", 1e-5, 0.1, log=True)
    return {
        "lr": s.wsd(lr, STEPS, warmup=5, decay=length),
        "momentum": s.piecewise({0: 0.5, 20: momentum}),
        "weight_decay": s.piecewise({0: 0.0, 60: decay}),
    }


def flat(trial: Any) -> dict[str, Any]:
    end = trial.suggest_float("end", 1e-3, 1, log=True)
    return {
        "lr": s.exponential(trial.suggest_float("lr", 1e-3, 3, log=True), end ** (1 / STEPS)),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 0.1, log=True),
        "momentum": trial.suggest_float("momentum", 0.0, 0.98),
    }


SPACES: dict[str, Callable[[Any], dict[str, Any]]] = {"staged": staged, "wsd": wsd, "flat": flat}


def search(task: Task, space: Callable[[Any], dict[str, Any]], sampler: BaseSampler) -> tuple[list[float], float]:
    """The best error within each budget of trained steps, and the merge rate."""
    study = optuna.create_study(sampler=sampler)
    plan = SearchPlan(StateKey("0" * 32))
    best, within = 10.0, [10.0] * len(BUDGETS)
    for number in range(MOST_TRIALS):
        trial = study.ask()
        schedules = {name: s.as_schedule(value).until(STEPS) for name, value in space(trial).items()}
        added = TrialAdded(TrialId(str(number)), schedules, STEPS)
        plan.apply(added)
        plan.apply(TargetAsked(added.trial, STEPS))
        error = task.error(schedules)
        study.tell(trial, error)
        best = min(best, error)
        trained = merged(plan).steps_unique
        within = [best if trained <= budget * STEPS else w for budget, w in zip(BUDGETS, within, strict=True)]
        if trained >= BUDGETS[-1] * STEPS:
            break
    return within, merged(plan).steps_asked / merged(plan).steps_unique


def samplers(space: Callable[[Any], dict[str, Any]], seed: int) -> dict[str, tuple[BaseSampler, str]]:
    """By name: a sampler, and the one to compare it with."""
    known: dict[str, Any] = {"space": space, "steps": STEPS}
    found: dict[str, tuple[BaseSampler, str]] = {
        "TPE": (TPESampler(seed=seed), "TPE"),
        "stage tree of TPE": (StageTreeSampler(TPESampler(seed=seed), **known), "TPE"),
        "the same, in order": (StageTreeSampler(TPESampler(seed=seed)), "TPE"),
    }
    if space is staged:
        for radius in (0.05, 0.3):
            sampler = StageTreeSampler(TPESampler(seed=seed), radius=radius, **known)
            found[f"the same, radius {radius:g}"] = sampler, "TPE"
        found["random"] = RandomSampler(seed=seed), "random"
        found["stage tree of random"] = StageTreeSampler(RandomSampler(seed=seed), **known), "random"
    return found


def quartiles(values: list[float]) -> list[float]:
    return [float(q) for q in np.quantile(values, [0.25, 0.5, 0.75])]


def shown(values: list[float]) -> str:
    low, median, high = values
    return f"{median:.3g} [{low:.3g}, {high:.3g}]"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=list(SPACES))
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    figures: dict[str, Any] = {"seeds": options.seeds, "steps_trained": [budget * STEPS for budget in BUDGETS]}
    began = time.monotonic()
    columns = [f"{what} at {budget}" for what in ("error", "ratio") for budget in BUDGETS]
    for space in map(SPACES.__getitem__, options.spaces):
        print(f"\n{space.__name__}\n{'':<24} {'merge':<20} " + " ".join(f"{c:<22}" for c in columns) + " better")
        errors: dict[str, list[list[float]]] = {}
        merged: dict[str, list[float]] = {}
        against: dict[str, str] = {}
        for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
            task = Task(seed)
            for name, (sampler, base) in samplers(space, seed).items():
                within, rate = search(task, space, sampler)
                errors.setdefault(name, []).append(within)
                merged.setdefault(name, []).append(rate)
                against[name] = base
        figures[space.__name__] = {}
        for name, found in errors.items():
            mine, theirs = np.array(found), np.array(errors[against[name]])
            line = {
                "merge_rate": quartiles(merged[name]),
                "error": [quartiles(list(column)) for column in mine.T],
                "ratio": [quartiles(list(column)) for column in (mine / theirs).T],
                "better": [float(share) for share in (mine < theirs).mean(axis=0)],
            }
            figures[space.__name__][name] = line
            cells = [shown(value) for value in [*line["error"], *line["ratio"]]]
            better = " ".join(f"{share:.0%}" for share in line["better"])
            print(f"{name:<24} {shown(line['merge_rate']):<20} " + " ".join(f"{c:<22}" for c in cells) + f" {better}")
    figures["seconds"] = time.monotonic() - began
    print(f"\n{options.seeds} seeds, {figures['seconds']:.0f} s")
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
