"""The stage tree among the plots of optuna-dashboard: what its server hands to the browser."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.errors import UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.optuna import save_stage_tree
from hpstage.optuna.saved_plots import STAGE_TREE
from hpstage.store import MemoryJournal

HOSTILE = "<b>$\\frac{$ &</b>"


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [10, 20, 30])
    return {"lr": s.multistep(0.1, milestones=[drop], gamma=0.1), HOSTILE: trial.suggest_categorical("x", [1, 2])}


def searched(folder: Path, metric: str = "value", *, n_trials: int = 12, value: float | None = None) -> hpstage.Result:
    study = optuna.create_study(
        study_name=HOSTILE,
        storage=JournalStorage(JournalFileBackend(str(folder / "optuna.log"))),
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        load_if_exists=True,
    )

    def measure(key: str, step: int) -> dict[str, float]:
        return {metric: int(key, 16) / 16 ** len(key) if value is None else value}

    return hpstage.optimize(
        study,
        object(),
        space,
        metric=metric,
        steps=40,
        n_trials=n_trials,
        algorithm=SuccessiveHalving(10, 2),
        executor=SimulatedExecutor(2, measure=measure),
        store=MemoryJournal(),
    )


def served(study: optuna.Study) -> dict[str, Any]:
    """The plots of a study as optuna-dashboard's server answers."""
    dashboard = pytest.importorskip("optuna_dashboard")
    environ: dict[str, Any] = {"PATH_INFO": f"/api/studies/{study._study_id}"}
    setup_testing_defaults(environ)
    statuses: list[str] = []
    body = dashboard.wsgi(study._storage)(environ, lambda status, headers, exc=None: statuses.append(status))
    answer = json.loads(b"".join(body))
    assert statuses == ["200 OK"]
    return {plot["id"]: json.loads(plot["graph_object"]) for plot in answer["plotly_graph_objects"]}


def test_the_dashboard_serves_the_tree_with_a_dot_for_each_evaluated_state(tmp_path: Path) -> None:
    result = searched(tmp_path)
    save_stage_tree(result)
    plot = served(result.study)[STAGE_TREE]
    dots = plot["data"][1]
    measured = [
        (step, state.metrics["value"])
        for node in result.plan.nodes
        for step, state in node.states.items()
        if state.metrics is not None
    ]
    assert sorted(zip(dots["x"], dots["marker"]["color"], strict=True)) == sorted(measured)
    lines = plot["data"][0]
    asked = {node.id for trial in result.plan.trials.values() for node, _, _ in trial.path_to(trial.asked)}
    assert lines["x"].count(None) == len(asked)


def test_saving_again_replaces_the_plot(tmp_path: Path) -> None:
    save_stage_tree(searched(tmp_path, n_trials=2))
    first = served(searched(tmp_path, n_trials=1).study)
    again = searched(tmp_path)
    save_stage_tree(again)
    second = served(again.study)
    assert first.keys() == second.keys() == {STAGE_TREE}
    assert first != second


def test_names_are_no_markup_of_plotly(tmp_path: Path) -> None:
    result = searched(tmp_path, metric=HOSTILE)
    save_stage_tree(result)
    plot = served(result.study)[STAGE_TREE]
    texts = [*plot["data"][1]["text"], plot["data"][1]["marker"]["colorbar"]["title"]["text"]]
    assert not any("<b>" in text or "$" in text for text in texts)
    assert all("&lt;b&gt;&#36;" in text for text in texts)


def test_values_that_are_no_numbers_have_no_dot(tmp_path: Path) -> None:
    result = searched(tmp_path, value=math.inf)
    save_stage_tree(result)
    assert served(result.study)[STAGE_TREE]["data"][1]["x"] == []


def test_without_optuna_dashboard_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = searched(tmp_path, n_trials=1)
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(UsageError, match=r"pip install \"hpstage\[optuna-dashboard\]\""):
        save_stage_tree(result)
