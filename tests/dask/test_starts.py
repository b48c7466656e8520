"""What it costs the driver to start chains. Without a cluster: tasks are only counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from hpstage.cluster import DaskExecutor
from hpstage.cluster.connection import Connection
from hpstage.plan.facts import WorkerId
from hpstage.plan.messages import Chain
from hpstage.testing.chains import chain
from tests.unit.calls import instructions_of


class Task:
    """A future of Dask that is never done."""

    def add_done_callback(self, on_done: object) -> None:
        pass


class Connected:
    """A connection to a cluster of workers on other hosts, and a client of it, which counts the tasks."""

    alive, cluster = True, None

    def __init__(self) -> None:
        self.client = self
        self.tasks: list[WorkerId] = []

    def submit(self, function: object, *arguments: object, workers: list[WorkerId], **options: object) -> Task:
        self.tasks += workers
        return Task()


class Walked(dict[Any, Any]):
    """A dictionary that is walked through in Python, even by functions written in C, so that each item counts."""

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():  # noqa: UP028  # this executes instructions for each
            yield key


def cost_of_starting(count: int, gang: int) -> int:
    """Return the instructions in which so many workers get a chain each, while all earlier chains run."""
    executor = DaskExecutor()
    inbox, connected = executor._inbox, Connected()
    executor._connection = cast(Connection, connected)
    inbox._workers, inbox._chains, executor._futures = Walked(), Walked(), Walked()
    workers = [WorkerId(f"tcp://{number}") for number in range(count)]
    for worker in workers:
        inbox.join(worker, "1")
    inbox.wait(0)
    chains: dict[WorkerId, Chain] = {}
    for number in range(0, count, gang):
        leader, *members = workers[number : number + gang]
        chains[leader] = replace(chain(f"c{number}", 5), gang=tuple(members))

    def start() -> None:
        for worker, one in chains.items():
            executor.start(worker, one)

    instructions = instructions_of(start)
    assert connected.tasks == workers and len(executor._futures) == count // gang
    return instructions


@pytest.mark.parametrize("gang", [1, 2])
def test_the_cost_of_starting_a_chain_does_not_grow_with_the_number_of_running_chains(gang: int) -> None:
    assert cost_of_starting(400, gang) < 2.2 * cost_of_starting(200, gang)
