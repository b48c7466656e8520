"""The branches of a stage tree: which are shown, on which rows they lie, and what was measured on them."""

from __future__ import annotations

import optuna
import pytest

from hpstage import schedule as s
from hpstage.accounting.book import open_book
from hpstage.accounting.branch_states import BranchState, states
from hpstage.accounting.branches import branches_of, foremost, measured, merit, ranking, rows
from hpstage.accounting.savings import merged
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import DriverId, NodeId, StageFailed, TargetAsked, TrialAdded, TrialId, UserFailure
from hpstage.search.results.result import Result
from tests.unit.reports import search
from tests.unit.searches import Search, trial

optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(scope="module")
def searched() -> Result:
    return search()


def test_no_line_of_the_stage_tree_is_crossed_or_overlaid(searched: Result) -> None:
    result, book = searched, open_book(searched)
    branches = branches_of(book.trials)
    assert sum(branch.reach - branch.node.start for branch in branches.values()) == merged(result.plan).steps_unique
    found = rows(branches.values())
    for branch in branches.values():
        same_row = [
            other for id, other in branches.items() if found[id] == found[branch.node.id] and other is not branch
        ]
        assert all(other.reach <= branch.node.start or branch.reach <= other.node.start for other in same_row)
        if branch.node.parent is None:
            continue
        top, x = found[branch.node.parent.id], branch.node.start
        between = [other for id, other in branches.items() if top < found[id] < found[branch.node.id]]
        assert not any(other.node.start < x <= other.reach for other in between)


def test_lengths_of_branches_sum_to_the_unique_steps_and_each_trial_counts_once_per_branch() -> None:
    run = Search(SimulatedExecutor(1))
    trials = [trial(i, {"a": s.piecewise({0: 1, 4: i // 2})}, 8) for i in range(4)]
    run.run(trials, [8, 6, 5, 8])
    planned = open_book(run.journal).trials
    branches = branches_of(planned)
    through = [node.id for each in planned.values() for node, _, _ in each.path_to(each.requested)]
    assert {id: branch.trials for id, branch in branches.items()} == {id: through.count(id) for id in through}
    assert sum(branch.reach - branch.node.start for branch in branches.values()) == merged(run.plan).steps_unique


@pytest.mark.parametrize("most", [1, 2, 7, 20, 1000])
def test_shown_branches_fill_the_rows_are_connected_and_include_required_branches(most: int) -> None:
    branches = branches_of(open_book(search(n_trials=40)).trials)
    [*_, last] = branches
    for always in ([], [last]):
        shown = foremost(branches, ranking(branches.values(), lambda branch: 0.0), most, always=always)
        ids = {branch.node.id for branch in shown}
        assert all(branch.node.parent is None or branch.node.parent.id in ids for branch in shown)
        assert set(always) <= ids
        count = 1 + max(rows(shown).values())
        needed = len(branches[last].node.ancestry()) if always else 0
        assert count == min(most, 1 + max(rows(branches.values()).values())) or count <= max(most, needed)
        left = [branch.trials for id, branch in branches.items() if id not in ids]
        if left and not always:
            assert count == most and max(left) <= min(branch.trials for branch in shown)


def test_the_value_of_a_branch_is_the_best_value_measured_on_it_or_below_it(
    searched: Result,
) -> None:
    book = open_book(searched)
    branches = branches_of(book.trials)
    found = measured(branches, "value", maximize=True)
    for id, branch in branches.items():
        through = [
            trial
            for trial in book.trials.values()
            if any(node.id == id for node, _, _ in trial.path_to(trial.requested))
        ]
        states = {
            (node.id, step): state.metrics["value"]
            for trial in through
            for node, start, stop in trial.path_to(trial.requested)
            for step, state in node.states.items()
            if start < step <= stop and step > branch.node.start and state.metrics is not None
        }
        assert found[id].value == max(states.values(), default=None)
    assert merit(None, maximize=True) < merit(-1e9, maximize=True) < merit(-1e9, maximize=False)


def test_results_of_another_study_on_a_shared_branch_are_not_counted_for_a_study() -> None:
    run = Search(SimulatedExecutor(1))
    one, two = (TrialAdded(TrialId(f"{name}/0"), {"a": s.constant(1)}, 8) for name in ("one", "two"))
    run.run([one], [8])
    run.run([two], [4])
    for study, steps_measured in (("one", [4, 8]), ("two", [4])):
        [found] = measured(branches_of(open_book(run.journal, study).trials), "value", maximize=True).values()
        assert [step for step, _ in found.points] == steps_measured


def test_a_branch_is_failed_if_its_evaluation_raised_or_training_raised_before_it() -> None:
    def states_now() -> dict[NodeId, BranchState]:
        book = open_book(run.journal)
        return states(book.account, book.branches, None)

    run = Search(SimulatedExecutor(1))
    run.driver.add([trial(0, {"a": s.constant(1)}, 8), trial(1, {"a": s.piecewise({0: 1, 4: 2})}, 8)])
    run.driver.log.write([TargetAsked(TrialId(f"study/{i}"), 8, DriverId("d")) for i in range(2)])
    root, *below = run.plan.nodes
    assert set(states_now().values()) == {"waiting"}
    run.driver.log.write([StageFailed(root.id, 3, True, UserFailure("", ""))])
    assert states_now() == {root.id: "failed"} | {node.id: "waiting" for node in below}
    run.driver.log.write([StageFailed(root.id, 3, False, UserFailure("", ""))])
    assert set(states_now().values()) == {"failed"}
