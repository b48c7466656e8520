"""The pictures of a book: what they say and what they leave out. No name and no value breaks them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import matplotlib.style
import numpy as np
import optuna
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

import hpstage
from hpstage import schedule as s
from hpstage.accounting.account import Account
from hpstage.accounting.book import Book, open_book
from hpstage.accounting.branches import branches_of, measured
from hpstage.accounting.causes import causes_of
from hpstage.accounting.history import moments
from hpstage.accounting.payments import Charge, Waste
from hpstage.accounting.savings import merged
from hpstage.accounting.sums import Sums
from hpstage.algos import FullTraining, SuccessiveHalving
from hpstage.execution.simulated import Measure, SimulatedExecutor, value_of_key
from hpstage.plan.facts import ChainId, ChainLost, NodeId, StateReached, TrialAdded, TrialId, WorkerId
from hpstage.plan.log import open_plan
from hpstage.plan.plan import SearchPlan
from hpstage.report import (
    draw_beside_alone,
    draw_merge_rate,
    draw_metrics,
    draw_parameters,
    draw_savings,
    draw_stage_tree,
    draw_timeline,
    save,
)
from hpstage.report.names import plain
from hpstage.report.pictures import style
from hpstage.report.pictures.metrics import curves
from hpstage.report.pictures.parameters import _Column, importances
from hpstage.report.pictures.savings import steps
from hpstage.report.pictures.stage_tree import PALETTE, colour_of
from hpstage.report.pictures.timeline import MOST_BARS, bars
from hpstage.report.tree.labels import _width, listed, write
from hpstage.report.tree.layout import ROWS, lay_out
from hpstage.store.memory import MemoryJournal
from hpstage.testing.toys import Failing, Tape
from tests.unit.searches import WORKLOAD, Search, histories, trial

pytestmark = pytest.mark.sampled(10)

optuna.logging.set_verbosity(optuna.logging.ERROR)

DRAW: dict[str, Callable[[Book], Figure]] = {
    "stage_tree": draw_stage_tree,
    "beside_alone": draw_beside_alone,
    "timeline": draw_timeline,
    "savings": draw_savings,
    "merge_rate": draw_merge_rate,
    "metrics": draw_metrics,
    "parameters": draw_parameters,
}
HOSTILE = "<script>alert('x')</script> & $\\frac{$ \x1b[31m\n \N{CJK UNIFIED IDEOGRAPH-5B66}" + "long " * 40


def space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
    lr = trial.suggest_categorical("lr", [0.2, 0.1])
    first = trial.suggest_categorical("first", [4, 8, 20])
    grow = trial.suggest_categorical("grow", [6, 16])
    return {
        "lr": s.multistep(lr, milestones=[first, 24], gamma=trial.suggest_categorical("gamma", [0.1, 0.3])),
        "batch_size": s.piecewise({0: 64, grow: 128}),
    }


def continuous(trial: optuna.Trial) -> dict[str, s.Schedule]:
    drop = trial.suggest_int("drop", 1, 30)
    return {"lr": s.piecewise({0: trial.suggest_categorical("lr", [1, 2]), drop: trial.suggest_float("late", 0, 1)})}


def search(
    journal: MemoryJournal | None = None,
    *,
    name: str = "study",
    n_trials: int = 24,
    metric: str = "value",
    seed: int = 0,
    load_seconds: float = 0.2,
    measure: Measure = value_of_key,
    space: Callable[[optuna.Trial], object] = space,
    **options: object,
) -> tuple[hpstage.Result, MemoryJournal]:
    """A search on three simulated workers, where everything takes its time."""
    study = optuna.create_study(study_name=name, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=seed))
    journal = MemoryJournal() if journal is None else journal
    executor = SimulatedExecutor(
        3,
        step_seconds=0.1,
        evaluate_seconds=0.3,
        load_seconds=load_seconds,
        save_seconds=0.1,
        measure=lambda key, step: {metric: next(iter(measure(key, step).values()))},
    )
    settings = {"algorithm": SuccessiveHalving(min_steps=8, reduction_factor=2), "steps": 32} | options
    result = hpstage.optimize(
        study, object(), space, metric=metric, n_trials=n_trials, executor=executor, store=journal, **settings
    )  # type: ignore[arg-type]
    return result, journal


@pytest.fixture(scope="module")
def searched() -> tuple[hpstage.Result, Book]:
    result, journal = search()
    return result, open_book(journal, "study")


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def empty() -> Book:
    journal = MemoryJournal()
    open_plan(journal, WORKLOAD, {})
    return open_book(journal)


# --- the stage tree ---------------------------------------------------------------------------------------


def test_the_stage_tree_picture_names_its_trials_their_differing_values_and_the_best_trial(
    searched: tuple[hpstage.Result, Book],
) -> None:
    result, book = searched
    said = texts(draw_stage_tree(book))
    nodes = len(branches_of(book.trials))
    assert f"24 trials in {nodes} nodes (wider: more trials)" in said
    assert f"best: trial {result.best_trial.number}" in said
    assert "value\nbest at or below, by rank" in said and "training step" in said
    assert {"lr 0.1 → 0.01", "batch_size 64 → 128", "batch_size 64, lr 0.2"} <= set(said)
    assert not any(text.startswith("+") for text in said)


def test_the_stage_tree_picture_draws_branches_in_the_place_and_colour_of_the_interactive_tree(
    searched: tuple[hpstage.Result, Book],
) -> None:
    figures = pytest.importorskip("hpstage.report.tree.figure")
    theirs = np.array([to_rgb(colour) for colour in figures.PALETTE])
    assert np.array(PALETTE.colors) == pytest.approx(theirs, abs=1.01 / 255)
    _, book = searched
    layout = lay_out(book)
    [lines] = [c for c in draw_stage_tree(book).axes[0].collections if isinstance(c, LineCollection) and c.zorder == 3]
    placed = layout.fitted()
    assert [segment.tolist() for segment in lines.get_segments()] == [
        [[layout.branches[i].branch.node.start, row], [layout.branches[i].branch.reach, row]]
        for i, row in placed.rows.items()
    ]
    for colour, i in zip(lines.get_colors(), placed.rows, strict=True):
        assert tuple(colour) == to_rgba(colour_of(layout.branches[i].rank))


def test_a_stage_tree_of_500_trials_is_folded_to_one_page_and_counts_hidden_branches() -> None:
    result, journal = search(n_trials=500, space=continuous, algorithm=FullTraining())
    book = open_book(journal)
    figure = draw_stage_tree(book)
    [drawn] = [c for c in figure.axes[0].collections if isinstance(c, LineCollection) and c.zorder == 3]
    folded = [re.fullmatch(r"\+ ([\d,]+) branch(?:es)?, ([\d,]+) trials?", text) for text in texts(figure)]
    left = sum(int(found[1].replace(",", "")) for found in folded if found)
    assert left == len(book.branches) - len(drawn.get_segments()) > 300
    rows = {text.xy[1] for text in figure.findobj(Annotation)}
    assert len(rows) <= ROWS
    assert f"best: trial {result.best_trial.number}" in texts(figure)
    assert figure.get_figheight() <= style.TALLEST


def test_the_path_of_the_best_trial_is_drawn_even_if_other_branches_have_better_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpstage.report.pictures.stage_tree.ROWS", 3)

    def measure(key: str, step: int) -> dict[str, float]:
        return {"value": int(key, 16) / 16 ** len(key) - step}

    _, journal = search(n_trials=40, space=continuous, measure=measure)
    book = open_book(journal)
    assert book.best is not None
    [axes, _] = draw_stage_tree(book).axes
    [band] = axes.lines
    best = book.trials[book.best]
    assert [*band.get_xdata()] == [at for _, start, stop in best.path_to(best.requested) for at in (start, stop)]
    [branches] = [c for c in axes.collections if isinstance(c, LineCollection) and c.zorder == 3]
    ends = {tuple(point) for segment in branches.get_segments() for point in segment}
    assert {tuple(band.get_xydata()[0]), tuple(band.get_xydata()[-1])} <= ends


def test_texts_of_the_stage_tree_picture_do_not_overlap_and_lie_inside_the_picture() -> None:
    for n_trials in (1, 24, 200):
        figure = draw_stage_tree(open_book(search(n_trials=n_trials)[1]))
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in figure.findobj(Annotation)]
        width, height = figure.canvas.get_width_height()
        for i, box in enumerate(boxes):
            assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
            for other in boxes[:i]:
                across = min(box.x1, other.x1) - max(box.x0, other.x0)
                down = min(box.y1, other.y1) - max(box.y0, other.y0)
                assert across <= 0 or down <= 0.4 * min(box.height, other.height)  # heights include descenders


def test_trials_are_named_at_the_end_of_their_branch_and_with_their_study_if_there_are_several() -> None:
    result, journal = search(n_trials=4)
    said = texts(draw_stage_tree(open_book(journal)))
    for one in result.study.trials:
        assert any(re.search(rf"(^|  · +)trials? (\d+, )*{one.number}\b", text) for text in said)
    assert any(text.endswith(f"  {result.best_value:.4g}") for text in said)
    search(journal, name="other", n_trials=4, seed=3)
    said = texts(draw_stage_tree(open_book(journal)))
    assert not any(re.search(r"trials? \d", text) for text in said)
    assert any(re.search(r"trials? other/\d", text) for text in said)


def test_trials_at_the_end_of_a_branch_name_their_study_once() -> None:
    assert listed(["a/3", "a/12", "b/0", "a/1"], 3) == "trials a/3, 12, b/0 + 1"
    assert listed(["3", "12"], 3) == "trials 3, 12" and listed(["a/3"], 3) == "trial a/3"


def test_labels_longer_than_their_branch_stand_before_its_trials() -> None:
    _, journal = search(space=continuous)
    layout = lay_out(open_book(journal))
    written = write(layout, layout.fitted(ROWS), 400.0, 6.0)
    scale = 400.0 / written.end
    for note in written.notes:
        if note.above is not None:
            own = layout.branches[note.above].branch
            assert note.right + _width(note.text, 6.0) <= (own.reach - own.node.start) * scale
    long = [note for note in written.notes if note.above is None and "  ·  trial" in note.text]
    assert long and all(re.match(r"lr [12] → 0\.\d+  ·  trials? \d", note.text) for note in long)


def test_failures_are_marked_in_the_stage_tree_picture() -> None:
    figure = draw_stage_tree(open_book(failed_search()))
    assert "failed" in texts(figure)
    [crosses] = [c for c in figure.axes[0].collections if isinstance(c, PathCollection)]
    assert len(crosses.get_offsets()) > 0


def test_trials_without_sharing_are_drawn_next_to_the_stage_tree_on_the_same_scale_of_steps(
    searched: tuple[hpstage.Result, Book],
) -> None:
    result, book = searched
    figure = draw_beside_alone(book)
    left, right = figure.axes
    [alone] = [c for c in left.collections if isinstance(c, LineCollection)]
    lengths = [segment[1][0] - segment[0][0] for segment in alone.get_segments()]
    assert len(lengths) == 24 and sum(lengths) == result.savings.steps_asked
    titles = {
        f"24 trials without sharing: {result.savings.steps_asked:,} steps",
        f"As a stage tree: {result.savings.steps_unique:,} steps",
    }
    assert titles <= set(texts(figure))
    scales = [axes.get_position().width / axes.get_xlim()[1] for axes in (left, right)]
    assert scales[0] == pytest.approx(scales[1], rel=0.02)


# --- the timeline -----------------------------------------------------------------------------------------


def test_timeline_bars_of_a_worker_do_not_overlap_and_sum_to_busy_seconds() -> None:
    # A simulated chain that is amended while it loads gets the rest of its loading for nothing: hence none here.
    result, journal = search(load_seconds=0.0)
    drawn = list(bars(open_book(journal)))
    assert math.isclose(sum(bar.seconds for bar in drawn), result.savings.worker_seconds, abs_tol=1e-3)  # rounded
    for worker in {bar.worker for bar in drawn}:
        mine = sorted((bar.began, bar.began + bar.seconds) for bar in drawn if bar.worker == worker)
        assert all(stop <= start + 1e-9 for (_, stop), (start, _) in pairwise(mine))


def test_timeline_bars_are_in_the_order_of_the_work_and_end_at_the_time_of_their_report() -> None:
    worker = WorkerId("w")
    account = Account(SearchPlan(WORKLOAD))
    charge(account, reached(worker, 10.0, train=4.0, load=1.0, evaluate=2.0, save=0.5))
    lost = ChainLost(ChainId("c"), worker, NodeId(0), 1, at=12.0, outcome="lost", seconds=1.5, steps=1)
    account.wastes.append(Waste(lost, TrialId("study/0"), lost.seconds))
    assert [(bar.activity, bar.began, bar.began + bar.seconds) for bar in bars(Book(account))] == [
        ("load", 2.5, 3.5),
        ("train", 3.5, 7.5),
        ("evaluate", 7.5, 9.5),
        ("save", 9.5, 10.0),
        ("thrown away", 10.5, 12.0),
    ]


def charge(account: Account, fact: StateReached) -> None:
    """Let a trial pay for a state, of which the plan need not know."""
    account.charges.append(Charge(fact, TrialId("study/0"), Sums().reach(fact)))
    account._work(fact)


def reached(
    worker: WorkerId, at: float, *, train: float, load: float = 0.0, evaluate: float = 0.0, save: float = 0.0
) -> StateReached:
    return StateReached(ChainId("c"), worker, NodeId(0), 0, 1, at, train, load, evaluate, save)


def test_the_timeline_shows_how_busy_each_worker_was(searched: tuple[hpstage.Result, Book]) -> None:
    _, book = searched
    said = texts(draw_timeline(book))
    drawn = list(bars(book))
    span = max(bar.began + bar.seconds for bar in drawn) - min(bar.began for bar in drawn)
    for worker in {bar.worker for bar in drawn}:
        busy = sum(bar.seconds for bar in drawn if bar.worker == worker)
        (share,) = {text.split()[-1] for text in said if text.startswith(f"{worker} ")}
        assert float(share.rstrip("%")) == pytest.approx(100 * busy / span, abs=0.5 + 1e-6)  # rounded
    assert {"train", "evaluate", "load", "save", "idle"} <= set(said) and "thrown away" not in said
    assert any(text.startswith("3 workers, busy ") for text in said)


def test_a_timeline_with_more_bars_than_pixels_is_an_image_coloured_by_shares_of_time() -> None:
    account = Account(SearchPlan(WORKLOAD))
    count = MOST_BARS
    for worker, train in (("a", 0.25), ("b", 0.75)):
        for at in range(1, count):  # a pixel holds several
            charge(account, reached(WorkerId(worker), float(at), train=train))
    charge(account, reached(WorkerId("a"), float(count), train=0.25))
    [axes] = draw_timeline(Book(account)).axes
    assert not axes.collections and len(axes.images) == 2
    track, blue = np.array(to_rgb(style.TRACK)), np.array(to_rgb("#0072B2")) / 2 + np.array(to_rgb("#3A95CC")) / 2
    for image, share in zip(sorted(axes.images, key=lambda i: -i.get_array().mean()), (0.25, 0.75), strict=True):
        colour = np.asarray(image.get_array())[0].mean(axis=0)
        assert colour == pytest.approx(share * blue + (1 - share) * track, abs=2e-3)


# --- savings ----------------------------------------------------------------------------------------------


def test_the_savings_waterfall_adds_up_from_total_to_total_and_ends_at_busy_seconds(
    searched: tuple[hpstage.Result, Book],
) -> None:
    _, book = searched
    found = causes_of(book)
    level = 0.0
    for step in steps(found):
        if step.total and level:
            assert step.seconds == level
        level = step.seconds if step.total else level + step.seconds
    assert level == found.used
    said = texts(draw_savings(book))
    assert {"without sharing, as requested", "stopped early", "shared with a trial of the study", "busy"} <= set(said)
    # All that was requested is 100 %, whatever else early stopping has saved.
    assert any(text.endswith("100%") and text.startswith(f"{found.alone:.2f}") for text in said)
    assert f"{found.early_stopping:.2f} more if trained to the end" in said
    assert "shared with another study" not in said
    assert any(f"{found.used:.2f} busy worker-seconds" in text for text in said)


def test_the_savings_waterfall_subtracts_savings_of_live_states_and_adds_overheads() -> None:
    run = Search(SimulatedExecutor(1, step_seconds=1.0, load_seconds=4.0, save_seconds=0.5))
    one, two = (trial(i, {"a": s.piecewise({0: 1, 4: i + 2})}, 8) for i in range(2))
    for added, stop in ((one, 4), (one, 8), (two, 8)):
        run.run([added], [stop])
    found = {step.label: step.seconds for step in steps(causes_of(open_book(run.journal)))}
    assert found["live states instead of disk"] == -4.0
    assert sum(found.values()) == 2 * found["busy"]


def test_steps_trained_by_another_study_are_a_separate_cause_in_the_savings_picture() -> None:
    _, journal = search(n_trials=12)
    search(journal, name="other", n_trials=12)
    book = open_book(journal, "other")
    assert "shared with another study" in texts(draw_savings(book))
    assert "shared with another study" not in texts(draw_savings(open_book(journal, "study")))


# --- the merge rate ---------------------------------------------------------------------------------------


def test_the_merge_rate_picture_ends_at_the_merge_rate_of_the_search() -> None:
    first, journal = search(n_trials=12)
    second, _ = search(journal, name="other", n_trials=12, seed=1)
    plan = open_book(journal)
    assert (moments(plan)[-1].requested, moments(plan)[-1].unique) == (
        merged(plan.account.plan).steps_asked,
        merged(plan.account.plan).steps_unique,
    )
    alone = MemoryJournal()  # of one study: all requests of the plan, and nothing to be left out
    search(alone, n_trials=12)
    for result, book in (
        *((result, open_book(journal, result.study.study_name)) for result in (first, second)),
        (first, open_book(alone)),
    ):
        found = moments(book)
        savings = result.savings
        assert (found[-1].requested, found[-1].unique) == (savings.steps_asked, savings.steps_unique)
        assert found[-1].rate == savings.merge_rate
        assert found[-1].trained == sum(charge.fact.step - charge.fact.start for charge in book.charges)
        trials = [trial(0, dict(planned.schedules), planned.steps) for planned in book.trials.values()]
        assert found[-1].unique == len(histories(trials, [planned.requested for planned in book.trials.values()]))
        for one, next in pairwise(found):
            assert one.seconds < next.seconds
            assert one.requested <= next.requested and one.unique <= next.unique and one.trained <= next.trained
        assert any(f"Merge rate {savings.merge_rate:.2f}" in text for text in texts(draw_merge_rate(book)))


def test_requested_steps_appear_in_the_history_at_the_time_of_the_result_that_caused_them() -> None:
    run = Search(SimulatedExecutor(1, step_seconds=1.0))
    one, two = (trial(i, {"a": s.piecewise({0: 1, 2: 2 + i})}, 8) for i in range(2))
    run.run([one], [4])
    run.run([two], [8])
    found = [(m.seconds, m.requested, m.unique, m.trained) for m in moments(open_book(run.journal))]
    assert found[0] == (0.0, 4, 4, 0)
    assert next(moment for moment in found if moment[1:3] == (12, 10))[0] == 4.0


# --- metrics ----------------------------------------------------------------------------------------------


def test_the_metrics_picture_draws_each_node_once_from_the_last_value_measured_before_it(
    searched: tuple[hpstage.Result, Book],
) -> None:
    _, book = searched
    branches = branches_of(book.trials)
    found = measured(branches, "value", maximize=True)
    drawn = curves(list(branches.values()), found)
    assert sorted(curve.node for curve in drawn) == sorted(id for id, at in found.items() if at.points)
    whole = {  # by each trial alone: all that was measured on its way
        tuple(
            (step, node.states[step].metrics["value"])  # type: ignore[index]
            for node, start, stop in planned.path_to(planned.requested)
            for step in sorted(node.states)
            if start < step <= stop and node.states[step].metrics is not None
        )
        for planned in book.trials.values()
    }
    for curve in drawn:
        assert any(set(pairwise(curve.points)) <= set(pairwise(way)) for way in whole)
    figure = draw_metrics(book)
    [lines] = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
    assert len(lines.get_segments()) == len(drawn)
    assert {"24 trials", "value", "training step"} <= set(texts(figure))


def test_diverged_values_are_left_out_of_the_axis_of_the_metrics_picture_and_counted() -> None:
    def measure(key: str, step: int) -> dict[str, float]:
        share = int(key, 16) / 16 ** len(key)
        return {"value": -1e9 if share > 0.975 else math.nan if share < 0.04 else -math.inf if share < 0.08 else share}

    _, journal = search(n_trials=80, measure=measure, space=continuous)
    book = open_book(journal)
    values = [
        state.metrics["value"]
        for branch in branches_of(book.trials).values()
        for state in branch.node.states.values()
        if state.metrics is not None
    ]
    figure = draw_metrics(book)
    diverged, lost = values.count(-1e9), sum(not math.isfinite(value) for value in values)
    assert diverged and lost
    [title] = [text for text in texts(figure) if text.startswith("80 trials")]
    assert f"{diverged} value" in title and title.endswith(f"{lost} not finite")
    low, high = figure.axes[0].get_ylim()
    assert -1.0 < low < high < 2.0


@pytest.mark.parametrize("draw", [draw_stage_tree, draw_metrics])
@pytest.mark.parametrize("huge", [1.7e308, -1.7e308])
def test_pictures_with_values_near_the_limits_of_floats_are_drawn(
    draw: Callable[[Book], Figure], huge: float, tmp_path: Path
) -> None:
    def measure(key: str, step: int) -> dict[str, float]:
        return {"value": huge if int(key[0], 16) < 12 else huge / 2 if int(key[0], 16) < 14 else 0.5}

    _, journal = search(n_trials=12, measure=measure, space=continuous)
    assert save(draw(open_book(journal)), tmp_path / "picture.png").stat().st_size > 0


def test_the_metrics_picture_includes_the_best_value_even_if_it_is_far_from_other_values() -> None:
    def measure(key: str, step: int) -> dict[str, float]:
        share = int(key, 16) / 16 ** len(key)
        return {"value": 1e9 if share > 0.97 else -share}

    result, journal = search(n_trials=80, measure=measure, space=continuous, algorithm=FullTraining())
    assert result.best_value == 1e9
    assert draw_metrics(open_book(journal)).axes[0].get_ylim()[1] > 1e9


def test_values_over_many_decades_are_drawn_on_a_logarithmic_axis() -> None:
    def measure(key: str, step: int) -> dict[str, float]:
        return {"value": 10.0 ** (9 * int(key, 16) / 16 ** len(key))}

    _, journal = search(measure=measure)
    [axes] = draw_metrics(open_book(journal)).axes
    assert axes.get_yscale() == "log"


# --- all of them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAW)
def test_pictures_of_a_plan_without_trials_state_that_there_is_no_data(name: str) -> None:
    [said] = texts(DRAW[name](empty()))
    assert said.startswith(("No", "There is no"))
    assert style.svg(DRAW[name](empty()))


@pytest.mark.parametrize("name", DRAW)
def test_pictures_do_not_depend_on_the_matplotlib_style_of_the_process(
    name: str, searched: tuple[hpstage.Result, Book]
) -> None:
    usual = style.svg(DRAW[name](searched[1]))
    with matplotlib.style.context("ggplot"):  # as Optuna's own plots leave it behind
        assert style.svg(DRAW[name](searched[1])) == usual


@pytest.mark.parametrize("name", DRAW)
def test_pictures_of_a_plan_with_one_trial_are_drawn(name: str) -> None:
    _, journal = search(n_trials=1)
    assert style.svg(DRAW[name](open_book(journal, "study"))).startswith(b"<?xml")


@pytest.mark.parametrize("name", DRAW)
def test_pictures_of_a_plan_without_a_study_are_drawn(name: str) -> None:
    run = Search(SimulatedExecutor(2, step_seconds=1.0))
    run.run([trial(i, {"a": s.piecewise({0: 1, 4: i})}, 8) for i in range(4)], [8, 8, 6, 3])
    assert style.svg(DRAW[name](open_book(run.journal)))


@pytest.mark.parametrize("name", DRAW)
def test_pictures_of_a_search_with_only_failed_trials_are_drawn(name: str) -> None:
    assert style.svg(DRAW[name](open_book(failed_search())))


def failed_search() -> MemoryJournal:
    study = optuna.create_study(study_name="study")
    journal = MemoryJournal()
    hpstage.optimize(
        study,
        Failing(),
        lambda trial: {"a": s.piecewise({0: 1, 3: 7})},
        metric="score",
        steps=6,
        n_trials=2,
        algorithm=FullTraining(),
        executor=hpstage.InlineExecutor(),
        store=journal,
    )
    return journal


@pytest.mark.ci
@pytest.mark.parametrize("name", DRAW)
@pytest.mark.ci_one_in(2)
def test_names_typed_by_users_are_drawn_literally_in_every_format(name: str, tmp_path: Path) -> None:
    _, journal = search(name=HOSTILE, n_trials=6, metric=HOSTILE)
    figure = DRAW[name](open_book(journal))
    for kind in ("png", "svg", "pdf"):
        assert style.save(figure, tmp_path / f"picture.{kind}").stat().st_size > 1000
    drawn = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert "script" not in {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(drawn).iter()}
    for text in figure.findobj(Text):
        assert "\x1b" not in text.get_text()
        if "frac" in text.get_text():
            assert not text.get_parse_math() and len(text.get_text()) < 80
    if name in ("stage_tree", "metrics"):
        assert any("$\\frac{$" in text or "<script>alert('x')" in text for text in texts(figure))


@pytest.mark.ci
@pytest.mark.parametrize("draw", [draw_stage_tree, draw_beside_alone])
def test_pictures_with_long_or_unusual_parameter_names_are_saved_in_every_format(
    draw: Callable[[Book], Figure], tmp_path: Path
) -> None:
    wide = "\N{CJK UNIFIED IDEOGRAPH-5B66}\N{GRINNING FACE}" * 75

    def space(trial: optuna.Trial) -> dict[str, s.Schedule]:
        late = {0: trial.suggest_categorical("a", [1, 2]), trial.suggest_int("d", 1, 30): 3}
        return {HOSTILE: s.piecewise(late), wide: s.piecewise({0: wide, trial.suggest_int("e", 1, 30): "x_$y^{"})}

    _, journal = search(n_trials=12, space=space)
    figure = draw(open_book(journal))
    for kind in ("png", "svg", "pdf"):
        assert style.save(figure, tmp_path / f"picture.{kind}").stat().st_size > 1000


def test_names_in_pictures_are_put_on_one_line_and_shortened() -> None:
    assert plain("plain name") == "plain name"
    assert plain("a\nb\x1b[31m\u202e") == r"a\nb\x1b[31m\u202e"
    assert plain("x" * 30, 10) == "x" * 9 + "\N{HORIZONTAL ELLIPSIS}"


def test_trials_without_a_number_are_named_by_the_end_of_their_id(tmp_path: Path) -> None:
    run = Search(SimulatedExecutor(1))
    run.run([TrialAdded(TrialId("study/$\\frac{$"), {"a": s.constant(1)}, 4)], [4])
    figure = draw_stage_tree(open_book(run.journal))
    assert any("$\\frac{$" in text for text in texts(figure))
    assert style.save(figure, tmp_path / "picture.png").exists()


def test_names_of_workers_are_drawn_literally_in_the_timeline(tmp_path: Path) -> None:
    account = Account(SearchPlan(WORKLOAD))
    for worker in (HOSTILE, "$a_{", ""):
        charge(account, reached(WorkerId(worker), 3.0, train=1.0))
    figure = draw_timeline(Book(account))
    assert style.save(figure, tmp_path / "picture.svg").exists()
    assert any(text.startswith("$a_{  ") for text in texts(figure))


def test_a_picture_saved_twice_gives_equal_files(searched: tuple[hpstage.Result, Book], tmp_path: Path) -> None:
    _, book = searched
    for kind in ("png", "svg", "pdf"):
        one, two = (style.save(draw_merge_rate(book), tmp_path / f"{i}.{kind}") for i in range(2))
        assert one.read_bytes() == two.read_bytes()


# --- parameters -------------------------------------------------------------------------------------------


def test_the_parameter_that_decides_the_value_has_the_highest_importance() -> None:
    numbers = [(i % 7, i % 3, i) for i in range(40)]
    trials = [({"lr": 10.0**-a, "kind": "xyz"[b], "seed": c}, float(a) + 0.01 * b) for a, b, c in numbers]
    found = importances(trials, maximize=True)
    assert next(iter(found)) == "lr" and found["lr"] > 0.5
    assert sum(found.values()) == pytest.approx(1.0)
    assert found == importances(trials, maximize=True)


def test_parameter_importance_accepts_infinite_nan_none_and_boolean_categories() -> None:
    choices = [math.inf, math.nan, None, True, 1, "1"]
    trials = [({"clip": choices[i % 6]}, float(i % 6)) for i in range(24)]
    assert importances(trials, maximize=True) == {"clip": 1.0}
    assert len(_Column([params["clip"] for params, _ in trials]).ticks) == 5  # 1 and "1" have one text


def test_the_parameters_picture_draws_values_and_names_as_literal_text() -> None:
    run = hpstage.optimize(
        optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=1)),
        Tape(),
        lambda trial: {
            "a": trial.suggest_categorical(HOSTILE, [1, 2, 3]) + trial.suggest_float("b", 1e-4, 1.0, log=True),
            "b": float(trial.suggest_categorical("kind", ["<i>x", "y"]) == "y"),
        },
        metric="score",
        steps=2,
        n_trials=12,
        executor=hpstage.InlineExecutor(),
        store=(journal := MemoryJournal()),
    )
    assert len(run.study.trials) == 12
    figure = draw_parameters(open_book(journal))
    above, below = figure.axes
    assert len(above.patches) == 3
    [lines] = [found for found in below.collections if len(found.get_paths()) == 12]
    assert all(-0.01 <= y <= 1.01 for path in lines.get_paths() for _, y in path.vertices)
    said = texts(figure)
    assert any("<i>x" in text for text in said) and not any("\x1b" in text for text in said)
    assert style.svg(figure)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.inf, "No parameters can be compared: too few trials are complete."),
        (0.9, "Importances of parameters cannot be computed: all completed trials have the same value."),
    ],
)
def test_the_parameters_picture_compares_nothing_if_all_values_are_infinite_or_equal(value: float, shown: str) -> None:
    _, journal = search(measure=lambda key, step: {"value": value})
    assert texts(draw_parameters(open_book(journal))) == [shown]


def test_the_parameters_picture_compares_parameters_within_a_study() -> None:
    _, journal = search()
    search(journal, name="other", space=continuous, seed=3)
    search(journal, name="tiny", n_trials=2)
    figure = draw_parameters(open_book(journal))
    assert len(figure.axes) == 4  # two of each study with trials enough
    for own, (name, above, below) in zip(
        figure.subfigs, [("study", *figure.axes[:2]), ("other", *figure.axes[2:])], strict=True
    ):
        [whole, part] = (texts(one) for one in (draw_parameters(open_book(journal, name)), own))
        assert [f"{whole[-1]}: {name}" if text == whole[-1] else text for text in whole] == part
        assert {above.figure, below.figure} == {own}
    alone = draw_parameters(open_book(journal, "tiny"))
    assert texts(alone) == ["No parameters can be compared: too few trials are complete."]
    assert style.svg(figure, 3.7)


def test_the_parameters_picture_draws_trials_of_equal_value_in_one_colour() -> None:
    _, journal = search(measure=lambda key, step: {"value": float(key > "8")}, algorithm=FullTraining())
    [*_, below] = draw_parameters(book := open_book(journal)).axes
    lines = next(found for found in below.collections if isinstance(found, LineCollection))
    assert len(lines.get_colors()) == len(book.values) == 24 and len({*map(tuple, lines.get_colors())}) == 2
