"""The queue of heads gives those with the longest paths, whatever was queued, removed and estimated anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.plan.facts import NodeId, TrialId
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.scheduler.branches import Line
from hpstage.scheduler.ready import Heads
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
def test_the_first_heads_are_those_of_a_sorted_list(changes: list[tuple[str, int, int]]) -> None:
    lines = [Line(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(COUNT // 2)]
    seconds, pace = dict[tuple[int, int], int](), 1.0  # by line and step: two on each line
    heads = Heads(lines, lambda line, step: seconds[line.node.id, step] * pace)
    for what, number, value in changes:
        id, step = divmod(number, 2)
        if what == "put":
            seconds[id, step] = value
            heads.put(lines[id], step)
        elif what == "drop":
            heads.drop(lines[id], step)
            seconds.pop((id, step), None)
        elif what == "renew":
            pace = 1.0 / number
            heads.renew()
            for id, step in seconds:  # which of them come first stays known
                heads.put(lines[id], step)
        else:
            expected = sorted((-value * pace, id, step) for (id, step), value in seconds.items())[:number]
            assert [(-left, line.node.id, step) for left, line, step in heads.first(number)] == expected
    assert heads.count == len(seconds)
    ids = [(line.node.id, step) for _, line, step in heads.first(COUNT)]
    assert ids == sorted(seconds, key=lambda head: (-seconds[head], *head))


def test_heads_that_are_estimated_anew_as_they_are_looked_at_stay_in_order() -> None:
    lines = [Line(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(3)]
    seconds = [3.0, 2.0, 1.0]
    heads = Heads(lines, lambda line, step: seconds[line.node.id])
    for line in lines:
        heads.put(line, 0)
    seconds[1] = 5.0
    heads.renew()
    assert [(left, line.node.id) for left, line, _ in heads.first(2)] == [(5.0, 1), (3.0, 0)]


def test_with_one_head_of_a_line_all_of_them_are_estimated_anew() -> None:
    lines = [Line(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(2)]
    seconds = {(0, 0): 9.0, (0, 10): 5.0, (0, 20): 4.0, (1, 0): 7.0}
    heads = Heads(lines, lambda line, step: seconds[line.node.id, step])
    for id, step in seconds:
        heads.put(lines[id], step)
    heads.first(2)
    seconds |= {(0, 0): 18.0, (0, 10): 10.0, (0, 20): 8.0}
    heads.renew()
    heads.put(lines[0], 0)  # as of a node that was measured
    assert heads.first(4) == [(18.0, lines[0], 0), (10.0, lines[0], 10), (8.0, lines[0], 20), (7.0, lines[1], 0)]


@pytest.mark.parametrize("paces", [(1.0, 1.2), (1.0, 0.8), (1.0, -1.0)], ids=["longer", "shorter", "reversed"])
def test_looking_at_many_heads_that_are_estimated_anew_costs_as_much_for_each(paces: tuple[float, float]) -> None:
    def cost(most: int) -> int:
        lines = [Line(Node(NodeId(id), None, 0, (), (), None, MAKER), None, 1.0) for id in range(most)]
        seconds = [2.0 * most - id for id in range(most)]
        heads = Heads(lines, lambda line, step: 9.0 * most + pace * seconds[line.node.id])
        pace = paces[0]
        for line in lines:
            heads.put(line, 0)
        heads.first(most)
        pace = paces[1]
        heads.renew()
        return calls_of(lambda: heads.first(most))

    assert cost(800) < 1.5 * 8 * cost(100)
