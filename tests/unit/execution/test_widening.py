"""As how many chains are trained is learnt in steps that are trained anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from hpstage.execution.widening import Widening
from hpstage.plan.step_times import StepTimes


class Steps:
    """The steps of a worker, of which one of so many chains as one takes ``cost(number)`` seconds.

    Args:
        most: the most that can be trained as one.
    """

    def __init__(self, cost: Callable[[int], float], slots: int = 8, most: int = 100) -> None:
        self.widening = Widening(slots)
        self.slots, self.cost, self.most = slots, cost, most
        self.trained: Counter[int] = Counter()
        self.reports = 0
        self.slower = 1.0

    def train(self, chains: list[str], steps: int = 1) -> None:
        for _ in range(steps):
            width = min(self.most, self.widening.width(list(chains)))
            groups = [chains[first : first + width] for first in range(0, len(chains), width)]
            self.trained += Counter(map(len, groups))
            if self.widening.measures:
                taken = self.slower * sum(self.cost(len(group)) for group in groups)
                self.reports += self.widening.took(taken, [len(group) for group in groups for _ in group])

    def train_as_many_as_allowed(self, steps: int = 1000) -> int:
        for _ in range(steps):
            self.train([*"abcdefghijklmnop"[: self.widening.times.allowed(self.slots)]])
        return self.widening.times.best


def fixed(each: float) -> Callable[[int], float]:
    """Of the seconds of a step of one, ``each`` are a chain's own."""
    return lambda number: 0.001 * (1 - each + each * number)


@pytest.mark.parametrize("slots", [2, 6, 8])
def test_the_number_of_chains_trained_together_grows_until_all_slots_are_used(slots: int) -> None:
    steps = Steps(fixed(0.1), slots)
    assert steps.train_as_many_as_allowed() == slots
    known = steps.widening.times
    assert [known.slowness(width) for width, _ in known.seconds] == pytest.approx(
        [fixed(0.1)(width) / 0.001 for width, _ in known.seconds]
    )
    assert steps.reports == len(known.seconds) - 1


def test_a_number_of_chains_trained_together_without_gain_is_dropped_within_60_steps() -> None:
    steps = Steps(fixed(1.0))
    assert steps.train_as_many_as_allowed() == 1
    assert steps.trained.keys() == {1, 2} and steps.trained[2] < 60
    steps = Steps(lambda number: 0.001 * max(1.0, 0.5 * number) if number < 5 else 1.0)
    assert steps.train_as_many_as_allowed() == 2
    assert steps.widening.times.widest == 4 and steps.trained[4] < 60


def test_twelve_steps_are_enough_to_compare_numbers_of_chains_if_a_step_takes_long() -> None:
    steps = Steps(lambda number: 60.0)
    steps.train([*"ab"], steps=11)
    assert steps.reports == 0
    steps.train([*"ab"])
    assert steps.widening.times == StepTimes(((1, 1.0), (2, 1.0)))


def test_three_chains_are_trained_together_if_no_fourth_chain_arrives() -> None:
    steps = Steps(fixed(0.1))
    steps.train([*"ab"], 100)
    steps.train([*"abc"], 40)
    assert steps.widening.times.best == 2
    steps.train([*"abc"], 100)
    assert steps.widening.times.best == 3 and steps.widening.times.allowed(8) == 6


def test_a_temporarily_slow_machine_does_not_change_how_many_chains_train_together() -> None:
    """It may be slow for as long as one of the numbers is trained."""
    steps = Steps(fixed(0.1))
    for step in range(120):
        steps.slower = 5.0 if 9 <= step < 18 else 1.0
        steps.train([*"ab"])
    assert steps.widening.times.best == 2


def test_chains_that_cannot_be_stacked_do_not_decide_for_chains_that_can() -> None:
    steps = Steps(fixed(0.1), most=1)
    steps.train([*"ab"], 100)
    assert steps.reports == 0 and not steps.widening.measures
    steps.most = 8
    steps.train([*"ac"], 100)
    assert steps.widening.times.best == 2


def test_step_times_are_compared_only_within_the_same_chains() -> None:
    """Every other pair has steps that take a hundred times as long."""
    steps = Steps(fixed(0.1))
    for number in range(12):
        steps.slower = 1.0 if number % 2 else 100.0
        steps.train([f"{number}a", f"{number}b"], 20)
    assert steps.widening.times.best == 2
    assert steps.widening.times.slowness(2) == pytest.approx(1.1)


@pytest.mark.parametrize("length", [4, 6, 10, 17])
def test_several_short_chains_are_enough_to_decide_how_many_train_together(length: int) -> None:
    """As where they end at the rounds of an algorithm."""
    steps = Steps(fixed(0.1))
    for number in range(12):
        steps.train([f"{number}a", f"{number}b"], length)
    assert steps.widening.times.best == 2


def test_measurements_of_other_workers_are_not_repeated() -> None:
    steps = Steps(fixed(1.0))
    steps.train([*"ab"], 5)
    steps.widening.learn(((1, 1.0), (2, 1.1), (8, 1.2)))
    steps.train([*"abcdefgh"], 20)
    assert steps.trained[8] == 20
    steps.widening.learn(((1, 1.0), (2, 3.0)))  # older
    assert steps.widening.times.best == 8


def test_step_times_of_the_plan_replace_different_times_measured_by_a_worker() -> None:
    steps = Steps(fixed(1.0))
    steps.widening.learn(((1, 1.0), (2, 3.0)))  # in vain, as this worker has found
    steps.widening.learn(((1, 1.0), (2, 1.1)))  # as the plan has it, from another
    assert steps.widening.times.best == 2
