"""The page on real schedulers: where it is served, what it is sent while a search runs, and GPUs' figures."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from bokeh.document import Document
from distributed import Client, LocalCluster
from distributed.diagnostics import nvml

from hpstage.cluster.dashboard import install, page_of
from hpstage.cluster.dashboard.board import Board
from hpstage.cluster.dashboard.figures import Workers
from hpstage.cluster.dashboard.follower import HANDLER, INSTALLED
from hpstage.cluster.dashboard.page import PANELS
from hpstage.cluster.dashboard.tiles import summary_html
from hpstage.search.progress.progress import TimeLeft
from hpstage.store import MemoryJournal
from tests.dask.commands import Command, free_port, until
from tests.dask.steady import Steady
from tests.dask.studies import Running, search

pytestmark = pytest.mark.sampled(4)

PAGES = [f"/individual-hpstage-{name}" for name in PANELS]


def get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.status, answer.read().decode()


def base(cluster: LocalCluster) -> str:
    return str(cluster.dashboard_link).rpartition("/")[0]


def look(dask_scheduler: Any) -> list[tuple[str, int, str]]:
    """What the page of a scheduler knows: study, position, summary."""
    board: Board = dask_scheduler.handlers[HANDLER].__self__
    now = time.monotonic()
    return [
        (found.study.name, found.view.position, summary_html(found, found.seconds_left(now)))
        for found in board.studies()
    ]


def forget(dask_scheduler: Any) -> None:
    """As if the scheduler had been restarted."""
    dask_scheduler.handlers[HANDLER].__self__.plans.clear()


def is_watched(dask_scheduler: Any) -> bool:
    board: Board = dask_scheduler.handlers[HANDLER].__self__
    return board.is_watched


@pytest.mark.ci
def test_a_local_cluster_serves_the_hpstage_page_and_lists_its_plots(cluster: LocalCluster) -> None:
    status, text = get(base(cluster) + "/hpstage")
    assert status == 200 and '<a href="hpstage">hpstage</a>' in html.unescape(text)
    status, listed = get(base(cluster) + "/individual-plots.json")
    urls = set(json.loads(listed).values())
    assert set(PAGES) <= urls and "/individual-task-stream" in urls
    for page in PAGES:
        assert get(base(cluster) + page)[0] == 200
    status, text = get(base(cluster) + "/status")
    assert status == 200 and html.unescape(text).count('href="hpstage"') == 1


@pytest.mark.ci
def test_the_page_shows_a_finished_search(client: Client, tmp_path: Path) -> None:
    journal = MemoryJournal()
    result = search(Steady(tmp_path), client, journal, tmp_path / "states", name="seen")
    [(_, position, text)] = [found for found in client.run_on_scheduler(look) if found[0] == "seen"]
    assert position == len(journal)
    assert f"{result.savings.steps_trained:,} steps trained" in text and "ended" in text


@pytest.mark.ci
def test_the_page_of_a_running_search_shows_the_time_left_that_its_driver_estimates(
    cluster: LocalCluster, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates: list[tuple[float, float | None]] = []  # when a search will end, by its driver

    class Noted(TimeLeft):
        def at(self, *state: Any) -> float | None:
            left = super().at(*state)
            estimates.append((time.monotonic(), left))
            return left

    monkeypatch.setattr("hpstage.search.progress.progress.TimeLeft", Noted)
    get(base(cluster) + "/status")  # builds the dashboard
    until(lambda: not client.run_on_scheduler(is_watched), "pages of other tests are closed")
    running = Running(Steady(tmp_path, 0.4), client, tmp_path, name="looked at")  # other tests' have the usual name
    until(lambda: len(running.reached()) > 2, "states are reached")
    assert not estimates  # nobody looks
    assert get(base(cluster) + "/hpstage?study=looked%20at")[0] == 200

    def sentence() -> str:
        [text] = [text for name, _, text in client.run_on_scheduler(look) if name == "looked at"]
        return text

    until(lambda: running.over or re.search(r"about \d+ s left", sentence()), "the time left is shown")
    found, seen = re.search(r"about (\d+) s left", sentence()), time.monotonic()
    assert found is not None and not running.over
    ends = [at + left for at, left in estimates if left is not None]
    assert min(ends) - 2 < seen + float(found[1]) < max(ends) + 2
    running.result()
    assert "ended" in sentence() and " left" not in sentence()


@pytest.mark.ci
def test_the_progress_bar_prints_the_url_of_the_page(
    cluster: LocalCluster, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search(Steady(tmp_path), client, MemoryJournal(), tmp_path / "states", show_progress_bar=True)
    first, second, third, *_ = capsys.readouterr().err.splitlines()
    assert first == "Setting up the workers"
    assert second == f"Watch it at {base(cluster)}/hpstage"
    assert third.startswith("study: 0/")


@pytest.mark.ci
def test_the_driver_sends_its_plan_again_to_a_scheduler_that_lost_the_plan(client: Client, tmp_path: Path) -> None:
    running = Running(Steady(tmp_path, 0.05), client, tmp_path)
    until(lambda: len(running.reached()) > 2, "states are reached")
    until(lambda: any(name == "study" for name, _, _ in client.run_on_scheduler(look)), "the search is shown")
    client.run_on_scheduler(forget)
    running.result()
    [(name, position, _)] = client.run_on_scheduler(look)
    assert (name, position) == ("study", len(running.journal))


def gpus(dask_scheduler: Any) -> list[str]:
    """What is written of each worker's GPU."""
    panel = Workers(dask_scheduler.handlers[HANDLER].__self__, dask_scheduler, Document())
    panel.show(None, time.time())
    return list(panel.source.data["gpu"])


@pytest.mark.parametrize("present", [True, False])
def test_the_page_shows_gpu_utilization_and_memory_as_dasks_monitor_reports_them(
    present: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where there is no GPU, its driver's answers stand for one: all else is Dask's own monitor and heartbeat.
    monkeypatch.setattr(nvml, "device_get_count", lambda: int(present))
    monkeypatch.setattr(nvml, "one_time", lambda: {"memory-total": 85_899_345_920, "name": "NVIDIA H100"})
    monkeypatch.setattr(nvml, "real_time", lambda: {"utilization": 87, "memory-used": 12_500_000_000})
    with (
        LocalCluster(n_workers=2, processes=False, memory_limit=0, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert install(client)
        client.wait_for_workers(2, timeout=60)
        expected = "GPU 87 %, 12.5 GB of 85.9 GB" if present else ""
        until(lambda: client.run_on_scheduler(gpus) == [expected, expected], "workers report their GPUs")


@pytest.mark.ci
def test_the_page_is_added_to_a_running_cluster_only_once() -> None:
    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        with pytest.raises(urllib.error.HTTPError):
            get(base(cluster) + "/hpstage")
        assert client.get_metadata([INSTALLED], False) is False
        assert page_of(client) is None
        assert install(client) is install(client) is True
        assert page_of(client) == base(cluster) + "/hpstage"
        assert get(base(cluster) + "/hpstage")[0] == 200
        listed = json.loads(get(base(cluster) + "/individual-plots.json")[1])
        assert set(PAGES) <= set(listed.values()) and "/individual-task-stream" in listed.values()
        assert html.unescape(get(base(cluster) + "/status")[1]).count('href="hpstage"') == 1


def test_the_scheduler_command_serves_the_page_under_a_prefix_and_loads_dask_preloads(tmp_path: Path) -> None:
    (tmp_path / "configured.py").write_text("print('the module of the configuration is loaded', flush=True)")
    port = free_port()
    words = ["--port", str(free_port()), "--host", "127.0.0.1", "--dashboard-address", f"127.0.0.1:{port}"]
    log = tmp_path / "logs"
    log.mkdir()
    scheduler = Command(
        log, "scheduler", *words, "--dashboard-prefix", "/pre",
        DASK_DISTRIBUTED__SCHEDULER__PRELOAD=str(tmp_path / "configured.py"),
    )  # fmt: skip
    try:
        scheduler.says("dashboard at")
        scheduler.says("the module of the configuration is loaded")
        place = f"http://127.0.0.1:{port}/pre"

        def served() -> bool:
            try:
                return get(place + "/hpstage")[0] == 200
            except urllib.error.URLError:
                return False

        until(served, "the page is served")
        assert "/pre/individual-hpstage-tree" in get(place + "/individual-plots.json")[1] or set(PAGES) <= set(
            json.loads(get(place + "/individual-plots.json")[1]).values()
        )
    finally:
        scheduler.stop()


@pytest.mark.parametrize(
    ("dashboard", "without"), [(False, ["prometheus_client"]), (True, ["bokeh", "prometheus_client"])]
)
@pytest.mark.ci
def test_no_page_is_installed_on_a_scheduler_without_dashboard_or_bokeh(dashboard: bool, without: list[str]) -> None:
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({without}))\n"
        "from distributed import Client, LocalCluster\n"
        "from hpstage.cluster.dashboard import install\n"
        f"kwargs = {{'dashboard': {dashboard}}}\n"
        "with LocalCluster(n_workers=0, processes=False, dashboard_address=':0', scheduler_kwargs=kwargs) as cluster:\n"
        "    with Client(cluster) as client:\n"
        "        assert install(client) is False\n"
        "        assert client.get_metadata(['hpstage-dashboard'], False) is False\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_restarted_scheduler_shows_the_search_from_its_beginning(tmp_path: Path) -> None:
    logs, files = tmp_path / "logs", tmp_path / "files"
    logs.mkdir(), files.mkdir()
    port = free_port()
    words = ["scheduler", "--host", "127.0.0.1", "--port", str(port), "--dashboard-address", f"127.0.0.1:{free_port()}"]
    address = f"tcp://127.0.0.1:{port}"
    started = [
        Command(logs, *words),
        Command(logs, "worker", address, "--nworkers", "2", "--gpus", "0", "--local-directory", str(files)),
    ]
    try:
        with Client(address, set_as_default=False, timeout=30) as client:
            running = Running(Steady(files, 0.1), client, tmp_path)
            until(lambda: len(running.reached()) > 2, "states are reached")
            until(lambda: client.run_on_scheduler(look), "the page has the search")
            started[0].process.kill()
            started[0].process.wait()
        started.append(Command(logs, *words))
        running.result()
        with Client(address, set_as_default=False, timeout=30) as client:
            [(_, position, text)] = client.run_on_scheduler(look)
        assert position == len(running.journal) and "ended" in text
    finally:
        for command in reversed(started):
            if command.process.poll() is None:
                command.stop()
