"""The page in a headless browser: what is drawn while a search runs, and that names of users stay texts.

``HPSTAGE_SCREENSHOTS=FOLDER`` keeps pictures of it, to be looked at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from hpstage.cluster import local_cluster
from hpstage.store import MemoryJournal
from tests.dask.studies import Running, Steady, search

pytestmark = pytest.mark.browser

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_NAME = "<img src=x onerror='window.harmed = true'> & <b>bold</b>"
_PLOTS = ("Stage tree", "Workers", "Metric", "Savings", "Rungs")

# Out of Bokeh's documents: the plots' titles, and a column of all sources that have it.
_MODELS = "Bokeh.documents.flatMap(document => [...document._all_models.values()])"
_TITLES = f"() => {_MODELS}.filter(model => model.type == 'Title').map(model => model.text)"
_COLUMN = f"""name => {_MODELS}.filter(model => model.type == 'ColumnDataSource')
    .flatMap(source => [...(source.get_column(name) ?? [])])"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(_BROWSERS)} is installed")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, headless=True, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2, gpus=0) as cluster:
        yield cluster


@pytest.fixture
def open_page(browser: Any, cluster: LocalCluster) -> Iterator[Callable[[str], Any]]:
    """Opens a page of the dashboard; at the end none may have raised, or have asked for what is elsewhere."""
    problems: list[str] = []
    base = str(cluster.dashboard_link).rpartition("/")[0]
    own = (base, "data:", "blob:")
    context = browser.new_context(viewport={"width": 1400, "height": 950})

    def open_page(path: str) -> Any:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        page.on("request", lambda asked: None if asked.url.startswith(own) else problems.append(asked.url))
        page.goto(base + path)
        page.wait_for_function(f"() => ({_TITLES})().length > 0 || document.querySelector('.bk-Div')", timeout=20_000)
        return page

    yield open_page
    context.close()
    assert not problems


def keep(page: Any, name: str) -> None:
    folder = os.environ.get("HPSTAGE_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def test_a_running_search_is_drawn_as_it_goes_on(
    cluster: LocalCluster, open_page: Callable[[str], Any], tmp_path: Path
) -> None:
    page = open_page("/hpstage")
    with Client(cluster, set_as_default=False) as client:
        running = Running(Steady(tmp_path, 0.1), client, tmp_path)
        page.wait_for_function(
            f"() => ['running', 'done'].every(state => ({_COLUMN})('state').includes(state))",
            timeout=30_000,
        )
        assert not running.over
        keep(page, "running")
        page.wait_for_function(f"() => ({_COLUMN})('text').some(text => text.startsWith('study: step'))")
        result = running.result()
        page.get_by_text("ended", exact=True).wait_for(timeout=20_000)
        page.wait_for_function(f"() => ({_COLUMN})('state').every(state => state == 'done')")
    titles = page.evaluate(_TITLES)
    assert {plot for plot in _PLOTS for title in titles if title.startswith(plot)} == set(_PLOTS)
    asked = [node for node in result.plan.nodes if node.reach > node.start]
    assert f"Stage tree: {len(result.study.trials)} trials in {len(asked)} nodes" in titles
    assert page.get_by_text(f"{result.savings.steps_trained:,} trained").is_visible()
    keep(page, "ended")


def test_each_plot_stands_alone(open_page: Callable[[str], Any]) -> None:
    for plot in ("tree", "workers", "savings", "metrics", "rungs", "summary"):
        keep(open_page(f"/individual-hpstage-{plot}"), plot)


def test_names_of_users_stay_texts(cluster: LocalCluster, open_page: Callable[[str], Any], tmp_path: Path) -> None:
    with Client(cluster, set_as_default=False) as client:
        search(Steady(None), client, MemoryJournal(), tmp_path / "states", name=_NAME, n_trials=4)
    page = open_page("/hpstage")
    page.get_by_text("ended", exact=True).wait_for(timeout=20_000)
    options = page.locator("select option")
    labels = options.all_text_contents()
    assert f"{_NAME} (ended)" in labels
    page.locator("select").select_option(label=f"{_NAME} (ended)")
    page.wait_for_function(f"() => ({_COLUMN})('trial').some(trial => trial.startsWith('<img'))")
    # The hint over the curve of a trial has the study's name in it.
    hint = page.locator(".bk-Tooltip").filter(has_text=_NAME)
    box = page.locator(".bk-Figure").nth(2).bounding_box()
    for part in range(20, 160):
        if hint.count():
            break
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] * part / 200)
        page.wait_for_timeout(20)  # hints come with the next frame
    assert hint.count()
    assert page.evaluate("() => window.harmed") is None
    assert page.locator("img[src=x]").count() == 0
    keep(page, "names")
