"""What every program of ``bench_peers.py`` trains: 48 trials of a small CNN on scikit-learn's digits.

A program takes the options of :func:`parse`, trains all of them in ``--workers`` processes with one thread each, and
prints what :func:`finish` does as its last line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GRID: dict[str, list[Any]] = {
    "lr": [0.1, 0.05, 0.02],
    "drop": [0.3, 0.5, 0.6, 0.8],
    "gamma": [0.1, 0.3],
    "late": [0, 1],
}
REDUCTION = 3


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--algorithm", choices=["full", "asha"], required=True)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--reports", type=int, default=1, help="of each trial; ASHA has those of its rungs")
    parser.add_argument("--idle", action="store_true", help="train nothing: report only")
    parser.add_argument("--fused", action="store_true", help="hpstage: sibling models trained as one, where it pays")
    parser.add_argument("--new-actors", action="store_true", help="Ray: an actor for each trial")
    return parser.parse_args(arguments)


def points(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    return found[: options.trials]


def milestones(point: Mapping[str, Any], steps: int) -> list[int]:
    return [round(point["drop"] * steps), *([round(0.9 * steps)] if point["late"] else [])]


def first_rung(steps: int) -> int:
    return max(1, steps // 27)


def reported_steps(options: argparse.Namespace) -> list[int]:
    if options.algorithm == "asha":
        rungs = [first_rung(options.steps)]
        while rungs[-1] * REDUCTION < options.steps:
            rungs.append(rungs[-1] * REDUCTION)
        return [*rungs, options.steps]
    return sorted({round(options.steps * (number + 1) / options.reports) for number in range(options.reports)})


Report = Callable[[dict[str, float]], bool]
"""Reports measured values and returns whether to continue."""


def train(point: Mapping[str, Any], options: argparse.Namespace, report: Report) -> dict[str, float]:
    """An ordinary loop. Returns the last measured values: accuracy, step, seconds since it began."""
    import torch  # here, since not every program's own process needs it
    from sklearn.datasets import load_digits
    from torch import nn

    began = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    count = 1437
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=point["lr"], momentum=0.9)
    drops, requested = milestones(point, options.steps), reported_steps(options)
    order, used, found = torch.randperm(count), 0, {}
    for step in range(1, options.steps + 1):
        if not options.idle:
            if used + options.batch > count:
                order, used = torch.randperm(count), 0
            batch = order[used : used + options.batch]
            used += options.batch
            if step - 1 in drops:
                for group in optimizer.param_groups:
                    group["lr"] *= point["gamma"]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if step in requested:
            with torch.no_grad():
                accuracy = 0.5 if options.idle else (model(x[count:]).argmax(1) == y[count:]).double().mean().item()
            found = {"accuracy": accuracy, "step": float(step), "seconds": time.perf_counter() - began}
            if not report(found):
                break
    return found


def finish(trials: Sequence[Mapping[str, float]], versions: Mapping[str, str], **more: float | None) -> None:
    """Print what a program has found: the last values of each of its trials."""
    found = {
        "steps": sum(trial["step"] for trial in trials),
        "worker_seconds": sum(trial["seconds"] for trial in trials),
        "best": max(trial["accuracy"] for trial in trials),
        "versions": dict(versions),
        **more,
    }
    print(json.dumps(found), flush=True)
