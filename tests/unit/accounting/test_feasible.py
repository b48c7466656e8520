"""The best trial is a feasible one, wherever it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage.accounting.account import new_account
from hpstage.accounting.book import Book
from hpstage.accounting.studies import study_rows
from hpstage.cluster.dashboard.board import Board
from hpstage.execution.inline import InlineExecutor
from hpstage.report.page import best_first
from hpstage.store import SQLiteJournal


class Sized:
    version = "1"

    def setup(self, hp: Mapping[str, float]) -> None:
        self.size = hp["size"]

    def train(self, step: int, hp: Mapping[str, float]) -> None:
        pass

    def evaluate(self) -> dict[str, float]:
        return {"value": self.size, "cost": -self.size}

    def state_dict(self) -> dict[str, float]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.size = state["size"]


def searched(folder: Path, metrics: list[str]) -> Book:
    """A search of sizes 1, 2 and 3, of which the largest is not feasible."""
    sampler = optuna.samplers.GridSampler({"size": [1.0, 2.0, 3.0]}, seed=0)
    hpstage.optimize(
        optuna.create_study(directions=["maximize"] * len(metrics), study_name="sizes", sampler=sampler),
        Sized(),
        lambda trial: {"size": trial.suggest_categorical("size", [1.0, 2.0, 3.0])},
        metric=metrics,
        steps=1,
        executor=InlineExecutor(),
        store=folder,
        constraints=lambda measured: {"size": measured["value"] - 2.5},
    )
    account = new_account(journal := SQLiteJournal(folder / "plan.sqlite", read_only=True))
    account.catch_up(journal)
    return Book(account, "sizes")


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_best_trial_is_feasible_in_store_report_and_dashboard(tmp_path: Path) -> None:
    book = searched(tmp_path, ["value"])
    stored = hpstage.open(tmp_path).best_trial()
    assert book.values[stored.id] == (2.0,) and len(book.values) == 3
    assert book.best == stored.id
    assert [book.values[group[0]][0] for group in best_first(book)] == [2.0, 1.0, 3.0]
    (row,) = study_rows(book, lambda study: False)
    assert [best.trial for best in row.best] == [stored.id]
    board = Board()
    board.offer("plan", 0, SQLiteJournal(tmp_path / "plan.sqlite", read_only=True).read())
    (view,) = board.plans.values()
    assert [result.value for result in view.studies["sizes"].standings.best(3)] == [2.0, 1.0, 3.0]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_pareto_front_has_only_feasible_trials(tmp_path: Path) -> None:
    book = searched(tmp_path, ["value", "cost"])
    assert sorted(book.values[id][0] for id in book.front) == [1.0, 2.0]
