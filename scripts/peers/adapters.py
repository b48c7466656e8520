"""One way to fine-tune the trials of ``bench_adapters.py``; the last line has its values and what it took.

``eager``, ``stacked`` and ``auto`` are hpstage's; ``loop`` trains one trial after the other, ``optuna`` in a pool of
processes, and ``peft`` all of them at a time, each as an adapter of one and the same model. A trial's order of samples
is its own in each way but hpstage's.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import adapter_task as task
import optuna
import torch

import hpstage
from hpstage.cluster import DaskExecutor
from hpstage.workloads.tuned_bert import TunedBert

Trained = tuple[dict[str, Any], float, float]
"""Params, value and seconds of a trial."""


def new_study() -> optuna.Study:
    return optuna.create_study(direction="minimize", sampler=optuna.samplers.GridSampler(task.GRID, seed=0))


def proposed(options: Any) -> list[tuple[optuna.Trial, dict[str, Any]]]:
    study = new_study()
    trials = [study.ask() for _ in range(options.trials)]
    return [(trial, task.schedules(options, trial)) for trial in trials]


class Steps:
    """A trial as an ordinary loop has it: its model and optimizer, and its batches."""

    def __init__(self, subject: TunedBert, data: Any, by_name: Mapping[str, Any], model: Any = None) -> None:
        self.subject, self.data, self.by_name = subject, data, by_name
        torch.manual_seed(0)
        subject.hp = first = task.values_at(by_name, 0)
        self.model = subject.model(first) if model is None else model
        self.optimizer = subject.optimizer(self.model, first)
        self.order: list[int] = []

    def train(self, step: int) -> None:
        values = task.values_at(self.by_name, step)
        if len(self.order) < values["batch_size"]:
            self.order = torch.randperm(len(self.data)).tolist()
        batch, self.order = self.order[: values["batch_size"]], self.order[values["batch_size"] :]
        for group in self.optimizer.param_groups:
            group["lr"] = values["lr"]
        self.subject.update(self.model, self.optimizer, self.data[batch])

    def value(self) -> float:
        with torch.no_grad():
            return self.subject.evaluate(self.model.eval())["loss"]


def trained(options: Any, params: dict[str, Any], by_name: Mapping[str, Any]) -> Trained:
    """Train one trial by an ordinary loop."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    subject = task.subject(options, options.part)
    trial = Steps(subject, subject.dataset(), by_name)
    for step in range(options.steps):
        trial.train(step)
    return params, trial.value(), time.perf_counter() - began


def loop(options: Any) -> list[Trained]:
    return [trained(options, trial.params, by_name) for trial, by_name in proposed(options)]


def optuna_pool(options: Any) -> list[Trained]:
    task.subject(options, options.part)  # writes the files
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(trained, options, trial.params, by_name) for trial, by_name in proposed(options)]
        return [future.result() for future in futures]


def peft(options: Any) -> list[Trained]:
    """Adapters of one model, which take turns: a step of each, in one process."""
    began = time.perf_counter()
    subject, trials = task.subject(options, options.part), proposed(options)
    data, model = subject.dataset(), None
    steps = []
    for number, (_, by_name) in enumerate(trials):
        if model is not None:
            model.add_adapter(str(number), model.peft_config["default"])
            model.set_adapter(str(number))
        steps.append(Steps(subject, data, by_name, model))
        model = steps[0].model
    names = ["default", *map(str, range(1, len(trials)))]
    for step in range(options.steps):
        for name, one in zip(names, steps, strict=True):
            model.set_adapter(name)
            one.train(step)
    found = []
    for name, (trial, _), one in zip(names, trials, steps, strict=True):
        model.set_adapter(name)
        found.append((trial.params, one.value(), 0.0))
    each = (time.perf_counter() - began) / len(found)
    return [(params, value, each) for params, value, _ in found]


def search(options: Any) -> tuple[list[Trained], dict[str, Any]]:
    study = new_study()
    result = hpstage.optimize(
        study,
        subject := task.subject(options, options.part, options.way, options.stacked),
        task.space_of(options),
        metric="loss",
        steps=options.steps,
        n_trials=options.trials,
        executor=DaskExecutor(n_workers=options.workers, gpus=0) if options.workers else hpstage.InlineExecutor(),
        store="store",
    )
    savings, times = result.savings, result.plan.step_times
    each = savings.worker_seconds / len(study.trials)
    files = {file: file.stat().st_size for file in Path("store").glob("checkpoints/**/*") if file.is_file()}
    parts = sum(size for file, size in files.items() if "pa" in file.parts)
    model = subject.model({"rank": 8, "alpha": 16})
    weights = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    return [(trial.params, trial.value, each) for trial in study.trials], {
        "at_a_time": 1 if times is None else times.best,
        "states": savings.kept,
        "state_bytes": (sum(files.values()) - parts) / savings.kept / (3 * weights),
        "part_bytes": parts,
        "base_bytes": sum(weight.nbytes for weight in model.parameters()) - weights,
        "merge_rate": savings.merge_rate,
    }


WAYS: dict[str, Callable[[Any], list[Trained]]] = {"loop": loop, "optuna": optuna_pool, "peft": peft}


def main() -> None:
    parser = task.parser(__doc__)
    parser.add_argument("--way", choices=[*WAYS, "eager", "stacked", "auto"], required=True)
    parser.add_argument("--part", choices=[*task.PARTS], required=True)
    parser.add_argument("--stacked", type=int, default=12, help="siblings as one at most")
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    found, more = (WAYS[options.way](options), {}) if options.way in WAYS else search(options)
    values = {json.dumps(params, sort_keys=True): value for params, value, _ in found}
    print(json.dumps({"worker_seconds": sum(seconds for *_, seconds in found), "values": values, **more}), flush=True)


if __name__ == "__main__":
    main()
