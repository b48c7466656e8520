"""States that workers will need next are announced: to the one that finishes first, of the longest waiting paths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import StateKey, TrialAdded, WorkerId
from hpstage.plan.messages import Chain
from hpstage.scheduler import expectation
from tests.records import separated
from tests.unit.searches import Search, searches, trial

FORKS = [trial(i, {"a": s.piecewise({0: 1, 6: 2 + i})}, 12 + i) for i in range(6)]
"""One trunk of 6 steps, and six branches of different lengths."""


class Listening(SimulatedExecutor):
    """Records which states were announced to workers before each chain."""

    def __init__(self, workers: int, **options: Any) -> None:
        super().__init__(workers, **options)
        self.announced: list[tuple[WorkerId, tuple[StateKey, ...]]] = []
        self.expected: dict[WorkerId, tuple[StateKey, ...]] = {}
        self.hits: list[bool] = []

    def expect(self, worker: WorkerId, keys: Any) -> None:
        self.announced.append((worker, tuple(keys)))
        self.expected[worker] = tuple(keys)

    def start(self, worker: WorkerId, chain: Chain) -> None:
        if chain.source is not None and self.clock() > 0:
            self.hits.append(chain.source in self.expected.get(worker, ()))
        super().start(worker, chain)


def test_waiting_chains_start_from_states_that_were_announced_to_their_workers() -> None:
    executor = Listening(2)
    Search(executor).run(FORKS, [12 + i for i in range(6)])
    assert executor.hits.count(False) <= 1, "but for those that were ready and started at once"
    assert executor.hits.count(True) >= 3


def test_no_state_is_announced_to_workers_while_no_chain_waits() -> None:
    executor = Listening(3)
    Search(executor).run([trial(i, {"a": s.constant(i)}, 8) for i in range(3)], [8] * 3)
    assert executor.announced == []


@pytest.mark.parametrize(
    "trials", [FORKS, [trial(i, {"a": s.constant(i)}, 8) for i in range(9)]], ids=["forks", "roots"]
)
def test_expected_states_are_announced_to_a_worker_only_when_they_change(trials: list[TrialAdded]) -> None:
    executor = Listening(2)
    Search(executor, checkpoint_every=1).run(trials, [added.steps for added in trials])
    last: dict[WorkerId, tuple[StateKey, ...]] = {}
    for worker, keys in executor.announced:
        assert last.get(worker, ()) != keys, "at first a worker expects nothing"
        last[worker] = keys
    assert all(keys == () for keys in last.values()), "in the end nothing waits"


def test_expected_states_are_announced_to_few_workers_however_many_workers_train() -> None:
    executor = Listening(20)
    trials = [trial(i, {"a": s.piecewise({0: i % 5, 3: i})}, 8 + i % 7) for i in range(100)]
    Search(executor).run(trials, [8 + i % 7 for i in range(100)])
    current: dict[WorkerId, tuple[StateKey, ...]] = {}
    most = 0
    for worker, keys in executor.announced:
        current[worker] = keys
        most = max(most, sum(bool(keys) for keys in current.values()))
    assert 0 < most <= 2 * expectation.EXPECTING, "earlier ones are withdrawn within the same turn"


@pytest.mark.ci
@given(searches(), st.integers(1, 4))
def test_announcing_states_to_workers_changes_no_decision_of_the_scheduler(
    trials: list[TrialAdded], workers: int
) -> None:
    stops = [8] * len(trials)

    def facts(executor: SimulatedExecutor) -> list[bytes]:
        search = Search(executor, checkpoint_every=2)
        search.run(trials, stops)
        records = separated(search.journal).read()[1:]  # the first one names the plan
        return [record for record in records if b"WorkersChanged" not in record]  # these name the executor

    listening = Listening(workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expectation.Expectation, "update", lambda *_: [])
        without = facts(SimulatedExecutor(workers))
    assert facts(listening) == without
    for _, keys in listening.announced:
        assert len(keys) == len(set(keys)) <= expectation._STATES
