"""The stage tree as a widget of notebooks, in which a click trains a branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.testing.toys import Tape

pytest.importorskip("anywidget", reason="the extra notebooks is not installed")
pytest.importorskip("bokeh", reason="the extra dashboard is not installed")


@pytest.fixture
def result(tmp_path: Path) -> hpstage.Result:
    return hpstage.optimize(
        optuna.create_study(study_name="tape", sampler=optuna.samplers.GridSampler({"late": [2, 3]})),
        Tape(),
        lambda trial: {"a": s.piecewise({0: 1, 4: trial.suggest_categorical("late", [2, 3])}), "b": 1.0},
        metric="score",
        steps=8,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=tmp_path,
    )


def click(tree: Any, trial: str, at: object, values: str) -> list[str]:
    """Send what the frame sends; return the states that the notebook shows."""
    said: list[str] = []
    tree.observe(lambda change: said.append(change["new"]), "state")
    tree._handle_custom_msg({"trial": trial, "at": at, "values": values}, [])
    return said


@pytest.mark.ci
def test_a_click_on_the_stage_tree_trains_a_branch_and_updates_the_tree(result: hpstage.Result) -> None:
    tree = result.branching_tree(hpstage.InlineExecutor())
    before = tree.page
    said = click(tree, "tape/0", 4, "a=[5, 6], b=2.0")
    assert said[0] == "Training a branch of trial tape/0 at step 4: a=[5, 6], b=2.0"
    assert said[1].count("Trained: ") == 2 and "runs/" in said[1]
    assert tree.page != before
    opened = hpstage.open(result.store)
    runs = [trial for id, trial in opened.plan.trials.items() if opened.plan.study_of(id) == "runs"]
    assert [trial.schedules["a"].value(5) for trial in runs] == [5, 6]
    assert opened.plan.totals.steps_trained == 12 + 2 * 4


@pytest.mark.ci
@pytest.mark.parametrize(
    ("trial", "at", "values", "error"),
    [
        ("tape/0", 40, "a=5", "cannot be branched at step 40"),
        ("tape/0", 4, "c=5", "no hyperparameter 'c'"),
        ("tape/0", 4, "a=__import__('os').system('true')", "is no"),
        ("tape/0", 4, "a", "NAME=VALUE"),
        ("tape/0", "four", "a=5", "is not a step"),
        ("tape/9", 4, "a=5", "tape/9"),
    ],
)
def test_a_click_with_an_invalid_branch_shows_the_error_and_leaves_the_tree_unchanged(
    result: hpstage.Result, trial: str, at: object, values: str, error: str
) -> None:
    tree = result.branching_tree(hpstage.InlineExecutor())
    before = tree.page
    assert error in click(tree, trial, at, values)[-1]
    assert tree.page == before
