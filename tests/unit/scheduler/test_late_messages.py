"""The planner when orders reach workers late and reports reach the planner late, as on a real cluster."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor, value_of_key
from hpstage.plan.facts import ChainId, TrialAdded, WorkerId
from hpstage.plan.messages import Amendment, BoundaryReached, Chain, Report
from hpstage.scheduler.answers import Answer
from tests.invariants import is_idle, validate_scheduler
from tests.unit.searches import Search, histories, schedules, trial

Delay = Callable[[], float]


class LateExecutor(SimulatedExecutor):
    """Orders arrive ``out()`` seconds late, reports ``back()`` seconds late; those of one chain or worker in order."""

    def __init__(self, workers: int, *, out: Delay = lambda: 0.0, back: Delay = lambda: 0.0, **options: float) -> None:
        self._out, self._back = out, back
        self._latest: dict[Hashable, float] = {}
        self._arrived: list[Report] = []
        self.amendments = 0
        super().__init__(workers, **options)  # type: ignore[arg-type]

    def start(self, worker: WorkerId, chain: Chain) -> None:
        def act() -> None:
            if worker in self.cluster.live:  # else it has died, which is reported already
                super(LateExecutor, self).start(worker, chain)

        self._send(chain.id, self._out(), act)

    def amend(self, amendment: Amendment) -> None:
        self.amendments += 1
        self._send(amendment.chain, self._out(), lambda: super(LateExecutor, self).amend(amendment))

    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        self._send(chain, self._out(), lambda: super(LateExecutor, self).stop(chain, keep=keep))

    def wait(self, timeout: float | None) -> list[Report]:
        while not self._arrived and not self.nothing_is_coming():
            for report in super().wait(None):
                payload = report.reached if isinstance(report, BoundaryReached) else report
                self._send(payload.worker, self._back(), lambda report=report: self._take(report))
        arrived, self._arrived = self._arrived, []
        return arrived

    def _take(self, report: Report) -> None:
        self._arrived.append(report)
        self.cluster.wake()

    def nothing_is_coming(self) -> bool:
        return not self.cluster._agenda

    def _send(self, whose: Hashable, delay: float, act: Callable[[], None]) -> None:
        """Send a message that leaves now, and never arrives before an earlier one of the same."""
        self._latest[whose] = max(self._latest.get(whose, 0.0), self.clock() + delay)
        self.cluster.at(self._latest[whose] - self.clock(), act)


def finish(search: Search, executor: LateExecutor) -> list[Answer]:
    """All answers still to come. Fails where nothing is coming although something is wanted."""
    answers: list[Answer] = []
    for _ in range(5000):
        answers += search.driver.wait()
        validate_scheduler(search.scheduler)
        if is_idle(search.scheduler):
            return answers
        assert not executor.nothing_is_coming() or search.scheduler.running, "the search hangs"
    raise AssertionError("messages go to and fro without end")


def check(search: Search, answers: list[Answer], expected: set[tuple[str, int]]) -> None:
    """Each target is answered once, with the metrics of its state."""
    targets = [(answer.trial, answer.step) for answer in answers]
    assert len(targets) == len(set(targets))
    assert expected <= set(targets)
    for answer in answers:
        key = search.plan.key(search.plan.trials[answer.trial].node_at(answer.step), answer.step)
        assert answer.metrics == value_of_key(key, answer.step)


def test_a_request_for_a_step_that_the_chain_has_passed_is_trained_from_the_previous_checkpoint():
    executor = LateExecutor(1, out=lambda: 1.0, back=lambda: 1.5)
    search = Search(executor, checkpoint_every=2)
    search.driver.add([trial(i, {"a": s.constant(1)}, 8) for i in range(3)])
    search.driver.ask("study/0", 8)
    search.driver.ask("study/1", 4)
    while not search.plan.totals.steps_trained:
        search.driver.wait()
    search.driver.ask("study/2", 3)  # the state at 2 is known to be kept; the chain is beyond 4 when word comes
    answers = finish(search, executor)
    check(search, answers, {("study/0", 8), ("study/1", 4), ("study/2", 3)})
    assert search.plan.totals.steps_trained == 8 + 1


def test_states_are_saved_at_intervals_even_if_steps_are_faster_than_messages():
    executor = LateExecutor(1, back=lambda: 1.5)
    search = Search(executor, checkpoint_every=1)
    search.driver.add([trial(0, {"a": s.constant(1)}, 64)])
    search.driver.ask("study/0", 64)
    finish(search, executor)
    [node] = search.plan.nodes
    kept = sorted(step for step, state in node.states.items() if state.kept is not None)
    assert kept == list(range(1, 65))
    assert executor.amendments <= 1


@st.composite
def orders(draw: st.DrawFn) -> list[tuple[TrialAdded, int]]:
    """Targets of up to eight trials, in the order of asking."""
    steps = draw(st.sampled_from([4, 8, 16]))
    count = draw(st.integers(1, 8))
    trials = [trial(i, {"a": draw(schedules(steps)), "b": draw(schedules(steps))}, steps) for i in range(count)]
    targets = [
        (added, stop)
        for added in trials
        for stop in sorted(draw(st.sets(st.integers(1, steps), min_size=1, max_size=3)))
    ]
    return draw(st.permutations(targets))


@pytest.mark.ci
@pytest.mark.parametrize("latency", [0.3, 3.0, 12.0])
@given(order=orders(), seed=st.integers(0, 2**20), workers=st.integers(1, 4))
@settings(max_examples=20)
def test_every_target_is_answered_once_however_late_messages_are(latency, order, seed, workers):
    rng = random.Random(seed)

    def late() -> float:
        return rng.choice([0.0, 0.0, rng.uniform(0.0, latency)])

    executor = LateExecutor(
        workers, out=late, back=late, evaluate_seconds=rng.choice([0.0, 0.3]), load_seconds=rng.choice([0.0, 0.7])
    )
    search = Search(executor, max_losses=1000, checkpoint_every=rng.choice([1, 2, 3, 10**9]))
    for _ in range(rng.choice([0, 0, 2])):
        executor.cluster.kill(WorkerId(f"sim-{rng.randrange(workers)}"), rng.uniform(0, 30))
        executor.cluster.join(rng.uniform(0, 40))
    answers: list[Answer] = []
    requests: set[tuple[str, int]] = set()
    for added, stop in order:
        if added.trial not in search.plan.trials:
            search.driver.add([added])
        search.driver.ask(added.trial, stop)
        requests.add((added.trial, stop))
        for _ in range(rng.randint(0, 3)):
            if not is_idle(search.scheduler):
                answers += search.driver.wait()
                validate_scheduler(search.scheduler)
        if executor.kept and rng.random() < 0.1:
            executor.kept.discard(rng.choice(sorted(executor.kept)))
    answers += finish(search, executor)
    check(search, answers, requests)


@given(order=orders(), seed=st.integers(0, 2**20), workers=st.integers(1, 4))
@settings(max_examples=20)
def test_steps_requested_at_the_start_are_trained_once_however_late_messages_are(order, seed, workers):
    rng = random.Random(seed)
    late: Delay = functools.partial(rng.uniform, 0.0, 5.0)
    executor = LateExecutor(workers, out=late, back=late)
    search = Search(executor)
    search.driver.add(list({added.trial: added for added, _ in order}.values()))
    for added, stop in order:
        search.driver.ask(added.trial, stop)
    check(search, finish(search, executor), {(added.trial, stop) for added, stop in order})
    trials, stops = zip(*order, strict=True)
    assert search.plan.totals.steps_trained == len(histories(trials, stops))


@given(order=orders(), seed=st.integers(0, 2**20), workers=st.integers(1, 4))
@settings(max_examples=12)
def test_a_stop_loses_no_trained_step_however_late_messages_are(order, seed, workers):
    rng = random.Random(seed)
    late: Delay = functools.partial(rng.uniform, 0.0, 5.0)
    executor = LateExecutor(workers, out=late, back=late)
    search = Search(executor, checkpoint_every=rng.choice([1, 3, 10**9]))
    search.driver.add(list({added.trial: added for added, _ in order}.values()))
    for added, stop in order:
        search.driver.ask(added.trial, stop)
    answers: list[Answer] = []
    for _ in range(rng.randint(1, 3)):
        for _ in range(rng.randint(0, 4)):
            if not is_idle(search.scheduler):
                answers += search.driver.wait()
        search.driver.finish()
        validate_scheduler(search.scheduler)
    check(search, answers + finish(search, executor), {(added.trial, stop) for added, stop in order})
    trials, stops = zip(*order, strict=True)
    assert search.plan.totals.steps_trained == len(histories(trials, stops))
    assert search.driver.accounting.whole().steps_wasted == 0
