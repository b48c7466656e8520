"""Gangs: several workers train one chain where they would have nothing else to do. Simulated, with the real driver."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import ChainLost, ChainStarted, StateReached, WorkerId
from hpstage.plan.log import read_facts
from hpstage.plan.messages import Chain, ChainEnded, Report
from hpstage.scheduler.widths import Widths
from tests.unit.searches import Search, histories, searches, trial

pytestmark = pytest.mark.sampled(4)


def facts(search: Search, kind: type) -> list:
    return [fact for fact in read_facts(search.journal) if isinstance(fact, kind)]


def widths_of(search: Search) -> list[int]:
    return [1 + len(fact.gang) for fact in facts(search, ChainStarted)]


@pytest.mark.ci
@given(searches(), st.data(), st.integers(1, 9), st.sampled_from([2, 4, 8]))
def test_gangs_of_any_width_give_the_metrics_of_one_worker_even_if_workers_die(trials, data, workers, most):
    efficiency = data.draw(st.floats(0.4, 1.0))
    executor = SimulatedExecutor(
        workers,
        virtual_nodes=most,
        speedup=lambda width: width * efficiency ** math.log2(width),
        gather_seconds=data.draw(st.sampled_from([0.0, 0.3])),
        load_seconds=data.draw(st.sampled_from([0.0, 0.2])),
        save_seconds=data.draw(st.sampled_from([0.0, 0.2])),
        step_seconds=100.0,
    )
    search = Search(executor, max_losses=100)
    for place in range(data.draw(st.integers(0, 3))):
        when = data.draw(st.floats(0, 2000))
        executor.cluster.kill(WorkerId(f"sim-{data.draw(st.integers(0, workers + place - 1))}"), when)
        executor.cluster.join(when + 0.5)
    stops = [added.steps for added in trials]
    answers = search.run(trials, stops)
    alone = Search(SimulatedExecutor(1)).run(trials, stops)
    assert {(a.trial, a.metrics["value"]) for a in answers} == {(a.trial, a.metrics["value"]) for a in alone}
    # The first step of a chain is reported before a state is kept; with its worker it is lost, and trained again.
    lost = {fact.chain for fact in facts(search, ChainLost)}
    unkept = [fact for fact in facts(search, StateReached) if fact.kept is None and fact.chain in lost]
    again = search.plan.totals.steps_trained - len(histories(trials, stops))
    assert 0 <= again <= sum(fact.step - fact.start for fact in unkept)
    for fact in facts(search, ChainStarted):
        assert len({fact.worker, *fact.gang}) == 1 + len(fact.gang) in (1, 2, 4, 8)


def test_idle_workers_form_a_gang_on_a_single_chain_and_their_seconds_are_added_up():
    search = Search(SimulatedExecutor(4, virtual_nodes=4, step_seconds=10.0))
    search.run([trial(0, {"a": s.constant(1)}, 80)], [80])
    assert widths_of(search) == [4]
    assert search.executor.clock() == pytest.approx(200.0)
    totals = search.plan.totals
    assert totals.train_seconds == pytest.approx(800.0) == totals.worker_seconds
    first, rest = facts(search, StateReached)  # the first step is reported, so that its seconds are known
    assert (first.workers, first.own_seconds, first.began) == (4, pytest.approx(10.0), pytest.approx(0.0))
    assert (rest.workers, rest.own_seconds, rest.began) == (4, pytest.approx(790.0), pytest.approx(2.5))


def test_no_gang_is_formed_while_there_is_a_chain_for_each_worker():
    search = Search(SimulatedExecutor(4, virtual_nodes=4, step_seconds=10.0))
    search.run([trial(i, {"a": s.constant(i)}, 50) for i in range(8)], [50] * 8)
    assert set(widths_of(search)) == {1}


def test_a_gang_shrinks_while_other_chains_wait_and_grows_again_afterwards():
    search = Search(SimulatedExecutor(4, virtual_nodes=4, step_seconds=10.0), checkpoint_every=20)
    search.driver.add([trial(0, {"a": s.constant(0)}, 100)])
    search.driver.ask("study/0", 100)
    while search.plan.totals.steps_trained < 20:
        search.driver.wait()
    search.driver.add([trial(i, {"a": s.constant(i)}, 20) for i in range(1, 7)])
    for i in range(1, 7):
        search.driver.ask(f"study/{i}", 20)
    search.answers(7)
    assert widths_of(search)[0] == 4
    alone = widths_of(search)[1:8]
    assert alone == [1] * 7
    assert max(widths_of(search)[8:], default=0) >= 2  # what is left of the first
    # 2,200 seconds of work for four workers
    assert search.executor.clock() <= 1.1 * 2200 / 4
    assert search.plan.totals.steps_trained == 220


def test_a_gang_slower_than_one_worker_is_ended_and_not_tried_again():
    executor = SimulatedExecutor(
        2, virtual_nodes=2, step_seconds=10.0, speedup=lambda width: 1.0 if width == 1 else 0.5
    )
    search = Search(executor, checkpoint_every=10)
    search.run([trial(0, {"a": s.constant(0)}, 100)], [100])
    assert widths_of(search) == [2, 1]
    assert executor.clock() <= 1.25 * 1000


class Apart(SimulatedExecutor):
    """Workers of which some cannot reach each other, or not for a while."""

    def __init__(self, *, busy: frozenset[str], until: float = math.inf) -> None:
        super().__init__(4, virtual_nodes=2, step_seconds=10.0, load_seconds=0.1)
        self._busy, self._until = busy, until

    def start(self, worker: WorkerId, chain: Chain) -> None:
        missing = self._busy & {worker, *chain.gang}
        if chain.gang and missing and self.clock() < self._until:
            why = f"{len(missing)} of {1 + len(chain.gang)} did not meet"
            ended = ChainEnded(chain.id, worker, "apart", self.clock() + 1.0, message=why)
            self.cluster.at(1.0, lambda: self.inbox.append(ended))
        else:
            super().start(worker, chain)

    def wait(self, timeout: float | None) -> list[Report]:
        if timeout:
            self.cluster.at(timeout, self.cluster.wake)  # not to the next event: workers are tried again before
        return super().wait(timeout)


ALL = frozenset(f"sim-{number}" for number in range(4))


def run_apart(search: Search, caplog: pytest.LogCaptureFixture, steps: int = 200) -> list[str]:
    """Train two trials; return what was said of gangs."""
    answers = search.run([trial(i, {"a": s.constant(i)}, steps) for i in range(2)], [steps, steps])
    assert len(answers) == 2 and search.plan.totals.steps_trained == 2 * steps
    return [record.message for record in caplog.records if "meet" in record.message]


def test_no_more_gangs_are_formed_after_six_attempts_in_which_no_workers_meet(caplog):
    search = Search(Apart(busy=ALL))
    first, last = run_apart(search, caplog)
    assert "2 of 2 did not meet. They train separately for 10 s, with the same results, and then try again." in first
    assert "No workers have met in 6 attempts: from now on each chain is trained by one worker" in last
    assert widths_of(search).count(2) in (6, 7)  # two may be tried at the same time
    assert search.executor.clock() <= 1.05 * 2000


def test_a_worker_that_missed_its_gang_is_tried_again_after_ever_longer_pauses(caplog):
    search = Search(Apart(busy=frozenset({"sim-3"}), until=300.0))
    said = run_apart(search, caplog)
    assert len(said) == 1 and "1 of 2 did not meet" in said[0]
    apart = [fact.at for fact in facts(search, ChainStarted) if "sim-3" in (fact.worker, *fact.gang)]
    gaps = [b - a for a, b in pairwise(at for at in apart if at < 300.0)]
    assert len(gaps) >= 2 and all(gap >= 10.0 for gap in gaps) and gaps == sorted(gaps)
    # Afterwards all four workers train.
    late = [fact for fact in facts(search, ChainStarted) if fact.at >= 300.0 and fact.gang]
    assert any("sim-3" in (fact.worker, *fact.gang) for fact in late)
    assert search.executor.clock() <= 1.25 * 1000


@given(st.sets(st.sampled_from(sorted(ALL))), st.floats(0, 3000), st.integers(1, 3))
def test_every_step_is_trained_once_whichever_workers_fail_to_join_a_gang(busy, until, branches):
    search = Search(Apart(busy=frozenset(busy), until=until))
    answers = search.run([trial(i, {"a": s.constant(i)}, 60) for i in range(branches)], [60] * branches)
    assert len(answers) == branches and search.plan.totals.steps_trained == 60 * branches


def test_unmeasured_speedups_of_gangs_follow_from_the_nearest_measured_width():
    widths = Widths(16)
    assert widths.speedup(1) == 1.0 and widths.speedup(2) == pytest.approx(1.8)
    widths.learn(StateReached("c", "w", 0, 0, 10, 1.0, train_seconds=400.0, workers=4, alone_seconds=300.0))
    assert widths.speedup(4) == pytest.approx(3.0)
    assert widths.speedup(2) == pytest.approx(3.0**0.5)
    assert widths.speedup(8) == pytest.approx(5.4)
    assert widths.gains(4) and not widths.gains(16)


def test_the_first_step_of_a_gang_does_not_count_for_its_measured_speed():
    widths = Widths(2)
    first = StateReached("c", "w", 0, 0, 1, 1.0, train_seconds=100.0, workers=2, alone_seconds=10.0, source="fresh")
    widths.learn(first)
    assert widths.gains(1) and not widths.loses(2)
    widths.learn(StateReached("c", "w", 0, 1, 2, 1.0, train_seconds=100.0, workers=2, alone_seconds=10.0))
    assert widths.loses(2)


NONE_FORMED = {
    "there was one worker": (1, [100, 100]),
    "no worker was idle while a chain could use it": (2, [100, 100]),
    "adding idle workers would save less than 100.1 s": (2, [10, 12]),
}


@pytest.mark.parametrize("why", NONE_FORMED)
def test_the_reason_why_no_gang_was_formed_is_logged(why, caplog):
    workers, stops = NONE_FORMED[why]
    executor = SimulatedExecutor(workers, virtual_nodes=2, step_seconds=10.0, save_seconds=5.0)
    search = Search(executor, checkpoint_every=1)
    search.run([trial(i, {"a": s.constant(i)}, stop) for i, stop in enumerate(stops)], stops)
    assert set(widths_of(search)) == {1}
    with caplog.at_level("INFO", "hpstage"):
        search.driver.leave()
    assert f"No chain was trained by several workers (virtual_nodes): {why}" in caplog.text


def test_no_reason_for_missing_gangs_is_given_if_a_gang_was_formed_or_is_impossible():
    for executor in (SimulatedExecutor(2, virtual_nodes=2, step_seconds=10.0), SimulatedExecutor(2)):
        search = Search(executor)
        search.run([trial(0, {"a": s.constant(0)}, 50)], [50])
        assert search.scheduler.gangs.none_formed(search.scheduler.workers.most) is None


@pytest.mark.parametrize("workers", [pytest.param(8, marks=pytest.mark.slow), 40, 128])
def test_gangs_keep_the_makespan_of_a_narrow_trunk_within_10_percent_of_work_per_worker(workers, monkeypatch):
    """400 trials: with a tenth of the speed lost per doubling, at most 1.10 of work / workers."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    from bench_gang_makespan import makespan

    assert makespan(workers, 0.9) <= 1.10
