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
from hpstage.accounting.book import open_book
from hpstage.algos import SuccessiveHalving
from hpstage.errors import UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.optuna import save_stage_tree
from hpstage.optuna.saved_plots import STAGE_TREE
from hpstage.report.tree.layout import lay_out
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


def dots(plot: dict[str, Any]) -> dict[str, Any]:
    [found] = [trace for trace in plot["data"] if trace["mode"] == "markers" and "colorscale" in trace["marker"]]
    return found


def test_optuna_dashboard_serves_a_line_for_each_branch_and_a_dot_for_each_evaluated_state(
    tmp_path: Path,
) -> None:
    result = searched(tmp_path)
    save_stage_tree(result)
    plot = served(result.study)[STAGE_TREE]
    measured = [
        (step, f"{state.metrics['value']:.6g}")
        for node in result.plan.nodes
        for step, state in node.states.items()
        if state.metrics is not None
    ]
    found = dots(plot)
    numbers = [text.partition("<br>")[0].rpartition(" ")[2] for text in found["text"]]
    assert sorted(zip(found["x"], numbers, strict=True)) == sorted(measured)
    layout = lay_out(open_book(result))
    placed = layout.fitted()
    ends = [(b.branch.node.start, b.branch.reach, placed.rows[i]) for i, b in enumerate(layout.branches)]
    lines = [(*trace["x"], trace["y"][0]) for trace in plot["data"] if trace["mode"] == "lines"]
    assert set(ends) <= set(lines)


def test_hover_texts_of_the_saved_stage_tree_name_all_trials(tmp_path: Path) -> None:
    result = searched(tmp_path, n_trials=4)
    save_stage_tree(result)
    texts = "<br>".join(dots(served(result.study)[STAGE_TREE])["text"]).split("<br>")
    named = {name for text in texts if text.startswith("trial") for name in text.split(" ", 1)[1].split(", ")}
    assert named == {"0", "1", "2", "3"}


def test_the_saved_stage_tree_has_a_transparent_background(tmp_path: Path) -> None:
    result = searched(tmp_path, n_trials=1)
    save_stage_tree(result)
    layout = served(result.study)[STAGE_TREE]["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == layout["modebar"]["bgcolor"] == "rgba(0,0,0,0)"


def test_saving_the_stage_tree_again_replaces_the_saved_plot(tmp_path: Path) -> None:
    save_stage_tree(searched(tmp_path, n_trials=2))
    first = served(searched(tmp_path, n_trials=1).study)
    again = searched(tmp_path)
    save_stage_tree(again)
    second = served(again.study)
    assert first.keys() == second.keys() == {STAGE_TREE}
    assert first != second


def test_names_in_the_saved_stage_tree_are_escaped_for_plotly(tmp_path: Path) -> None:
    result = searched(tmp_path, metric=HOSTILE)
    save_stage_tree(result)
    plot = served(result.study)[STAGE_TREE]
    labels = [*dots(plot)["text"], dots(plot)["marker"]["colorbar"]["title"]["text"]]
    assert all("&lt;b&gt;&#36;" in text for text in labels)
    written = [text for trace in plot["data"] if trace["mode"] == "text" for text in trace["text"]]
    assert any("&lt;b&gt;&#36;" in text for text in written)
    assert not any("<b>" in text or "$" in text for text in labels + written)


def test_states_with_infinite_values_have_no_dot_in_the_saved_stage_tree(tmp_path: Path) -> None:
    result = searched(tmp_path, value=math.inf)
    save_stage_tree(result)
    assert dots(served(result.study)[STAGE_TREE])["x"] == []


def test_saving_the_stage_tree_without_optuna_dashboard_raises_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = searched(tmp_path, n_trials=1)
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    with pytest.raises(UsageError, match=r"pip install \"hpstage\[optuna-dashboard\]\""):
        save_stage_tree(result)
