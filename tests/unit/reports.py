"""Searches to report on, and a reader of what a report says."""

from __future__ import annotations

import csv
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import optuna

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import Fact, StateKey
from hpstage.search.results.result import Result
from hpstage.store import Journal
from hpstage.store.memory import MemoryJournal
from tests.records import separated

HOSTILE = "<script>alert('x')</script> & $\\frac{$ 模型 \" ' \u202e"


def space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
    lr = trial.suggest_categorical("lr", [0.2, 0.1])
    first = trial.suggest_categorical("first", [4, 8, 20])
    grow = trial.suggest_categorical("grow", [6, 16])
    return {
        "lr": s.multistep(lr, milestones=[first, 24], gamma=trial.suggest_categorical("gamma", [0.1, 0.3])),
        "batch_size": s.piecewise({0: 64, grow: 128}),
    }


def search(
    journal: Journal | None = None,
    *,
    name: str = "study",
    n_trials: int = 24,
    metric: str = "value",
    seed: int = 0,
    load_seconds: float = 0.2,
    algorithm: Algorithm | None = None,
    extend: bool = False,
    study: optuna.Study | None = None,
    kept: set[StateKey] | None = None,
) -> Result:
    """A search on three simulated workers, where everything takes its time."""
    if study is None:
        sampler = optuna.samplers.RandomSampler(seed=seed)
        study = optuna.create_study(study_name=name, direction="maximize", sampler=sampler)
    return hpstage.optimize(
        study,
        object(),
        space,
        metric=metric,
        steps=32,
        n_trials=n_trials,
        algorithm=SuccessiveHalving(min_steps=8, reduction_factor=2) if algorithm is None else algorithm,
        executor=SimulatedExecutor(
            3,
            step_seconds=lambda hp: 0.1 * 64 / float(hp["batch_size"] or 1),
            evaluate_seconds=0.3,
            load_seconds=load_seconds,
            kept=kept,
            save_seconds=0.1,
            measure=lambda key, step: {metric: int(key, 16) / 16 ** len(key)},
        ),
        store=MemoryJournal() if journal is None else journal,
        extend=extend,
    )


def cut(journal: Journal, stop: int) -> MemoryJournal:
    """The journal as it was after so many facts."""
    before = MemoryJournal()
    before.append(separated(journal).read(0, stop))
    return before


def write(journal: Journal, *facts: Fact) -> None:
    journal.append([msgspec.json.encode(fact) for fact in facts])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Page(HTMLParser):
    """What a page loads, the tags that it has, its texts as they are read, and the rows of its tables."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self._cell = self._cell or tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._cell:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def row(self, name: str) -> list[str]:
        """The cells next to the one that reads ``name``."""
        return next(row[1:] for row in self.rows if row and row[0] == name)
