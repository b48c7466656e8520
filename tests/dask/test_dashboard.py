"""The page on the Dask dashboard: what it shows is the fold of the journal."""

from __future__ import annotations

import html
import itertools
import json
from collections import Counter
from pathlib import Path

import optuna
import pytest
from bokeh.document import Document
from msgspec import structs

import hpstage
from hpstage import schedule as s
from hpstage.accounting.branch_states import cut, running
from hpstage.cluster.dashboard.board import Board, PlanView, Shown
from hpstage.cluster.dashboard.feed import Feed
from hpstage.cluster.dashboard.figures import Metrics
from hpstage.cluster.dashboard.follower import NO_MORE, OLD
from hpstage.cluster.dashboard.panels import around, nice
from hpstage.cluster.dashboard.study import Changes, StudyView, TimeSeries, curve
from hpstage.cluster.dashboard.tiles import failures_html, summary_html, tiles
from hpstage.cluster.dashboard.work import work_of
from hpstage.errors import HistoryChanged
from hpstage.errors.text import rate
from hpstage.report.tree.rows import ROOT, Rows
from hpstage.store import Cursor, Journal, MemoryJournal
from hpstage.testing.toys import Failing, Tape
from tests.dask.steady import Steady
from tests.dask.studies import search
from tests.records import separated

pytestmark = pytest.mark.sampled(4)

# --- the fold -----------------------------------------------------------------------------------------------


def searched(
    name: str = "study", *, trainable: Tape | None = None, seed: int = 7, n_trials: int = 12
) -> tuple[hpstage.Result, MemoryJournal]:
    journal = MemoryJournal()
    result = search(trainable or Tape(), hpstage.InlineExecutor(), journal, name=name, seed=seed, n_trials=n_trials)
    return result, separated(journal)


def board_of(journal: Journal, stop: int | None = None) -> Board:
    board = Board()
    board.offer("plan", 0, journal.read(0, stop))
    return board


def cursor(answer: tuple[int, bytes, bool]) -> Cursor:
    return Cursor(*answer[:2])


def shown(board: Board, study: str = "study") -> tuple[PlanView, StudyView]:
    [view] = board.plans.values()
    assert not view.problem
    return view, view.studies[study]


def covered(board: Board) -> int:
    """Unique steps that were trained."""
    [view] = board.plans.values()
    return sum(view.trained_to(node) - node.start for node in view.plan.nodes)


Pieces = list[tuple[int, int, int, str]]


def pieces_of(view: PlanView, study: StudyView) -> Pieces:
    """Node, start, stop and state of each piece of the study's branches: each is covered once from its start to
    reach."""
    ahead, found = running(view.plan), []
    for id, branch in study.branches.items():
        own = list(cut(view, study.name, branch, ahead.get(id)))
        assert own[0][0] == branch.node.start and own[-1][1] == branch.reach
        assert all(stop == start for (_, stop, _), (start, _, _) in itertools.pairwise(own))
        found += [(id, *piece) for piece in own]
    assert Counter(state for *_, state in found) == +study.stages
    return found


class Mirror:
    """What a browser knows of a study's tree from the rows that it was sent."""

    def __init__(self) -> None:
        self.rows = Rows()

    def take(self, feed: Feed, seconds: float = 10.0) -> bool:
        sent = feed.rows(0.0, seconds)
        if sent is None:
            return False
        assert json.loads(sent.encoded())
        for index, row in sent.branches.items():
            assert row.parent < index and (row.parent == ROOT or row.parent in self.rows.branches | sent.branches)
        for name in ("branches", "trials", "failures", "texts"):
            getattr(self.rows, name).update(getattr(sent, name))
        for index in sent.gone:
            del self.rows.failures[index]
        self.rows.header = sent.header or self.rows.header
        return True

    def content(self) -> object:
        """All of it, regardless of the order in which it came."""
        node = {ROOT: ROOT} | {index: row.node for index, row in self.rows.branches.items()}
        branches = {row.node: structs.replace(row, parent=node[row.parent]) for row in self.rows.branches.values()}
        trials = {row.name: structs.replace(row, branch=node[row.branch]) for row in self.rows.trials.values()}
        failures = {(node[f.branch], f.step, f.doing, f.summary, self.rows.texts[f.text])
                    for f in self.rows.failures.values()}  # fmt: skip
        header = self.rows.header
        assert header is not None
        best = None if header.best == ROOT else self.rows.trials[header.best].name
        return (
            branches,
            trials,
            failures,
            best,
            header.end,
            [(node[place], step, worker) for place, step, worker in header.at],
        )


def fresh_mirror(view: PlanView, study: StudyView) -> Mirror:
    mirror, feed = Mirror(), Feed(view, study)
    while mirror.take(feed):
        pass
    return mirror


def test_the_page_shows_the_figures_of_the_result() -> None:
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
    [best] = study.standings.best(1)
    assert best.value == result.best_value and best.trial == result.trial_id(result.best_trial.number)
    reported = result.best_trial.intermediate_values
    points = dict(curve(view.plan.trials[best.trial], "score", best.step))
    assert reported.items() <= points.items()
    assert {step: (rung.requested, rung.evaluated) for step, rung in study.standings.rungs.items()} == {
        step: (count, count)
        for step in {step for trial in result.study.trials for step in trial.intermediate_values}
        for count in [sum(step in trial.intermediate_values for trial in result.study.trials)]
    }


def test_worker_time_without_sharing_on_the_page_is_close_to_that_of_the_result() -> None:
    result, journal = searched(trainable=Steady(None, 0.001))
    view, study = shown(board_of(journal))
    # Seconds per step are estimated as results come, there at the end.
    assert view.alone_seconds(study.name) == pytest.approx(result.savings.worker_seconds_alone, rel=0.5)


def test_a_page_that_receives_changes_shows_the_current_tree_after_every_record() -> None:
    _, journal = searched()
    board, mirror = Board(), Mirror()
    feed: Feed | None = None
    seen: set[str] = set()
    for position, record in enumerate(journal.read()):
        assert board.offer("plan", position, [record]) == position + 1
        view = board.plans["plan"]
        if "study" not in view.studies:
            continue
        study = view.studies["study"]
        feed = feed or Feed(view, study)
        while mirror.take(feed, 0.0):
            pass
        assert mirror.content() == fresh_mirror(view, study).content()
        states = {state for *_, state in pieces_of(view, study)}
        assert ("running" in states) == any(list(chain.ahead()) for chain in view.plan.chains.values())
        seen |= states
    assert seen == {"waiting", "ready", "running", "done"}
    assert {row.state for row in mirror.rows.branches.values()} == {"done"}
    assert all(row.front == row.reach for row in mirror.rows.branches.values())


def test_a_page_receives_only_branches_that_have_changed() -> None:
    _, journal = searched(n_trials=40)
    records = journal.read()
    *_, begin, end = (i for i, record in enumerate(records) if b"StateReached" in record)  # there are many branches
    board = board_of(journal, begin + 1)
    view, study = shown(board)
    mirror, feed = Mirror(), Feed(view, study)
    while mirror.take(feed):
        pass
    assert feed.rows(0.0, 1.0) is None
    board.offer("plan", begin + 1, records[begin + 1 : end + 1])
    sent = feed.rows(0.0, 1.0)
    assert sent is not None and 0 < len(sent.branches) < len(study.branches) / 2


def test_a_slow_page_receives_a_large_tree_in_slices_with_parents_first() -> None:
    _, journal = searched(n_trials=60)
    view, study = shown(board_of(journal))
    mirror, feed = Mirror(), Feed(view, study)
    slices = 0
    while mirror.take(feed, 0.0):
        slices += 1
    assert slices > 5
    assert mirror.content() == fresh_mirror(view, study).content()


def test_each_reader_of_the_change_log_receives_each_change_once() -> None:
    changes: Changes[str] = Changes()
    for key in "abcab":
        changes.mark(key)
    assert changes.since(0) == ["c", "a", "b"]
    at = changes.position
    assert changes.since(at) == []
    changes.mark("c")
    assert changes.since(at) == ["c"] and changes.since(0) == ["a", "b", "c"]


def test_stages_trained_for_another_study_are_shown_as_reused() -> None:
    journal = MemoryJournal()
    search(Tape(), hpstage.InlineExecutor(), journal, name="first", seed=3)
    before = covered(board_of(journal))
    search(Tape(), hpstage.InlineExecutor(), journal, name="second", seed=4)
    board = board_of(journal)
    view, first = shown(board, "first")
    _, second = shown(board, "second")
    assert {state for *_, state in pieces_of(view, first)} == {"done"}
    pieces = pieces_of(view, second)
    assert {state for *_, state in pieces} == {"done", "reused"}
    assert "trained for another study" in {row.state for row in fresh_mirror(view, second).rows.branches.values()}
    own = sum(stop - start for _, start, stop, state in pieces if state == "done")
    assert own == covered(board) - before <= second.totals.steps_trained
    assert own < second.totals.steps_unique
    assert [found.study.name for found in board.studies()] == ["second", "first"]


def test_stages_below_a_failed_branch_are_shown_as_failed() -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.piecewise({0: 1, 4: trial.suggest_categorical("a", [2, 7]), 8: trial.suggest_int("b", 1, 2)})}

    journal = MemoryJournal()
    grid = optuna.samplers.GridSampler({"a": [2, 7], "b": [1, 2]}, seed=0)
    study = optuna.create_study(study_name="study", direction="minimize", sampler=grid)
    hpstage.optimize(
        study, Failing(), space, metric="score", steps=12, n_trials=4, executor=hpstage.InlineExecutor(), store=journal
    )
    board = board_of(journal)
    view, found = shown(board)
    pieces, page = pieces_of(view, found), fresh_mirror(view, found)
    bad = {row.node for row in page.rows.branches.values() if row.label == "a 1 → 7"}
    lost = bad | {
        branch.node.id for branch in found.branches.values() if branch.node.parent and branch.node.parent.id in bad
    }
    assert len(bad) == 1 < len(lost)
    assert {(node, state) for node, _, _, state in pieces if node in lost} == {(node, "failed") for node in lost}
    assert {state for node, _, _, state in pieces if node not in lost} == {"done"}
    [failure] = page.rows.failures.values()
    assert page.rows.branches[failure.branch].node in bad
    assert "Traceback" in page.rows.texts[failure.text] and failure.summary in html.unescape(
        failures_html(board.studies()[0])
    )
    assert "<b>2 trials failed</b>" in failures_html(board.studies()[0])
    assert not found.maximize
    assert found.standings.best(1)[0].value == study.best_value


def texts(shown: Shown, seconds_left: float | None = None) -> list[str]:
    """All that the tiles of a study say."""
    return [text for tile in tiles(shown, seconds_left) for text in (tile.figure, *tile.details)]


def test_tiles_never_show_negative_figures() -> None:
    _, journal = searched()
    records = journal.read()
    said = []
    for stop in range(1, len(records) + 1):
        board = board_of(journal, stop)
        if board.studies():
            said.append(texts(board.studies()[0]))
    assert not any(part.startswith("-") for parts in said for part in parts)
    assert said[0][:2] == ["0 of 12", "12 queued"] and "12 of 12" in said[-1]


def test_tiles_show_the_numbers_that_their_figures_are_computed_from() -> None:
    result, journal = searched()
    one = board_of(journal).studies()[0]
    found = {tile.title: tile for tile in tiles(one)}
    best = result.study.best_trial
    assert best.value is not None and found["best score"].figure == f"{best.value:.5g}"
    number, named = found["best score"].details
    assert number.startswith(f"trial {best.number} at step ")
    assert all(f"{name}=" in named for name in best.params)
    totals = one.study.totals
    assert found["merge rate"].figure == f"{rate(totals.merge_rate)}×"
    assert found["merge rate"].details[0] == f"{totals.steps_unique:,} unique of {totals.steps_asked:,}"
    assert totals.stages_done > 1
    assert found["merge rate"].details[1:3] == (
        f"{totals.steps_trained:,} steps trained",
        f"{totals.stages_done} stages done",
    )
    assert found["trials finished"].figure == "12 of 12"
    assert found["workers"].figure == "0 training"


def test_the_time_left_is_shown_while_the_search_runs_and_the_estimate_is_recent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, journal = searched()
    records = journal.read()
    half = next(i for i in range(len(records) // 2, len(records)) if b"StateReached" in records[i])
    now = 1000.0
    monkeypatch.setattr("hpstage.cluster.dashboard.board.time.monotonic", lambda: now)
    board = Board()

    def time_left(at: float) -> list[str]:
        [found] = board.studies()
        return [part for part in texts(found, found.seconds_left(at)) if part.endswith(" left")]

    board.take_in("plan", 0, records[:half])
    assert time_left(now) == []
    board.take_in("plan", half, [], left=("study", 21.2))
    assert time_left(now) == ["about 21 s left"]
    assert time_left(now + 10) == ["about 11 s left"] and time_left(now + 22) == [
        "about 0 s left"
    ]  # no new estimate was received
    assert time_left(now + OLD + 1) == []
    for odd in (("study", -1.0), ("study", float("nan")), ("study", float("inf")), ("study", "<b>"), ("other", 5.0),
                (["study"], 5.0), ("study",), "study", 7, {"study": 5.0}, ("study", 1e300)):  # fmt: skip
        board.take_in("plan", half, [], left=odd)  # type: ignore[arg-type]
        assert time_left(now) == ["about 21 s left"]
    board.take_in("plan", half, [], left=("study", None))
    assert time_left(now) == []
    board.take_in("plan", half, [], left=("study", 3))
    assert time_left(now) == ["about 3 s left"]
    board.take_in("plan", half, records[half:], left=("study", 3.0))
    assert time_left(now) == []  # it has ended


def test_axes_end_at_round_numbers() -> None:
    assert [nice(value) for value in (0.0, 0.03, 1.0, 1.1, 61.0, 4999.0)] == [1.0, 0.05, 1.0, 2.0, 100.0, 5000.0]
    assert around(0.2, 0.99) == (0.0, 1.02)
    for low, high in ((-3.0, 17.0), (5.0, 5.0), (0.0, 0.0), (1e-6, 2e-6), (-1e9, 1e9)):
        start, end = around(low, high)
        assert start < low and high < end and end - start < 3 * ((high - low) or abs(high) or 1.0)


def test_records_received_twice_or_out_of_order_do_not_change_the_page() -> None:
    _, journal = searched()
    records = journal.read()
    board = Board()
    assert board.offer("plan", 5, records[5:9]) == 0  # a page that knows nothing wants all
    assert board.offer("plan", 0, records[:20]) == 20
    assert board.offer("plan", 10, records[10:30]) == 30
    assert board.offer("plan", 10, records[10:15]) == 30
    assert board.offer("plan", 40, records[40:]) == 30
    assert board.offer("plan", 30, records[30:]) == len(records)
    assert summary_html(board.studies()[0]) == summary_html(board_of(journal).studies()[0])


def test_the_page_is_rebuilt_after_its_journal_lost_records() -> None:
    _, journal = searched()
    records = journal.read()
    board = Board()
    behind = cursor(board.take_in("plan", 0, records[:20]))
    behind = cursor(board.take_in("plan", 10, records[10:30]))
    assert journal.read_on(behind)[0] == records[30:]
    lost = MemoryJournal()
    lost.append(records[:12] + records[:1] * 30)
    with pytest.raises(HistoryChanged):
        lost.read_on(behind)
    assert cursor(board.take_in("plan", 0, records[:12], anew=True)) == Cursor().after(records[:12])
    assert cursor(board.take_in("plan", 12, records[12:])) == Cursor().after(records)
    assert summary_html(board.studies()[0]) == summary_html(board_of(journal).studies()[0])


def test_a_plan_that_cannot_be_read_is_reported_and_other_plans_are_still_shown() -> None:
    _, journal = searched()
    board = board_of(journal)
    records = journal.read()
    assert board.offer("other", 0, [*records[:30], b'{"type": "OfTomorrow"}']) == NO_MORE
    assert board.offer("other", 0, records) == NO_MORE
    assert "cannot be shown" in summary_html(next(found for found in board.studies() if found.view.problem))
    assert board.offer("plan", len(records), []) == len(records)


def test_a_long_history_of_points_is_thinned_evenly_and_keeps_its_ends() -> None:
    history = TimeSeries()
    for i in range(10_000):
        history.add(float(i))
        assert history.points[-1] == (float(i),)
    steps = [b - a for (a,), (b,) in zip(history.points, history.points[1:], strict=False)]
    assert history.points[0] == (0.0,) and 300 < len(history.points) <= 800
    assert len(set(steps[:-1])) == 1


def test_a_worker_is_shown_with_the_steps_it_trains(tmp_path: Path) -> None:
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
        # As far as to the next boundary of nodes, however long no report was received.
        assert work_of(board, pool, 1e12)[chain.worker].step in (first.start, first.stop - 1)
        assert work_of(board, "elsewhere", 0.0) == {}


def test_the_title_of_the_metrics_panel_counts_best_trials_only_if_there_are_any() -> None:
    _, journal = searched()
    titles = []
    for stop in range(1, len(journal.read()) + 1):
        board = board_of(journal, stop)
        if studies := board.studies():
            panel = Metrics(board, None, Document())
            panel.show(studies[0], now=0.0)
            titles.append(panel.root.title.text)
    assert titles[0] == "Metric" and titles[-1].startswith("Best ") and "Best 0 trials" not in titles


def test_names_given_by_users_are_escaped_in_html() -> None:
    journal = MemoryJournal()
    study = optuna.create_study(study_name="<script>alert(1)</script>", sampler=optuna.samplers.RandomSampler(seed=1))

    class Odd(Tape):
        def evaluate(self) -> dict[str, float]:
            return {"<i>&": self.score}

    hpstage.optimize(
        study, Odd(), lambda trial: {"a": 1}, metric="<i>&", steps=2, n_trials=1, store=journal,
        executor=hpstage.InlineExecutor(),
    )  # fmt: skip
    text = summary_html(board_of(journal).studies()[0])
    assert "&lt;script&gt;" in text and "<script>" not in text


# --- the serving --------------------------------------------------------------------------------------------
