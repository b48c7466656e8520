"""What the executor makes of reports that are lost, doubled or late. Without Dask."""

from __future__ import annotations

import threading
from itertools import product

import pytest
from msgspec.structs import replace

from hpstage.cluster.inbox import Inbox
from hpstage.cluster.messages import encode
from hpstage.errors import ClusterError, InternalError
from hpstage.plan.facts import ChainId, StateReached, StateRef, WorkerId
from hpstage.plan.messages import BoundaryReached, ChainEnded, Report, WorkerJoined, WorkerLeft
from hpstage.testing.chains import NODE
from tests.unit.calls import instructions_of

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
    inbox.join(WORKER, "1")
    assert inbox.wait(0) == [WorkerJoined(WORKER, 7.0)]
    assert inbox.begin(CHAIN, WORKER) == ["1"]
    return inbox


@pytest.mark.parametrize("received", [(), (0,), (0, 1), (0, 1, 2), (1, 2), (0, 2), (0, 0, 1, 1, 2, 2), (2, 1, 0)])
def test_each_report_is_delivered_once_in_order_if_the_feed_loses_or_repeats_reports(
    inbox: Inbox, received: tuple[int, ...]
) -> None:
    for number in received:
        inbox.receive(CHAIN, number, [ENCODED[number]])
    inbox.receive(CHAIN, 0, ENCODED)
    inbox.forget(CHAIN)
    inbox.receive(CHAIN, 2, ENCODED[2:])
    assert inbox.wait(0) == REPORTS


def test_reports_of_a_chain_whose_worker_has_left_are_dropped(inbox: Inbox) -> None:
    inbox.receive(CHAIN, 0, ENCODED[:1])
    assert inbox.leave(WORKER, "died") == [CHAIN]
    assert inbox.leave(WORKER, "died") == []
    inbox.receive(CHAIN, 0, ENCODED)
    inbox.forget(CHAIN)
    expected: list[Report] = [REPORTS[0], WorkerLeft(WORKER, 7.0, "died")]
    assert inbox.wait(0) == expected


def test_a_chain_whose_dask_task_vanishes_is_reported_as_lost(inbox: Inbox) -> None:
    inbox.forget(CHAIN)
    [end] = inbox.wait(0)
    assert isinstance(end, ChainEnded)
    assert end.outcome == "lost"


def test_the_last_state_of_a_chain_is_reported_together_with_the_end_of_the_chain(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpstage.cluster.inbox._TOGETHER", 1000.0)
    other = ChainId("d")
    inbox.receive(CHAIN, 0, ENCODED)
    inbox.wait(0)
    inbox.begin(other, WORKER, last=StateRef(NODE, 2))
    reports = [replace(report, reached=replace(report.reached, chain=other)) for report in REPORTS[:2]]  # type: ignore[union-attr]
    end = replace(REPORTS[2], chain=other)
    inbox.receive(other, 0, [encode(reports[0])])
    assert inbox.wait(1000) == reports[:1]  # it is trained further
    inbox.receive(other, 1, [encode(reports[1])])
    sending = threading.Thread(target=inbox.receive, args=(other, 2, [encode(end)]))
    with inbox._changed:  # whoever waits gives it up
        sending.start()
        assert inbox.wait(1000) == [reports[1], end]
    sending.join()


def test_the_last_state_of_a_chain_is_reported_soon_if_the_end_of_the_chain_is_delayed(inbox: Inbox) -> None:
    other = ChainId("d")
    inbox.receive(CHAIN, 0, ENCODED)
    inbox.wait(0)
    inbox.begin(other, WORKER, last=StateRef(NODE, 2))
    last = replace(REPORTS[1], reached=replace(REPORTS[1].reached, chain=other))  # type: ignore[union-attr]
    inbox.receive(other, 0, [encode(last)])
    assert inbox.wait(1000) == [last]


def test_a_worker_is_idle_after_the_end_of_its_chain(inbox: Inbox) -> None:
    with pytest.raises(InternalError, match="not idle"):
        inbox.begin(ChainId("d"), WORKER)
    inbox.receive(CHAIN, 0, ENCODED)
    assert inbox.begin(ChainId("d"), WORKER)


def test_a_chain_for_a_worker_that_has_left_is_not_started(inbox: Inbox) -> None:
    inbox.leave(WORKER, "died")
    assert not inbox.begin(ChainId("d"), WORKER)


def test_the_death_of_an_idle_worker_is_not_blamed_on_a_chain_started_afterwards(inbox: Inbox) -> None:
    inbox.receive(CHAIN, 0, ENCODED)
    inbox.forget(CHAIN)
    inbox.leave(WORKER, "died", "killed")
    assert inbox.begin(ChainId("d"), WORKER) == []
    assert inbox.wait(0)[-1] == WorkerLeft(WORKER, 7.0, "closed", "killed")


def test_removing_an_earlier_process_of_a_worker_keeps_the_present_process(inbox: Inbox) -> None:
    assert inbox.join(WORKER, "2") == [CHAIN]  # nobody has said yet that the first one is gone
    assert inbox.leave(WORKER, "died", incarnation="1") == []
    assert inbox.workers == (WORKER,)
    assert inbox.wait(0)[1:] == [WorkerJoined(WORKER, 7.0)]
    assert inbox.begin(ChainId("d"), WORKER) == ["2"]


def test_a_gang_with_a_replaced_worker_is_orphaned(inbox: Inbox) -> None:
    other = WorkerId("tcp://v")
    inbox.join(other, "1")
    inbox.wait(0)
    inbox.receive(CHAIN, 0, ENCODED)
    inbox.leave(other, "died")
    inbox.join(other, "2")
    assert inbox.begin(ChainId("d"), WORKER, (other,)) == ["1", ""]
    assert inbox.orphaned() == [ChainId("d")]


def costs_of(workers: int) -> list[int]:
    """Return the instructions in which so many workers join, start chains in gangs of two, and leave."""
    inbox = Inbox(clock=lambda: 7.0)
    hosts = [WorkerId(f"tcp://{number}") for number in range(workers)]
    gangs = [(ChainId(f"c{number}"), *hosts[number : number + 2]) for number in range(0, workers, 2)]

    def join() -> None:
        for host in hosts:
            inbox.join(host, "1")
            inbox.wait(0)

    def start() -> None:
        for chain, leader, member in gangs:
            inbox.begin(chain, leader, (member,))
            assert inbox.orphaned() == []

    def leave() -> None:
        for host in hosts:
            inbox.leave(host, "died")

    return [instructions_of(action) for action in (join, start, leave)]


def test_the_cost_per_worker_does_not_grow_with_the_number_of_workers() -> None:
    assert all(twice < 2.2 * once for once, twice in zip(costs_of(200), costs_of(400), strict=True))


class Interleaved:
    """A worker whose process dies and is replaced, and a driver that knows of it only what it has read.

    Each method is one step of any of them, and does nothing where it is impossible.
    """

    def __init__(self) -> None:
        self.inbox = Inbox(clock=lambda: 7.0)
        self.alive = 0  # the incarnation; 0 if there is none
        self.born = 0
        self.sent: dict[ChainId, int] = {}  # to which incarnation
        self.begun = 0
        self.idle = False  # what the driver believes, as well as the next two
        self.current: ChainId | None = None
        self.over: set[ChainId] = set()
        self.replace()

    def die(self) -> None:
        if self.alive:
            lost = self.inbox.leave(WORKER, "died", incarnation=str(self.alive))
            assert all(self.sent[chain] == self.alive for chain in lost)
            self.alive = 0

    def replace(self) -> None:
        if not self.alive:
            self.born += 1
            self.alive = self.born
            self.inbox.join(WORKER, str(self.alive))

    def read(self) -> None:
        for report in self.inbox.wait(0):
            match report:
                case WorkerJoined():
                    assert not self.idle
                    assert self.current is None
                    self.idle = True
                case WorkerLeft():
                    assert self.idle or self.current is not None
                    if self.current is not None:
                        self.over.add(self.current)
                    self.idle, self.current = False, None
                case ChainEnded(chain):
                    assert chain == self.current, "a report of a chain that the driver knows to be over"
                    self.over.add(chain)
                    self.idle, self.current = True, None

    def begin(self) -> None:
        if self.idle:
            self.begun += 1
            self.current, self.idle = ChainId(str(self.begun)), False
            for incarnation in self.inbox.begin(self.current, WORKER):
                assert int(incarnation) == self.alive
                self.sent[self.current] = self.alive

    def report(self) -> None:
        """All chains that were ever sent report their ends, also those whose process is dead: reports may be late."""
        for chain in self.sent:
            self.inbox.receive(chain, 0, [encode(ChainEnded(chain, WORKER, "done", at=7.0))])


STEPS = [Interleaved.die, Interleaved.replace, Interleaved.read, Interleaved.begin, Interleaved.report]


@pytest.mark.ci
def test_no_order_of_deaths_and_messages_leaves_a_chain_on_a_dead_process() -> None:
    trained = 0
    for steps in product(STEPS, repeat=7):
        world = Interleaved()
        for step in steps:
            step(world)
        world.replace()
        world.read()
        assert world.idle or world.current in world.sent
        if world.current is not None:
            assert world.sent[world.current] == world.alive, "a chain of a dead process that nobody knows to be lost"
        trained += len(world.over & world.sent.keys())
    assert trained > 0


def test_reports_received_before_a_cluster_failure_are_delivered_before_its_error(inbox: Inbox) -> None:
    inbox.receive(CHAIN, 0, ENCODED[:1])
    inbox.fail(ClusterError("gone"))
    assert inbox.wait(0) == REPORTS[:1]
    with pytest.raises(ClusterError, match="gone"):
        inbox.wait(0)


@pytest.mark.parametrize("shift", [3600.0, -3600.0])
def test_reports_of_a_worker_with_a_wrong_clock_are_dated_by_the_drivers_clock(inbox: Inbox, shift: float) -> None:
    def dated(report: BoundaryReached | ChainEnded, at: float) -> BoundaryReached | ChainEnded:
        if isinstance(report, BoundaryReached):
            return BoundaryReached(replace(report.reached, at=at))
        return replace(report, at=at)

    inbox.receive(CHAIN, 0, [encode(dated(report, 6.0 + shift)) for report in REPORTS])
    assert inbox.wait(0) == [dated(report, 7.0) for report in REPORTS]
