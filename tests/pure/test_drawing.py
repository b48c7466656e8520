"""The drawing of a report: where bars lie on the timeline, and lines in the stage tree."""

from __future__ import annotations

import math
from itertools import pairwise

from hpstage.events import ChainLost, NodeId, StateReached, WorkerId
from hpstage.report.stage_tree import lay_out
from hpstage.report.timeline import bars
from hpstage.result import Result
from tests.pure.reports import search


def test_bars_of_a_worker_do_not_overlap_and_sum_to_its_seconds() -> None:
    # A simulated chain that is amended while it loads gets the rest of its loading for nothing: hence none here.
    result = search(load_seconds=0.0)
    drawn = list(bars(result.journal))
    assert math.isclose(sum(bar.seconds for bar in drawn), result.savings.worker_seconds)
    for worker in {bar.worker for bar in drawn}:
        mine = sorted((bar.began, bar.began + bar.seconds) for bar in drawn if bar.worker == worker)
        assert all(stop <= start + 1e-9 for (_, stop), (start, _) in pairwise(mine))


def test_bars_lie_before_the_time_of_their_fact_in_the_order_in_which_things_are_done() -> None:
    worker = WorkerId("w")
    reached = StateReached(
        NodeId(0), 0, 1, worker, at=10.0, train_seconds=4.0, load_seconds=1.0, evaluate_seconds=2.0, save_seconds=0.5
    )
    lost = ChainLost(NodeId(0), 1, worker, at=12.0, outcome="lost", seconds=1.5, steps=1)
    assert [(bar.activity, bar.began, bar.began + bar.seconds) for bar in bars([reached, lost])] == [
        ("load", 2.5, 3.5),
        ("train", 3.5, 7.5),
        ("evaluate", 7.5, 9.5),
        ("save", 9.5, 10.0),
        ("thrown away", 10.5, 12.0),
    ]


def test_no_line_of_the_stage_tree_is_crossed_or_overlaid() -> None:
    result = search()
    planned = {int(id.rpartition("/")[2]): trial for id, trial in result.plan.trials.items()}
    lanes = lay_out(planned, "value", maximize=True)
    assert sum(lane.reach - lane.node.start for lane in lanes) == result.plan.steps_unique
    assert sorted(number for lane in lanes for number in lane.ends) == sorted(planned)
    assert max(lane.value or 0.0 for lane in lanes) == lanes_best(result)
    rows = {lane.node.id: lane.row for lane in lanes}
    for lane in lanes:
        beside = [other for other in lanes if other.row == lane.row and other is not lane]
        assert all(other.reach <= lane.node.start or lane.reach <= other.node.start for other in beside)
        if lane.node.parent is None:
            continue
        top, x = rows[lane.node.parent.id], lane.node.start
        between = [other for other in lanes if top < other.row < lane.row]
        assert not any(other.node.start < x <= other.reach for other in between)


def lanes_best(result: Result) -> float:
    """The best value that any state of the plan was found to have."""
    metrics = [state.metrics for node in result.plan.nodes for state in node.states.values()]
    return max(found["value"] for found in metrics if found is not None)
