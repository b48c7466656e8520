"""The page on the Dask dashboard: what it shows is the fold of the journal, and it is served wherever there is one."""

from __future__ import annotations

import html
import itertools
import json
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from distributed import Client, LocalCluster

import hpstage
from hpstage import schedule as s
from hpstage.cluster.dashboard import install, page_of
from hpstage.cluster.dashboard.board import Board, PlanView
from hpstage.cluster.dashboard.follower import HANDLER, INSTALLED, NO_MORE
from hpstage.cluster.dashboard.plots import PLOTS, summary
from hpstage.cluster.dashboard.study import History, StudyView, curve
from hpstage.cluster.dashboard.tree import Tree, draw
from hpstage.cluster.dashboard.work import work_of
from hpstage.errors import HistoryChanged
from hpstage.store import Cursor, Journal, MemoryJournal
from hpstage.testing.toys import Failing, Tape
from tests.dask.commands import Command, free_port, until
from tests.dask.steady import Steady
from tests.dask.studies import Running, search

PAGES = [f"/individual-hpstage-{name}" for name in PLOTS]

# --- the fold -----------------------------------------------------------------------------------------------


def searched(
    name: str = "study", *, trainable: Tape | None = None, seed: int = 7, n_trials: int = 12
) -> tuple[hpstage.Result, MemoryJournal]:
    journal = MemoryJournal()
    return search(
        trainable or Tape(), hpstage.InlineExecutor(), journal, name=name, seed=seed, n_trials=n_trials
    ), journal


def board_of(journal: Journal, stop: int | None = None) -> Board:
    board = Board()
    board.offer("plan", 0, journal.read(0, stop))
    return board


def shown(board: Board, study: str = "study") -> tuple[PlanView, StudyView]:
    [view] = board.plans.values()
    assert not view.problem
    return view, view.studies[study]


def covered(board: Board) -> int:
    """Distinct steps that were trained."""
    [view] = board.plans.values()
    return sum(view.front(node.id) - node.start for node in view.plan.nodes)


def check(view: PlanView, study: StudyView, tree: Tree) -> None:
    """Each lane that is drawn is covered once from its start to its reach; nothing overlaps on a row."""
    lanes: dict[int, list[tuple[int, int]]] = {}
    rows: dict[int, list[tuple[int, int]]] = {}
    for piece in tree.pieces:
        lanes.setdefault(piece.node, []).append((piece.start, piece.stop))
        rows.setdefault(piece.row, []).append((piece.start, piece.stop))
        assert piece.trials == sum(
            any(node.id == piece.node for node, _, _ in trial.path_to(trial.asked))
            for id, trial in view.plan.trials.items()
            if id in study.trials
        )
    assert len(lanes) + tree.hidden == len(study.lanes)
    if not tree.hidden:
        assert Counter(piece.state for piece in tree.pieces) == +study.stages
    for node, pieces in lanes.items():
        lane = study.lanes[node]  # type: ignore[index]
        assert pieces[0][0] == lane.node.start and pieces[-1][1] == lane.reach
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(pieces))
    for pieces in rows.values():
        pieces.sort()
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(pieces))


def test_the_figures_are_those_of_the_result() -> None:
    result, journal = searched()
    view, study = shown(board_of(journal))
    savings = result.savings
    assert (study.totals.steps_asked, study.totals.steps_unique, study.totals.steps_trained) == (
        savings.steps_asked,
        savings.steps_unique,
        savings.steps_trained,
    )
    assert study.totals.merge_rate == savings.merge_rate
    assert study.totals.worker_seconds == pytest.approx(savings.worker_seconds)
    assert study.ended and not view.is_driven("study")
    [best] = study.best(1)
    assert best.value == result.best_value and best.trial == result.trial_id(result.best_trial.number)
    reported = result.best_trial.intermediate_values
    points = dict(curve(view.plan.trials[best.trial], "score", best.step))
    assert reported.items() <= points.items()
    assert {step: (rung.asked, rung.told) for step, rung in study.rungs.items()} == {
        step: (count, count)
        for step in {step for trial in result.study.trials for step in trial.intermediate_values}
        for count in [sum(step in trial.intermediate_values for trial in result.study.trials)]
    }


def test_what_it_saves_is_about_what_the_result_says() -> None:
    result, journal = searched(trainable=Steady(None, 0.001))
    view, study = shown(board_of(journal))
    # Seconds per step are estimated as results come, there at the end.
    assert study.totals.alone_seconds(view.plan.totals) == pytest.approx(result.savings.worker_seconds_alone, rel=0.5)


def test_a_tree_is_whole_at_every_moment_and_done_in_the_end() -> None:
    _, journal = searched()
    records = journal.read()
    board = Board()
    seen: set[str] = set()
    for position, record in enumerate(records):
        assert board.offer("plan", position, [record]) == position + 1
        view = board.plans["plan"]
        if "study" in view.studies:
            tree = draw(view, view.studies["study"])
            check(view, view.studies["study"], tree)
            states = {piece.state for piece in tree.pieces}
            assert ("running" in states) == any(
                view.plan.chains[id].reached is None or list(view.plan.chains[id].ahead()) for id in view.plan.chains
            )
            seen |= states
    assert seen == {"waiting", "ready", "running", "done"}
    assert {piece.state for piece in draw(*shown(board)).pieces} == {"done"}


def test_what_another_study_trained_is_told_apart() -> None:
    journal = MemoryJournal()
    search(Tape(), hpstage.InlineExecutor(), journal, name="first", seed=3)
    before = covered(board_of(journal))
    search(Tape(), hpstage.InlineExecutor(), journal, name="second", seed=4)
    board = board_of(journal)
    view, first = shown(board, "first")
    _, second = shown(board, "second")
    assert {piece.state for piece in draw(view, first).pieces} == {"done"}
    pieces = draw(view, second).pieces
    assert {piece.state for piece in pieces} == {"done", "reused"}
    check(view, second, draw(view, second))
    own = sum(piece.stop - piece.start for piece in pieces if piece.state == "done")
    assert own == covered(board) - before <= second.totals.steps_trained
    assert own < second.totals.steps_unique
    assert [found.study.name for found in board.studies()] == ["second", "first"]


def test_what_a_failure_puts_out_of_reach_is_failed() -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.piecewise({0: 1, 4: trial.suggest_categorical("a", [2, 7]), 8: trial.suggest_int("b", 1, 2)})}

    journal = MemoryJournal()
    grid = optuna.samplers.GridSampler({"a": [2, 7], "b": [1, 2]}, seed=0)
    study = optuna.create_study(study_name="study", direction="minimize", sampler=grid)
    hpstage.optimize(
        study, Failing(), space, metric="score", steps=12, n_trials=4, executor=hpstage.InlineExecutor(), store=journal
    )
    view, found = shown(board_of(journal))
    pieces = draw(view, found).pieces
    check(view, found, draw(view, found))
    bad = {piece.node for piece in pieces if piece.values == "a 7"}
    lost = bad | {lane.node.id for lane in found.lanes.values() if lane.node.parent and lane.node.parent.id in bad}
    assert len(bad) == 1 < len(lost)
    assert {(piece.node, piece.state) for piece in pieces if piece.node in lost} == {(node, "failed") for node in lost}
    assert {piece.state for piece in pieces if piece.node not in lost} == {"done"}
    assert "2 failed" in summary(board_of(journal).studies()[0])
    assert not found.maximize
    assert found.best(1)[0].value == study.best_value


def test_records_that_come_twice_or_too_early_do_no_harm() -> None:
    _, journal = searched()
    records = journal.read()
    board = Board()
    assert board.offer("plan", 5, records[5:9]) == 0  # a page that knows nothing wants all
    assert board.offer("plan", 0, records[:20]) == 20
    assert board.offer("plan", 10, records[10:30]) == 30
    assert board.offer("plan", 10, records[10:15]) == 30
    assert board.offer("plan", 40, records[40:]) == 30
    assert board.offer("plan", 30, records[30:]) == len(records)
    assert summary(board.studies()[0]) == summary(board_of(journal).studies()[0])


def test_a_page_that_has_folded_what_its_journal_lost_is_told_so_and_begins_anew() -> None:
    _, journal = searched()
    records = journal.read()
    board = Board()
    behind = Cursor(*board.take_in("plan", 0, records[:20]))
    behind = Cursor(*board.take_in("plan", 10, records[10:30]))
    assert journal.read_on(behind)[0] == records[30:]
    lost = MemoryJournal()
    lost.append(records[:12] + records[:1] * 30)
    with pytest.raises(HistoryChanged):
        lost.read_on(behind)
    assert board.take_in("plan", 0, records[:12], anew=True) == Cursor().after(records[:12])
    assert board.take_in("plan", 12, records[12:]) == Cursor().after(records)
    assert summary(board.studies()[0]) == summary(board_of(journal).studies()[0])


def test_a_plan_that_cannot_be_read_is_given_up_and_others_are_not() -> None:
    _, journal = searched()
    board = board_of(journal)
    records = journal.read()
    assert board.offer("other", 0, [*records[:30], b'{"type": "OfTomorrow"}']) == NO_MORE
    assert board.offer("other", 0, records) == NO_MORE
    assert "cannot be followed" in summary(next(found for found in board.studies() if found.view.problem))
    assert board.offer("plan", len(records), []) == len(records)


def test_a_large_tree_is_cut_down_to_what_most_trials_share_and_what_runs() -> None:
    journal = MemoryJournal()
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))
    hpstage.optimize(
        study,
        Tape(),
        lambda trial: {"a": s.piecewise({0: 1.0, 2: trial.suggest_int("b", 0, 5), 3: trial.suggest_float("c", 0, 1)})},
        metric="score",
        steps=4,
        n_trials=60,
        executor=hpstage.InlineExecutor(),
        store=journal,
    )
    last = max(i for i, record in enumerate(journal.read()) if b"ChainStarted" in record)
    view, found = shown(board_of(journal, last + 1))
    tree = draw(view, found, most=20)
    check(view, found, tree)
    drawn = {piece.node for piece in tree.pieces}
    running = {span.node for chain in view.plan.chains.values() for span in chain.ahead()}
    assert running and running <= drawn and len(drawn) <= 20 + 3
    assert tree.hidden == len(found.lanes) - len(drawn) > 30
    for node in drawn:
        parent = found.lanes[node].node.parent
        assert parent is None or parent.id in drawn


def test_a_long_history_is_thinned_evenly_and_keeps_its_ends() -> None:
    history = History()
    for i in range(10_000):
        history.add(float(i))
        assert history.points[-1] == (float(i),)
    steps = [b - a for (a,), (b,) in zip(history.points, history.points[1:], strict=False)]
    assert history.points[0] == (0.0,) and 300 < len(history.points) <= 800
    assert len(set(steps[:-1])) == 1


def test_a_worker_is_shown_at_what_it_trains(tmp_path: Path) -> None:
    _, journal = searched()
    records = journal.read()
    for position in [i for i, record in enumerate(records, 1) if b"ChainStarted" in record]:
        board = board_of(journal, position)
        [view] = board.plans.values()
        [pool] = {driver.pool for driver in view.plan.drivers.values()}
        [work] = work_of(board, pool, 0.0).values()  # just begun
        [chain] = view.plan.chains.values()
        first = chain.spans[0]
        assert (work.study, work.step, work.stop, work.done) == (
            "study", first.start, chain.spans[-1].stop, 0.0,
        )  # fmt: skip
        # As far as to the next boundary of nodes, however long nothing was heard.
        assert work_of(board, pool, 1e12)[chain.worker].step in (first.start, first.stop - 1)
        assert work_of(board, "elsewhere", 0.0) == {}


def test_names_of_users_are_no_html() -> None:
    journal = MemoryJournal()
    study = optuna.create_study(study_name="<script>alert(1)</script>", sampler=optuna.samplers.RandomSampler(seed=1))

    class Odd(Tape):
        def evaluate(self) -> dict[str, float]:
            return {"<i>&": self.score}

    hpstage.optimize(
        study, Odd(), lambda trial: {"a": 1}, metric="<i>&", steps=2, n_trials=1, store=journal,
        executor=hpstage.InlineExecutor(),
    )  # fmt: skip
    text = summary(board_of(journal).studies()[0])
    assert "&lt;i&gt;&amp;" in text and "<i>&" not in text


# --- the serving --------------------------------------------------------------------------------------------


def get(url: str) -> tuple[int, str]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.status, answer.read().decode()


def base(cluster: LocalCluster) -> str:
    return str(cluster.dashboard_link).rpartition("/")[0]


def look(dask_scheduler: Any) -> list[tuple[str, int, str]]:
    """What the page of a scheduler knows: study, position, summary."""
    board: Board = dask_scheduler.handlers[HANDLER].__self__
    return [(found.study.name, found.view.position, summary(found)) for found in board.studies()]


def forget(dask_scheduler: Any) -> None:
    """As if the scheduler had been started anew."""
    dask_scheduler.handlers[HANDLER].__self__.plans.clear()


def test_a_local_cluster_has_the_page_and_lists_the_plots(cluster: LocalCluster) -> None:
    status, text = get(base(cluster) + "/hpstage")
    assert status == 200 and '<a href="hpstage">hpstage</a>' in html.unescape(text)
    status, listed = get(base(cluster) + "/individual-plots.json")
    urls = set(json.loads(listed).values())
    assert set(PAGES) <= urls and "/individual-task-stream" in urls
    for page in PAGES:
        assert get(base(cluster) + page)[0] == 200
    status, text = get(base(cluster) + "/status")
    assert status == 200 and html.unescape(text).count('href="hpstage"') == 1


def test_a_search_is_on_the_page_when_it_is_over(client: Client, tmp_path: Path) -> None:
    journal = MemoryJournal()
    result = search(Steady(tmp_path), client, journal, tmp_path / "states", name="seen")
    [(_, position, text)] = [found for found in client.run_on_scheduler(look) if found[0] == "seen"]
    assert position == len(journal)
    assert f"{result.savings.steps_trained:,} trained" in text and "ended" in text


def test_who_watches_the_progress_is_told_where_the_page_is(
    cluster: LocalCluster, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search(Steady(tmp_path), client, MemoryJournal(), tmp_path / "states", show_progress_bar=True)
    first, second, third, *_ = capsys.readouterr().err.splitlines()
    assert first == "Setting up the workers"
    assert second.startswith("study: 0/")
    assert third == f"Watch it at {base(cluster)}/hpstage"


def test_a_page_that_has_forgotten_all_is_told_all_again(client: Client, tmp_path: Path) -> None:
    running = Running(Steady(tmp_path, 0.05), client, tmp_path)
    until(lambda: len(running.reached()) > 2, "states are reached")
    until(lambda: any(name == "study" for name, _, _ in client.run_on_scheduler(look)), "the search is shown")
    client.run_on_scheduler(forget)
    running.result()
    [(name, position, _)] = client.run_on_scheduler(look)
    assert (name, position) == ("study", len(running.journal))


def test_the_page_is_added_once_to_a_cluster_that_runs() -> None:
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


def test_the_command_serves_the_page_under_a_prefix_and_loads_what_is_configured(tmp_path: Path) -> None:
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
def test_a_scheduler_that_can_show_nothing_is_left_as_it_is(dashboard: bool, without: list[str]) -> None:
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
def test_a_scheduler_that_was_started_anew_shows_the_search_from_its_beginning(tmp_path: Path) -> None:
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
            assert client.run_on_scheduler(look)
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
