"""The page on Dask's dashboard in a browser: what is drawn while a search runs, what failed, and hostile names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
import pytest
from distributed import Client, LocalCluster

import hpstage
from hpstage.accounting.branches import branches_of
from hpstage.cluster import local_cluster
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing
from tests.browser.conftest import Open, keep
from tests.browser.trees import Tree
from tests.dask.studies import Running, Steady, search

pytestmark = pytest.mark.browser

_NAME = "<img src=x onerror='window.harmed = true'> & <b>bold</b> </script> \N{GRINNING FACE} " + "long " * 40

# Out of Bokeh's documents: the plots' titles, and a column of all sources that have it.
_MODELS = "Bokeh.documents.flatMap(document => [...document._all_models.values()])"
_TITLES = f"() => {_MODELS}.filter(model => model.type == 'Title').map(model => model.text)"
_COLUMN = f"""name => {_MODELS}.filter(model => model.type == 'ColumnDataSource')
    .flatMap(source => [...(source.get_column(name) ?? [])])"""
# Keeps what the page says, from now on, since a sentence of a running search is soon another.
_LISTEN = f"""() => {{ window.said = []; setInterval(() => {{
    const text = {_MODELS}.filter(model => model.type == 'Div').map(model => model.text).join()
    if (window.said.at(-1) != text) window.said.push(text) }}, 200) }}"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2, gpus=0) as cluster:
        yield cluster


@pytest.fixture
def open_page(open_at: Open, cluster: LocalCluster) -> Callable[..., Any]:
    base = str(cluster.dashboard_link).rpartition("/")[0]

    def open_page(path: str, **options: Any) -> Any:
        page = open_at(base + path, base, **options)
        page.wait_for_function(f"() => ({_TITLES})().length > 0 || document.querySelector('.bk-Div')")
        return page

    return open_page


@pytest.mark.ci
def test_the_page_draws_a_running_search_as_it_progresses(
    cluster: LocalCluster, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page("/hpstage")
    tree = Tree(page, 0)
    page.evaluate(_LISTEN)
    with Client(cluster, set_as_default=False) as client:
        running = Running(Steady(tmp_path, 0.5), client, tmp_path)
        # Lines are as long as their trials from the beginning, and fill as they are trained.
        tree.wait("fig.below[0].bounds[1] == 16 && tree.running().length > 0")
        tree.wait("tree.shown().some(i => tree.about(i).front < tree.place(i).right)")
        page.wait_for_function(f"() => ({_COLUMN})('text').some(text => String(text).startsWith('study: step'))")
        assert not running.over
        keep(page, "running")
        result = running.result()
        tree.wait("tree.running().length == 0 && tree.order().every(i => tree.about(i).state == 'done')")
    page.get_by_text(f"{result.savings.steps_trained:,} steps trained").wait_for()
    assert page.get_by_text("12 of 12", exact=True).is_visible()
    page.wait_for_function("() => !window.said.at(-1).includes(' left')")
    said = page.evaluate("() => window.said")
    assert any(re.search(r"trials finished.*about \d+ s left", text, re.DOTALL) for text in said)
    assert tree.ask("tree.size().trials") == len(result.study.trials)
    branches = list(branches_of(result.plan.trials))
    assert tree.ask("tree.size().branches") == len(branches)
    tree.find(f"trial {result.best_trial.number}")
    tree.drawer.get_by_role("heading", name=f"Trial {result.best_trial.number}: complete").wait_for()
    keep(page, "ended")


@pytest.mark.ci
def test_each_panel_has_its_own_page_that_shows_the_study_named_in_the_url(
    cluster: LocalCluster, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    with Client(cluster, set_as_default=False) as client:
        for name, n_trials in (("first", 3), ("second", 5)):
            search(Steady(None), client, MemoryJournal(), tmp_path / name, name=name, n_trials=n_trials)
    for panel in ("tree", "workers", "savings", "metrics", "rungs", "summary", "failures"):
        keep(open_page(f"/individual-hpstage-{panel}?study=first"), panel)
    open_page("/individual-hpstage-summary?study=first").get_by_text("3 of 3", exact=True).wait_for()
    tree = Tree(open_page("/individual-hpstage-tree?study=first"), 3)
    assert tree.ask("tree.size().trials") == 3
    page = open_page("/hpstage?study=first")
    page.get_by_text("3 of 3", exact=True).wait_for()
    page.locator("select").select_option(label="second (ended)")
    page.get_by_text("5 of 5", exact=True).wait_for()
    Tree(page).wait("tree.size().trials == 5")
    page.wait_for_url("**/hpstage?study=second")


@pytest.mark.ci
def test_the_page_shows_a_failed_trial_with_its_traceback(
    cluster: LocalCluster, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": hpstage.schedule.piecewise({0: 1, 4: trial.suggest_categorical("a", [2, 7])})}

    study = optuna.create_study(study_name="failing", sampler=optuna.samplers.GridSampler({"a": [2, 7]}, seed=0))
    with Client(cluster, set_as_default=False) as client:
        hpstage.optimize(
            study, Failing(), space, metric="score", steps=8, n_trials=2, executor=client, store=tmp_path,
            catch=(Exception,), verify="off", show_progress_bar=False,
        )  # fmt: skip
    page = open_page("/hpstage?study=failing", width=390, height=844, has_touch=True, color_scheme="dark")
    page.get_by_text("1 trial failed").wait_for()
    page.get_by_text("ZeroDivisionError: the user's own error").first.wait_for()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390  # panels are stacked
    tree = Tree(page, 2)
    tree.wait("tree.shown().some(i => tree.about(i).failures)")
    [failed] = [i for i in tree.ask("tree.shown()") if tree.ask(f"tree.about({i}).failures")]
    tree.tap(failed)
    tree.drawer.locator("pre").wait_for()
    assert "Traceback" in tree.read("pre")[0]
    commands = tree.read("code")
    assert all(f" {tmp_path}" in command for command in commands)
    keep(page, "failed")


@pytest.mark.ci
def test_hostile_study_names_are_shown_as_text_on_the_page(
    cluster: LocalCluster, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    with Client(cluster, set_as_default=False) as client:
        search(Steady(None), client, MemoryJournal(), tmp_path / "states", name=_NAME, n_trials=4)
    page = open_page(f"/hpstage?study={quote(_NAME)}")
    page.get_by_text("4 of 4", exact=True).wait_for()
    options = page.locator("select option").all_text_contents()
    assert any(option.startswith(_NAME[:40]) and option.endswith("(ended)") for option in options)
    page.wait_for_function(f"() => ({_COLUMN})('trial').some(trial => trial.startsWith('<img'))")
    # The hint over the curve of a trial has the study's name in it.
    hint = page.locator(".bk-Tooltip").filter(has_text=_NAME[:40])
    curves = page.locator(".bk-Figure").nth(2)
    curves.scroll_into_view_if_needed()
    box = curves.bounding_box()
    for part in range(20, 160):
        if hint.count():
            break
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] * part / 200)
        page.wait_for_timeout(20)  # hints come with the next frame
    assert hint.count()
    tree = Tree(page, 4)
    tree.find("trial 0")
    tree.drawer.get_by_role("heading", name="Trial 0").wait_for()
    assert _NAME[:12] in tree.read("code")[-1]
    assert page.evaluate("() => window.harmed") is None
    assert page.locator("img[src=x]").count() == 0
    keep(page, "names")


@pytest.mark.ci
def test_the_page_reports_a_lost_connection_after_its_dask_scheduler_has_ended(browser: Any, tmp_path: Path) -> None:
    with local_cluster(1, gpus=0) as cluster:
        with Client(cluster, set_as_default=False) as client:
            search(Steady(None), client, MemoryJournal(), tmp_path / "states", name="last", n_trials=3)
        page = browser.new_context(color_scheme="dark").new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{str(cluster.dashboard_link).rpartition('/')[0]}/hpstage?study=last")
        page.get_by_text("3 of 3", exact=True).wait_for()
        assert not page.get_by_text("connection to the scheduler is lost").count()
    page.get_by_text("connection to the scheduler is lost").wait_for()
    assert page.get_by_text("3 of 3", exact=True).is_visible()
    keep(page, "lost")
    page.context.close()
