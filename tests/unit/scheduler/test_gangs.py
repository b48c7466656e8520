"""Gangs: several workers train one chain where they would have nothing else to do. Simulated, with the real driver."""

from __future__ import annotations

import math

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import ChainStarted, StateReached, WorkerId
from hpstage.plan.log import read_facts
from hpstage.plan.messages import Chain, ChainEnded
from hpstage.scheduler.widths import Widths
from tests.unit.searches import Search, histories, searches, trial


def facts(search: Search, kind: type) -> list:
    return [fact for fact in read_facts(search.journal) if isinstance(fact, kind)]


def widths_of(search: Search) -> list[int]:
    return [1 + len(fact.gang) for fact in facts(search, ChainStarted)]


@given(searches(), st.data(), st.integers(1, 9), st.sampled_from([2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_whatever_the_widths_and_whoever_dies_every_answer_is_that_of_one_worker(trials, data, workers, most):
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
        executor.kill(WorkerId(f"sim-{data.draw(st.integers(0, workers + place - 1))}"), when)
        executor.join(when + 0.5)
    stops = [added.steps for added in trials]
    answers = search.run(trials, stops)
    alone = Search(SimulatedExecutor(1)).run(trials, stops)
    assert {(a.trial, a.metrics["value"]) for a in answers} == {(a.trial, a.metrics["value"]) for a in alone}
    assert search.plan.totals.steps_trained == len(histories(trials, stops))
    for fact in facts(search, ChainStarted):
        assert len({fact.worker, *fact.gang}) == 1 + len(fact.gang) in (1, 2, 4, 8)


def test_idle_workers_join_a_lone_chain_and_its_seconds_are_those_of_all():
    search = Search(SimulatedExecutor(4, virtual_nodes=4, step_seconds=10.0))
    search.run([trial(0, {"a": s.constant(1)}, 80)], [80])
    assert widths_of(search) == [4]
    assert search.executor.clock() == pytest.approx(200.0)
    totals = search.plan.totals
    assert totals.train_seconds == pytest.approx(800.0) == totals.worker_seconds
    first, rest = facts(search, StateReached)  # the first step is told, so that it is known what one takes
    assert (first.workers, first.own_seconds, first.began) == (4, pytest.approx(10.0), pytest.approx(0.0))
    assert (rest.workers, rest.own_seconds, rest.began) == (4, pytest.approx(790.0), pytest.approx(2.5))


def test_as_many_paths_as_workers_are_trained_by_one_worker_each():
    search = Search(SimulatedExecutor(4, virtual_nodes=4, step_seconds=10.0))
    search.run([trial(i, {"a": s.constant(i)}, 50) for i in range(8)], [50] * 8)
    assert set(widths_of(search)) == {1}


def test_a_gang_is_narrowed_for_paths_that_come_to_wait_and_widened_again_when_they_are_done():
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


def test_a_width_that_turns_out_slower_is_left_and_not_tried_again():
    executor = SimulatedExecutor(
        2, virtual_nodes=2, step_seconds=10.0, speedup=lambda width: 1.0 if width == 1 else 0.5
    )
    search = Search(executor, checkpoint_every=10)
    search.run([trial(0, {"a": s.constant(0)}, 100)], [100])
    assert widths_of(search) == [2, 1]
    assert executor.clock() <= 1.25 * 1000


class Apart(SimulatedExecutor):
    """Workers that cannot reach each other."""

    def start(self, worker: WorkerId, chain: Chain) -> None:
        if chain.gang:
            ended = ChainEnded(chain.id, worker, "apart", self._now, message="a and b did not meet")
            self._at(1.0, lambda: [ended])
        else:
            super().start(worker, chain)


def test_workers_that_do_not_meet_are_told_once_and_train_alone(caplog):
    search = Search(Apart(4, virtual_nodes=4, step_seconds=10.0))
    trials = [trial(i, {"a": s.constant(i)}, 50) for i in range(2)]
    answers = search.run(trials, [50, 50])
    assert len(answers) == 2 and search.plan.totals.steps_trained == 100
    assert sorted(widths_of(search)) == [1, 1, 2, 2]
    said = [record.message for record in caplog.records if "did not meet" in record.message]
    assert len(said) == 1 and "each chain is trained by one worker, with the same results" in said[0]


def test_speedups_are_learnt_and_those_not_measured_follow_from_the_nearest():
    widths = Widths(16)
    assert widths.speedup(1) == 1.0 and widths.speedup(2) == pytest.approx(1.8)
    widths.learn(StateReached("c", "w", 0, 0, 10, 1.0, train_seconds=400.0, workers=4, alone_seconds=300.0))
    assert widths.speedup(4) == pytest.approx(3.0)
    assert widths.speedup(2) == pytest.approx(3.0**0.5)
    assert widths.speedup(8) == pytest.approx(5.4)
    assert widths.gains(4) and not widths.gains(16)


def space(trial: optuna.Trial) -> dict[str, object]:
    """Few lines at first, hundreds at last: three learning rates and two decays, then milestones, momentum, batches."""
    rate = trial.suggest_categorical("rate", [0.1, 0.05, 0.02])
    first = trial.suggest_categorical("first", [40, 60, 80])
    second = trial.suggest_categorical("second", [100, 110, 120])
    gamma = trial.suggest_categorical("gamma", [0.1, 0.2, 0.5])
    batch = trial.suggest_categorical("batch", [128, 256, 512])
    return {
        "lr": s.multistep(rate, [first, second], gamma),
        "batch": s.piecewise({0: 128, 100: batch}),
        "momentum": s.piecewise({0: 0.7, 80: trial.suggest_categorical("momentum", [0.8, 0.9])}),
        "decay": trial.suggest_categorical("decay", [1e-4, 5e-4]),
    }


class Untrained:
    version = "1"


@pytest.mark.parametrize("workers", [pytest.param(8, marks=pytest.mark.slow), 40, 128])
def test_a_narrow_trunk_leaves_no_worker_idle(workers):
    """400 trials: with a tenth of the speed lost per doubling, at most 1.10 of work / workers."""
    executor = SimulatedExecutor(
        workers,
        virtual_nodes=16,
        speedup=lambda width: width * 0.9 ** math.log2(width),
        step_seconds=32.0,
        gather_seconds=2.0,
        load_seconds=0.5,
        save_seconds=0.5,
    )
    result = hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)),
        Untrained(),
        space,
        metric="value",
        steps=160,
        n_trials=400,
        executor=executor,
        checkpoint_every=160,
        store=hpstage.store.MemoryJournal(),
    )
    assert result.savings.steps_trained == result.savings.steps_unique
    assert executor.clock() <= 1.10 * result.savings.steps_unique * 32.0 / workers
