"""What the executor makes of reports that are lost, doubled or late. Without Dask."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpstage.cluster.inbox import Inbox
from hpstage.cluster.messages import encode
from hpstage.errors import ClusterError, InternalError
from hpstage.plan.facts import ChainId, StateReached, WorkerId
from hpstage.plan.messages import BoundaryReached, ChainEnded, Report, WorkerJoined, WorkerLeft
from hpstage.testing.chains import NODE

CHAIN = ChainId("c")
WORKER = WorkerId("tcp://w")
REPORTS: list[BoundaryReached | ChainEnded] = [
    BoundaryReached(StateReached(CHAIN, WORKER, NODE, 0, 1, at=6.0, train_seconds=0.1, metrics={"loss": "inf"})),
    BoundaryReached(StateReached(CHAIN, WORKER, NODE, 1, 2, at=6.5, train_seconds=0.1)),
    ChainEnded(CHAIN, WORKER, "done", at=6.5),
]
ENCODED = [encode(report) for report in REPORTS]


@pytest.fixture
def inbox() -> Inbox:
    """With a chain that runs."""
    inbox = Inbox(clock=lambda: 7.0)
    inbox.join(WORKER)
    assert inbox.begin(CHAIN, WORKER)
    assert inbox.wait(0) == [WorkerJoined(WORKER, 7.0)]
    return inbox


@pytest.mark.parametrize("heard", [(), (0,), (0, 1), (0, 1, 2), (1, 2), (0, 2), (0, 0, 1, 1, 2, 2), (2, 1, 0)])
def test_each_report_is_handed_on_once_in_order_whatever_the_feed_does(inbox: Inbox, heard: tuple[int, ...]) -> None:
    for number in heard:
        inbox.hear(CHAIN, number, [ENCODED[number]])
    inbox.hear(CHAIN, 0, ENCODED)
    inbox.forget(CHAIN)
    inbox.hear(CHAIN, 2, ENCODED[2:])
    assert inbox.wait(0) == REPORTS


def test_nothing_is_heard_of_a_chain_whose_worker_has_left(inbox: Inbox) -> None:
    inbox.hear(CHAIN, 0, ENCODED[:1])
    assert inbox.leave(WORKER, "died") == [CHAIN]
    assert inbox.leave(WORKER, "died") == []
    inbox.hear(CHAIN, 0, ENCODED)
    inbox.forget(CHAIN)
    expected: list[Report] = [REPORTS[0], WorkerLeft(WORKER, 7.0, "died")]
    assert inbox.wait(0) == expected


def test_a_chain_whose_task_vanishes_is_lost(inbox: Inbox) -> None:
    inbox.forget(CHAIN)
    [end] = inbox.wait(0)
    assert isinstance(end, ChainEnded)
    assert end.outcome == "lost"


def test_a_worker_is_idle_again_from_the_end_of_its_chain_on(inbox: Inbox) -> None:
    with pytest.raises(InternalError, match="not idle"):
        inbox.begin(ChainId("d"), WORKER)
    inbox.hear(CHAIN, 0, ENCODED)
    assert inbox.begin(ChainId("d"), WORKER)


def test_a_chain_for_a_worker_that_has_left_is_not_started(inbox: Inbox) -> None:
    inbox.leave(WORKER, "died")
    assert not inbox.begin(ChainId("d"), WORKER)


def test_what_was_heard_before_a_failure_is_read_first(inbox: Inbox) -> None:
    inbox.hear(CHAIN, 0, ENCODED[:1])
    inbox.fail(ClusterError("gone"))
    assert inbox.wait(0) == REPORTS[:1]
    with pytest.raises(ClusterError, match="gone"):
        inbox.wait(0)


@pytest.mark.parametrize("shift", [3600.0, -3600.0])
def test_reports_of_a_worker_whose_clock_is_wrong_are_dated_by_ours(inbox: Inbox, shift: float) -> None:
    def dated(report: BoundaryReached | ChainEnded, at: float) -> BoundaryReached | ChainEnded:
        if isinstance(report, BoundaryReached):
            return BoundaryReached(replace(report.reached, at=at))
        return replace(report, at=at)

    inbox.hear(CHAIN, 0, [encode(dated(report, 6.0 + shift)) for report in REPORTS])
    assert inbox.wait(0) == [dated(report, 7.0) for report in REPORTS]
