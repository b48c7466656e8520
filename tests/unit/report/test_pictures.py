"""The pictures of a book: what they say and what they leave out. No name and no value breaks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import matplotlib.style
import numpy as np
import optuna
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

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
from hpstage.accounting.timeline import MOST_BARS, bars
from hpstage.algos import FullTraining
from hpstage.execution.simulated import SimulatedExecutor
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
from hpstage.report.pictures.savings import steps
from hpstage.store.memory import MemoryJournal
from tests.unit.pictures import HOSTILE, continuous, failed_search, search, texts
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


def empty() -> Book:
    journal = MemoryJournal()
    open_plan(journal, WORKLOAD, {})
    return open_book(journal)


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
        ("discarded", 10.5, 12.0),
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
    assert {"train", "evaluate", "load", "save", "idle"} <= set(said) and "discarded" not in said
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
