"""The pictures of the stage tree, alone and next to its trials without sharing."""

from __future__ import annotations

import re

import numpy as np
import optuna
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.text import Annotation

import hpstage
from hpstage.accounting.book import Book, open_book
from hpstage.accounting.branches import branches_of
from hpstage.algos import FullTraining
from hpstage.report import (
    draw_beside_alone,
    draw_stage_tree,
)
from hpstage.report.pictures import style
from hpstage.report.pictures.stage_tree import PALETTE, colour_of
from hpstage.report.tree.labels import _width, listed, write
from hpstage.report.tree.layout import ROWS, lay_out
from tests.unit.pictures import continuous, failed_search, search, texts

pytestmark = pytest.mark.sampled(10)

optuna.logging.set_verbosity(optuna.logging.ERROR)


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
