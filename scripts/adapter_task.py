"""What ``bench_adapters.py`` trains: 24 trials of a BERT on made-up sentences, of which a part is fine-tuned."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import torch

from hpstage.schedule import Schedule, as_schedule
from hpstage.workloads.fine_tuning import Part, space
from hpstage.workloads.tuned_bert import TunedBert

GRID: dict[str, list[Any]] = {
    "lr": [3e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4],
    "weight_decay": [0.1, 0.01],
    "decay_percent": [20, 60],
}
"""That of the workload's ``space``."""
PARTS: dict[str, Part] = {"last layer": 0, "top third": -1, "LoRA by hand": "lora", "LoRA by PEFT": "peft"}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that programs and the benchmark have in common."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(made)
    return made


def add_sizes(made: argparse.ArgumentParser) -> None:
    for name, default in {
        "steps": 200,
        "trials": 24,
        "batch": 16,
        "layers": 6,
        "width": 128,
        "length": 32,
        "workers": 2,
    }.items():
        made.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")


def sizes(options: argparse.Namespace) -> list[str]:
    names = ("steps", "trials", "batch", "layers", "width", "length", "workers")
    return [f"--{name}={getattr(options, name)}" for name in names]


def subject(options: argparse.Namespace, part: str, numerics: str = "eager", stacked: int = 1) -> TunedBert:
    """Return the trainable; the files that it reads are written here, unless they are there."""
    sentences, base = Path("sentences.tsv").absolute(), Path("base.pt").absolute()
    if not sentences.exists():
        draw = random.Random(0)
        words = [f"w{number}" for number in range(200)]
        lines = (" ".join(draw.choices(words, k=options.length)) for _ in range(600))
        sentences.write_text("\n".join(f"{'ab'[line < 'w5']}\t{line}" for line in lines))
    number = max(1, options.layers // 3) if PARTS[part] == -1 else PARTS[part]
    made = TunedBert(
        str(sentences),
        part=number,
        layers=options.layers,
        width=options.width,
        length=options.length,
        dropout=options.dropout,
    )
    if not base.exists():
        torch.manual_seed(1)
        torch.save(made.whole().state_dict(), base)
    made.base, made.device, made.numerics, made.max_stacked = str(base), "cpu", numerics, stacked  # type: ignore[assignment]
    return made


def space_of(options: argparse.Namespace) -> Any:
    def of_trial(trial: optuna.Trial) -> dict[str, Any]:
        return {**space(trial, options.steps), "batch_size": options.batch}

    return of_trial


def schedules(options: argparse.Namespace, trial: Any) -> dict[str, Schedule]:
    return {name: as_schedule(value) for name, value in space_of(options)(trial).items()}


def values_at(by_name: Mapping[str, Schedule], step: int) -> dict[str, Any]:
    return {name: schedule.value(step) for name, schedule in by_name.items()}
