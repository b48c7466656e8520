"""How many trials algorithms have open at a time: as many as keep the workers busy, as these join and leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpstage.algorithm import Algorithm, Ask, Search, Setting, Trials
from hpstage.algos import ASHA, FullTraining, Hyperband, MedianStopping, OptunaPruner
from hpstage.plan.facts import TrialId
from hpstage.scheduler.answers import Answer
from hpstage.search.history import History
from hpstage.search.targets import Targets

SYNCHRONOUS = {1: 16, 8: 16, 9: 20, 32: 112, 10_000: 4096}
ASYNCHRONOUS = {1: 16, 8: 16, 9: 17, 32: 40, 10_000: 4096}
DEFAULTS: list[tuple[Algorithm, dict[int, int]]] = [
    (FullTraining(), SYNCHRONOUS),
    (MedianStopping(), SYNCHRONOUS),
    (ASHA(1, 3), ASYNCHRONOUS),
    (ASHA(1, 3, "stopping"), ASYNCHRONOUS),
    (Hyperband(1, 3, "asynchronous"), ASYNCHRONOUS),
]
FOLLOWING = [one for one in DEFAULTS if not isinstance(one[0], MedianStopping)]


def setting(workers: int) -> Setting:
    return Setting(steps=9, n_trials=10**6, maximize=False, adaptive=True, workers=workers)


def filled(search: Search) -> int:
    """Propose as many trials as there is room for; return their number."""
    added = 0
    while search.room() > 0:
        search.added(added)
        added += 1
    return added


@pytest.mark.parametrize(("algorithm", "rooms"), DEFAULTS, ids=lambda one: repr(one)[:40])
def test_the_default_window_holds_enough_trials_to_keep_the_workers_busy(
    algorithm: Algorithm, rooms: dict[int, int]
) -> None:
    assert {workers: algorithm.start(setting(workers), Trials()).room() for workers in rooms} == rooms


@pytest.mark.parametrize(("algorithm", "rooms"), FOLLOWING, ids=lambda one: repr(one)[:40])
def test_the_default_window_grows_and_shrinks_with_the_number_of_workers(
    algorithm: Algorithm, rooms: dict[int, int]
) -> None:
    search = algorithm.start(setting(1), Trials())
    filled(search)
    assert search.room() == 0
    search.resized(32)
    assert search.room() == rooms[32] - 16
    filled(search)
    search.resized(9)
    assert search.room() <= 0
    for index in range(rooms[32] - rooms[9]):
        search.failed(index)
        assert search.room() <= 0
    search.failed(rooms[32])
    assert search.room() == 1


@pytest.mark.parametrize("algorithm", [FullTraining(), ASHA(1, 3), ASHA(1, 3, "stopping"), MedianStopping()], ids=repr)
def test_a_given_window_does_not_change_with_the_number_of_workers(algorithm: Algorithm) -> None:
    search = replace(algorithm, window=3).start(setting(32), Trials())  # type: ignore[call-arg]
    search.resized(64)
    search.idle(20)
    assert search.room() == 3


def test_default_windows_of_median_stopping_and_optuna_pruner_do_not_follow_the_workers() -> None:
    median = MedianStopping().start(setting(9), Trials())
    median.resized(32)
    assert median.room() == 20
    assert {OptunaPruner().start(setting(workers), Trials()).room() for workers in (1, 9, 32)} == {1}


@pytest.mark.parametrize(
    "algorithm", [ASHA(1, 3), ASHA(1, 3, "stopping"), Hyperband(1, 3, "asynchronous")], ids=lambda one: repr(one)[:40]
)
def test_asynchronous_algorithms_propose_more_trials_while_workers_are_idle(algorithm: Algorithm) -> None:
    search = algorithm.start(setting(32), Trials())
    filled(search)
    search.idle(5)
    assert filled(search) == 5
    for _ in range(100):
        search.idle(30)
    assert search.room() == 40 - 5, "twice as many at most: where trials begin equally, more of them do not help"
    search.resized(8)
    assert search.room() == 0


def test_a_replayed_search_has_room_for_as_many_trials_as_the_original_search() -> None:
    history = History(ASHA(1, 3), setting(32), Trials())
    filled(history)
    history.idle(7)
    history.resized(40)
    assert history.again(Trials()).room() == history.room() == 8 + 7


# --- synchronous Hyperband --------------------------------------------------------------------------------

CYCLE = Hyperband(1, 3).trials_per_cycle(9)


@pytest.mark.parametrize(("workers", "cycles"), [(1, 1), (8, 1), (32, -(-112 // CYCLE))])
def test_hyperband_begins_as_many_cycles_as_keep_the_workers_busy(workers: int, cycles: int) -> None:
    assert filled(Hyperband(1, 3).start(setting(workers), Trials())) == cycles * CYCLE
    assert filled(Hyperband(1, 3, window=1).start(setting(workers), Trials())) == CYCLE


def test_hyperband_begins_another_cycle_when_workers_join() -> None:
    search = Hyperband(1, 3).start(setting(1), Trials())
    assert filled(search) == CYCLE
    search.resized(9)
    assert search.room() == CYCLE


def test_hyperband_begins_the_next_cycle_before_the_previous_cycle_has_finished() -> None:
    search = Hyperband(1, 3, window=3).start(setting(1), Trials())
    requests = []
    for index in range(CYCLE):
        requests += search.added(index)
    reports = 0
    while search.room() == 0:
        ask = requests.pop(0)
        assert isinstance(ask, Ask)
        requests += [one for one in search.reported(ask.index, ask.step, float(ask.index)) if isinstance(one, Ask)]
        reports += 1
    assert len(requests) == 2 and reports >= CYCLE


def test_results_are_reported_by_length_in_the_order_that_one_worker_per_trial_would_give() -> None:
    targets = Targets(synchronous=True, by_length=True)
    for index, step in ((0, 9), (1, 1), (2, 3), (3, 1)):
        targets.ask(index, step)

    def answered(index: int, step: int) -> None:
        targets.answer(index, Answer(TrialId(str(index)), step, {"value": 0.0}, None))

    def given() -> list[tuple[int, int]]:
        found = []
        while (one := targets.next()) is not None:
            step, answers = one
            found.append((int(answers[-1].trial), step))
        return found

    answered(0, 9)
    answered(3, 1)
    assert given() == [], "the first trial of one step is not known"
    answered(1, 1)
    assert given() == [(1, 1), (3, 1)]
    targets.ask(1, 3)  # two more steps from then on: with the third trial, and after it
    answered(1, 3)
    assert given() == []
    answered(2, 3)
    assert given() == [(2, 3), (1, 3), (0, 9)]
