"""The layout of the interactive stage tree: its order, what is folded away, and what is said of a branch."""

from __future__ import annotations

from itertools import pairwise

import optuna
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.accounting.book import open_book
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.report.tree.layout import ROOT, Layout, lay_out
from tests.unit.reports import search
from tests.unit.searches import Search, trial

optuna.logging.set_verbosity(optuna.logging.ERROR)

_VALUES = st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=12)


def laid_out(values: list[list[int]]) -> Layout:
    """A tree of trials of 9 steps that change every 3 steps."""
    run = Search(SimulatedExecutor(1))
    trials = [trial(i, {"a": s.piecewise(dict(zip((0, 3, 6), own, strict=True)))}, 9) for i, own in enumerate(values)]
    run.run(trials, [9] * len(trials))
    return lay_out(open_book(run.journal))


@given(_VALUES)
def test_descendants_follow_their_branch_in_the_layout_and_paths_of_trials_are_connected(
    values: list[list[int]],
) -> None:
    layout = laid_out(values)
    branches = layout.branches
    for i, branch in enumerate(branches):
        inside = {j for j in range(len(branches)) if branches[i].branch.node in branches[j].branch.node.ancestry()}
        assert inside == set(range(i, branch.stop))
        parent = branch.branch.node.parent
        assert branch.parent == (ROOT if parent is None else layout.place[parent.id])
    for id, leaf in layout.leaves.items():
        path = [layout.place[node.id] for node in layout.book.trials[id].last.ancestry()]
        assert path[-1] == leaf and [branches[i].parent for i in path] == [ROOT, *path[:-1]]


@given(_VALUES, st.integers(1, 12))
def test_every_branch_is_shown_or_folded_and_shown_lines_do_not_overlap(values: list[list[int]], most: int) -> None:
    layout = laid_out(values)
    shown = layout.unfolded(most)
    folded = layout.folded(shown)
    assert len(shown) + sum(count.nodes for count in folded.values()) == len(layout.branches)
    assert set(folded) <= shown | {ROOT}
    ending = sum(leaf in shown for leaf in layout.leaves.values())
    assert ending + sum(count.trials for count in folded.values()) == len(values)
    placed = layout.placed(shown)
    drawn = sorted(
        (row, branch.node.start, branch.reach)
        for i, row in placed.rows.items()
        for branch in [layout.branches[i].branch]
    )
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(drawn))
    own = {stub.row for stub in placed.stubs}
    assert own.isdisjoint(placed.rows.values()) and own | set(placed.rows.values()) == set(range(placed.count))
    above = {layout.branches[i].parent for i in shown}
    assert {(stub.branch, stub.folded) for stub in placed.stubs} == {(i, f) for i, f in folded.items() if i in above}


@given(_VALUES, st.integers(1, 12))
def test_the_fitted_layout_with_its_rows_for_folded_branches_has_at_most_the_given_rows(
    values: list[list[int]], most: int
) -> None:
    layout = laid_out(values)
    placed = layout.fitted(most)
    assert placed.count <= most or placed == layout.placed(layout.unfolded(1))


def test_the_path_of_the_best_trial_is_unfolded_even_in_one_row() -> None:
    layout = lay_out(open_book(search(n_trials=40)))
    assert layout.best and layout.best <= layout.unfolded(1)


def test_branches_rank_by_the_best_result_on_them_or_below_and_equal_results_rank_equally() -> None:
    layout = lay_out(open_book(search(n_trials=40)))
    found = {layout.book.measured[b.branch.node.id].value: b.rank for b in layout.branches if b.rank is not None}
    order = sorted(found, key=lambda value: value or 0.0, reverse=not layout.book.maximize)
    assert [found[value] for value in order] == sorted(found.values()) and {0.0, 1.0} < set(found.values())


def test_branches_of_a_finished_search_are_done() -> None:
    assert {branch.state for branch in laid_out([[0, 1, 2], [0, 1, 1]]).branches} == {"done"}
