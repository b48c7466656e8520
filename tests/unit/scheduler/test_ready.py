"""The queue of ready stages gives those with the longest paths, whatever was queued, removed and estimated again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.plan.facts import NodeId, TrialId
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.scheduler.branches import Branch
from hpstage.scheduler.ready import ReadyStages
from tests.unit.calls import calls_of

COUNT = 100
MAKER = PlannedTrial(TrialId("study/0"), 1)
change = st.one_of(
    st.tuples(st.just("put"), st.integers(0, COUNT - 1), st.integers(1, 9)),
    st.tuples(st.just("drop"), st.integers(0, COUNT - 1), st.just(0)),
    st.tuples(st.just("renew"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("look"), st.integers(1, COUNT), st.just(0)),
)


@given(st.lists(change, max_size=400))
def test_ready_stages_come_in_the_order_of_a_sorted_list(changes: list[tuple[str, int, int]]) -> None:
    branches = [Branch(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(COUNT // 2)]
    seconds, pace = dict[tuple[int, int], int](), 1.0  # by branch and step: two on each branch
    ready = ReadyStages(branches, lambda branch, step: seconds[branch.node.id, step] * pace)
    for what, number, value in changes:
        id, step = divmod(number, 2)
        if what == "put":
            seconds[id, step] = value
            ready.put(branches[id], step)
        elif what == "drop":
            ready.drop(branches[id], step)
            seconds.pop((id, step), None)
        elif what == "renew":
            pace = 1.0 / number
            ready.renew()
            for id, step in seconds:  # which of them come first stays known
                ready.put(branches[id], step)
        else:
            expected = sorted((-value * pace, id, step) for (id, step), value in seconds.items())[:number]
            assert [(-left, branch.node.id, step) for left, branch, step in ready.first(number)] == expected
    assert ready.count == len(seconds)
    ids = [(branch.node.id, step) for _, branch, step in ready.first(COUNT)]
    assert ids == sorted(seconds, key=lambda stage: (-seconds[stage], *stage))


class Plain:
    """The same queue, sorted at every look."""

    def __init__(self, estimates: dict[tuple[int, int], float]) -> None:
        self.estimates = estimates
        self.queued: dict[tuple[int, int], float] = {}
        self.unrated: set[int] = set()  # branches that are to be estimated again

    def renew(self) -> None:
        self.unrated = {id for id, _ in self.estimates}

    def rate(self, id: int) -> None:
        self.unrated.discard(id)
        self.queued |= {stage: self.estimates[stage] for stage in self.queued if stage[0] == id}

    def put(self, id: int, step: int) -> None:
        if id in self.unrated:
            self.rate(id)
        self.queued[id, step] = self.estimates[id, step]

    def first(self, most: int) -> list[tuple[float, int, int]]:
        while True:
            found = sorted((-seconds, *stage) for stage, seconds in self.queued.items())[:most]
            unrated = self.unrated.intersection(id for _, id, _ in found)
            if not unrated:
                return [(-negative, id, step) for negative, id, step in found]
            for id in unrated:
                self.rate(id)


stages = st.tuples(st.integers(0, 2), st.integers(0, 1))
change_of_stages = st.one_of(
    st.tuples(st.just("estimate"), stages, st.integers(0, 4)),
    st.tuples(st.just("put"), stages, st.just(0)),
    st.tuples(st.just("drop"), stages, st.just(0)),
    st.tuples(st.just("renew"), st.just((0, 0)), st.just(0)),
)


@given(st.lists(st.tuples(change_of_stages, st.integers(0, 6)), max_size=100))
def test_the_ready_queue_returns_the_same_stages_as_a_queue_sorted_at_every_look(
    turns: list[tuple[tuple[str, tuple[int, int], int], int]],
) -> None:
    """What was found is returned again as long as nothing before it has changed."""
    branches = [Branch(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(3)]
    estimates = {(id, step): float(step) for id in range(3) for step in range(2)}
    ready = ReadyStages(branches, lambda branch, step: estimates[branch.node.id, step])
    plain = Plain(estimates)
    for (what, (id, step), seconds), looked_at in turns:
        if what == "estimate":
            estimates[id, step] = float(seconds)
        elif what == "put":
            ready.put(branches[id], step)
            plain.put(id, step)
        elif what == "drop":
            ready.drop(branches[id], step)
            plain.queued.pop((id, step), None)
        else:
            ready.renew()
            plain.renew()
        if looked_at:
            found = ready.first(looked_at)
            assert [(left, branch.node.id, step) for left, branch, step in found] == plain.first(looked_at)
            found.clear()  # it is the caller's
        assert ready.count == len(plain.queued)


def test_reading_the_first_ready_stages_again_is_cheaper_if_none_of_them_changed() -> None:
    branches = [Branch(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(COUNT)]
    ready = ReadyStages(branches, lambda branch, step: float(branch.node.id))
    for branch in branches[1:]:
        ready.put(branch, 0)
    searching = calls_of(lambda: ready.first(8))
    ready.put(branches[0], 0)  # it comes last
    again = [calls_of(lambda most=most: ready.first(most)) for most in (8, 4, 1)]
    assert max(again) < searching
    ready.drop(branches[COUNT - 1], 0)
    assert calls_of(lambda: ready.first(8)) == searching


def test_ready_stages_are_sorted_again_when_their_estimates_are_renewed() -> None:
    branches = [Branch(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(3)]
    seconds = [3.0, 2.0, 1.0]
    ready = ReadyStages(branches, lambda branch, step: seconds[branch.node.id])
    for branch in branches:
        ready.put(branch, 0)
    assert [(left, branch.node.id) for left, branch, _ in ready.first(2)] == [(3.0, 0), (2.0, 1)]
    seconds[1] = 5.0
    ready.renew()
    assert [(left, branch.node.id) for left, branch, _ in ready.first(2)] == [(5.0, 1), (3.0, 0)]


def test_queueing_one_ready_stage_renews_the_estimates_of_all_stages_of_its_branch() -> None:
    branches = [Branch(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(2)]
    seconds = {(0, 0): 9.0, (0, 10): 5.0, (0, 20): 4.0, (1, 0): 7.0}
    ready = ReadyStages(branches, lambda branch, step: seconds[branch.node.id, step])
    for id, step in seconds:
        ready.put(branches[id], step)
    ready.first(2)
    seconds |= {(0, 0): 18.0, (0, 10): 10.0, (0, 20): 8.0}
    ready.renew()
    ready.put(branches[0], 0)  # as of a node that was measured
    assert ready.first(4) == [
        (18.0, branches[0], 0),
        (10.0, branches[0], 10),
        (8.0, branches[0], 20),
        (7.0, branches[1], 0),
    ]


@pytest.mark.parametrize("paces", [(1.0, 1.2), (1.0, 0.8), (1.0, -1.0)], ids=["longer", "shorter", "reversed"])
def test_the_cost_to_renew_estimates_grows_linearly_with_the_number_of_ready_stages(paces: tuple[float, float]) -> None:
    def cost(most: int) -> int:
        branches = [Branch(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(most)]
        seconds = [2.0 * most - id for id in range(most)]
        ready = ReadyStages(branches, lambda branch, step: 9.0 * most + pace * seconds[branch.node.id])
        pace = paces[0]
        for branch in branches:
            ready.put(branch, 0)
        ready.first(most)
        pace = paces[1]
        ready.renew()
        return calls_of(lambda: ready.first(most))

    assert cost(800) < 1.5 * 8 * cost(100)
