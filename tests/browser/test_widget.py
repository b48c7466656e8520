"""The widget of notebooks: what is clicked in the tree's frame reaches the kernel, and its answer is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.testing.toys import Tape
from tests.browser.conftest import Open

pytestmark = pytest.mark.ci

_NOTEBOOK = """<!doctype html><div id="cell"></div><script type="module">
const state = STATE, listeners = {}
window.sent = []
window.model = {
  get: (name) => state[name],
  set: (name, value) => { state[name] = value; (listeners[`change:${name}`] ?? []).forEach((call) => call()) },
  on: (name, call) => (listeners[name] ??= []).push(call),
  off: (name, call) => { listeners[name] = (listeners[name] ?? []).filter((one) => one !== call) },
  send: (content) => window.sent.push(content),
}
SOURCE
window.leave = widget.render({model: window.model, el: document.getElementById("cell")})
</script>"""
"""A page in place of a notebook, with what anywidget gives a widget."""


def test_a_branch_chosen_in_the_notebook_widget_is_trained(open_at: Open, tmp_path: Path) -> None:
    pytest.importorskip("anywidget", reason="the extra notebooks is not installed")
    result = hpstage.optimize(
        optuna.create_study(study_name="tape", sampler=optuna.samplers.GridSampler({"late": [2, 3]})),
        Tape(),
        lambda trial: {"a": s.piecewise({0: 1, 4: trial.suggest_categorical("late", [2, 3])}), "b": 1.0},
        metric="score",
        steps=8,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=tmp_path / "store",
    )
    tree: Any = result.branching_tree(hpstage.InlineExecutor())
    source = str(tree._esm).replace("export default", "const widget =")
    state = json.dumps({"page": tree.page, "height": tree.height, "state": ""}).replace("</", "<\\/")
    place = tmp_path / "notebook.html"
    place.write_text(_NOTEBOOK.replace("SOURCE", source).replace("STATE", state))
    page = open_at(place.as_uri())
    frame = page.frame_locator("iframe")
    search = frame.get_by_placeholder("Find")
    search.fill("trial 1")
    search.press("Enter")
    field = frame.get_by_label("Values of the branch")
    field.fill("a=7")
    frame.get_by_role("button", name="Train", exact=True).click()
    page.wait_for_function("() => window.sent.length == 1")
    [content] = page.evaluate("() => window.sent")
    assert content == {"trial": "tape/1", "at": "4", "values": "a=7"}

    page.evaluate("() => parent.postMessage({hpstage: 'branch', trial: 'x', at: 1, values: 'a=1'}, '*')")
    tree._handle_custom_msg(content, [])
    assert "Trained: " in tree.state
    page.evaluate("([page, state]) => { model.set('state', state); model.set('page', page) }", [tree.page, tree.state])
    page.get_by_text("Trained: ").wait_for()
    search = page.frame_locator("iframe").get_by_placeholder("Find")
    search.fill("trial runs/0")
    search.press("Enter")
    page.frame_locator("iframe").get_by_role("heading", name="runs/0").first.wait_for()
    assert len(page.evaluate("() => window.sent")) == 1, "only the frame is heeded"


def test_the_tree_on_a_static_page_has_no_train_button(open_at: Open, tmp_path: Path) -> None:
    from hpstage.report import open_book
    from hpstage.report.tree.embed import tree_page

    run = hpstage.train(
        Tape(), {"a": s.piecewise({0: 1, 4: 2}), "b": 1.0}, steps=8, metric="score", store=tmp_path / "store",
        executor=hpstage.InlineExecutor(),
    )  # fmt: skip
    assert run.metrics
    place = tmp_path / "tree.html"
    place.write_text(tree_page(open_book(tmp_path / "store")))
    page = open_at(place.as_uri())
    search = page.get_by_placeholder("Find")
    search.fill("trial 0")
    search.press("Enter")
    page.get_by_role("button", name="Copy").first.wait_for()
    assert not page.get_by_role("button", name="Train", exact=True).is_visible()
