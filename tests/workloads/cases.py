"""Each workload in a size for tests, and the files that it reads, in the formats of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from hpstage import schedule as s
from hpstage.workloads import (
    bert,
    cifar,
    evolution,
    gpt,
    mobilenet,
    recommender,
    resnet,
    tree_lstm,
    tuned_bert,
    tuned_gpt,
    tuned_resnet,
    unet,
    wide_resnet,
)

STEPS = 6
Space = Callable[[optuna.Trial], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """A workload, made from the folder of files."""

    make: Callable[[Path], object]
    space: Space
    metric: str
    direction: str


def small(space: Callable[[optuna.Trial, int], Mapping[str, Any]]) -> Space:
    """Return a workload's space for trials of a few steps, and batches that the small files fill."""

    def made(trial: optuna.Trial) -> Mapping[str, Any]:
        found = space(trial, STEPS)
        return {**found, "batch_size": s.piecewise({0: 4, 3: 6})} if "batch_size" in found else found

    return made


STAGES = ((2, 8, 1, 2), (2, 8, 2, 1))
CASES = {
    "resnet": Case(
        lambda files: resnet.ResNet(str(files), depth=8, width=4), small(resnet.space), "accuracy", "maximize"
    ),
    "wide_resnet": Case(
        lambda files: wide_resnet.WideResNet(str(files), depth=10, width=2, base=4),
        small(wide_resnet.space),
        "accuracy",
        "maximize",
    ),
    "mobilenet": Case(
        lambda files: mobilenet.MobileNetV2(str(files), width=0.1, stages=STAGES),
        small(mobilenet.space),
        "accuracy",
        "maximize",
    ),
    "gpt": Case(
        lambda files: gpt.TrainGPT(str(files / "text.txt"), layers=1, heads=2, width=16, block=16),
        small(gpt.space),
        "loss",
        "minimize",
    ),
    "tree_lstm": Case(
        lambda files: tree_lstm.TreeLSTM(width=8, trees=20, depth=3), small(tree_lstm.space), "accuracy", "maximize"
    ),
    "recommender": Case(
        lambda files: recommender.Recommender(str(files / "u.data"), width=4, length=5),
        small(recommender.space),
        "error",
        "minimize",
    ),
    "bert": Case(
        lambda files: bert.Bert(str(files / "sentences.tsv"), layers=1, heads=2, width=16, length=8),
        small(bert.space),
        "eval_accuracy",
        "maximize",
    ),
    "tuned_gpt": Case(
        lambda files: tuned_gpt.TunedGPT(str(files / "text.txt"), layers=1, heads=2, width=16, block=16),
        small(tuned_gpt.space),
        "loss",
        "minimize",
    ),
    "tuned_bert": Case(
        lambda files: tuned_bert.TunedBert(
            str(files / "sentences.tsv"), part="peft", layers=2, heads=2, width=16, length=8
        ),
        small(tuned_bert.space),
        "loss",
        "minimize",
    ),
    "tuned_resnet": Case(
        lambda files: tuned_resnet.TunedResNet(str(files), part=1, depth=8, width=4),
        small(tuned_resnet.space),
        "accuracy",
        "maximize",
    ),
    "unet": Case(lambda files: unet.UNet(levels=1, width=4, images=8, size=16), small(unet.space), "dice", "maximize"),
    "evolution": Case(
        lambda files: evolution.Evolution(hidden=4, episodes=2, limit=50), small(evolution.space), "length", "maximize"
    ),
}


def write_files(folder: Path, images: int = 2) -> None:
    """Write what the workloads read: CIFAR-10's files of ``images`` records each, a text, ratings."""
    random = np.random.default_rng(0)
    for name in (*cifar.TRAINING, *cifar.TEST):
        records = random.integers(256, size=(images, cifar.RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(images) % 10
        records.tofile(folder / name)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    lines = [
        f"{user}\t{film}\t{1 + (user * film) % 5}\t{880_000_000 + 60 * second}"
        for second, (user, film) in enumerate(random.integers(1, 12, size=(60, 2)).tolist())
    ]
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven"]
    sentences = [f"{number % 2}\tthe number is {words[number % 8]}" for number in range(40)]
    (folder / "sentences.tsv").write_text("\n".join(sentences) + "\n")


def schedules_of(space: Space, seed: int = 0) -> Callable[[int], dict[str, Any]]:
    """Return the values by step of a trial that a random sampler draws."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    schedules = {name: s.as_schedule(value) for name, value in space(study.ask()).items()}
    return partial(_values, schedules)


def _values(schedules: Mapping[str, s.Schedule], step: int) -> dict[str, Any]:
    return {name: schedule.value(step) for name, schedule in schedules.items()}
