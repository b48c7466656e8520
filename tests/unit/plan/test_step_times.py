"""Seconds of a step of several chains side by side."""

from __future__ import annotations

import pytest

from hpstage.plan.facts import StateKey, StepsTimed
from hpstage.plan.plan import SearchPlan
from hpstage.plan.step_times import ALONE, StepTimes, among, named, pooled

TIMES = StepTimes(((1, 4.0), (2, 5.0), (4, 7.0), (8, 20.0)))


def test_more_chains_are_trained_together_only_if_step_times_show_a_clear_gain() -> None:
    assert TIMES.best == 4
    assert StepTimes(((1, 4.0), (2, 8.2), (4, 12.0))).best == 4  # the first step to several may cost more
    assert StepTimes(((1, 4.0), (2, 7.9))).best == 1  # too little to be sure of it
    assert ALONE.best == 1


def test_step_times_are_linear_between_measured_numbers_of_chains_and_proportional_beyond() -> None:
    assert [TIMES.of(width) for width in (1, 2, 3, 4, 6, 8, 16)] == [4.0, 5.0, 6.0, 7.0, 13.5, 20.0, 40.0]
    assert TIMES.slowness(4) == 7 / 4 and TIMES.share(4) == 7 / 16
    assert [ALONE.share(width) for width in (1, 2, 8)] == [1.0, 1.0, 1.0]


def test_step_times_are_cut_off_at_the_number_of_slots_of_a_worker() -> None:
    assert TIMES.up_to(4).seconds == TIMES.seconds[:3]
    assert TIMES.up_to(3).seconds == ((1, 4.0), (2, 5.0), (3, 6.0))
    assert TIMES.up_to(1).best == 1


@pytest.mark.parametrize(
    "seconds", [(), ((2, 1.0),), ((1, 1.0), (1, 2.0)), ((1, 1.0), (4, 2.0), (2, 1.0)), ((1, 0.0),)]
)
def test_invalid_measurements_of_step_times_are_refused(seconds: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="from 1 on"):
        StepTimes(seconds)


def test_step_times_are_named_by_number_of_chains_and_step_backend() -> None:
    assert among({"eager": 1.0, "eager begins": 0.0, **named(TIMES)}) == {"": TIMES}
    assert among(named(TIMES) | named(ALONE, "stacked")) == {"": TIMES, "stacked": ALONE}
    assert among({"eager": 1.0}) == {}


def test_twice_the_measured_number_of_chains_is_allowed_while_more_chains_show_a_gain() -> None:
    allowed = [StepTimes(TIMES.seconds[:count]).allowed(100) for count in range(1, 5)]
    assert allowed == [2, 4, 8, 4]  # 8 do not pay
    assert TIMES.allowed(3) == 3 and ALONE.allowed(1) == 1
    assert StepTimes(((1, 1.0), (2, 2.0))).allowed(100) == 1


def test_the_plan_keeps_the_first_step_time_for_each_number_of_chains() -> None:
    plan = SearchPlan(StateKey("w" * 32))
    plan.apply(StepsTimed(TIMES.seconds[:2], 1.0))
    plan.apply(StepsTimed(((1, 1.0), (2, 9.0)), 2.0))
    assert plan.step_times == StepTimes(TIMES.seconds[:2])
    plan.apply(StepsTimed(((1, 8.0), (2, 20.0), (4, 28.0)), 3.0))  # of longer steps
    assert plan.step_times == StepTimes(TIMES.seconds[:3])


def test_the_step_time_of_many_chains_is_extrapolated_from_one_and_two_chains() -> None:
    assert StepTimes(((1, 1.0), (2, 1.4))).foreseen(8).of(8) == pytest.approx(1.0 + 7 * 0.4)
    assert StepTimes(((1, 1.0), (2, 0.9))).foreseen(8).of(8) == pytest.approx(1.0)
    assert StepTimes(((1, 1.0), (2, 1.4))).foreseen(1).seconds == ((1, 1.0),)
    assert TIMES.foreseen(8) == TIMES.up_to(8)


def test_step_times_measured_by_several_workers_are_combined() -> None:
    tried = {"eager": 1.0, "eager begins": 0.0, "stacked, 1 at a time": 2.0, "stacked begins": 3.0, "slow untried": 4.0}
    untried = {"eager": 3.0, "eager begins": 2.0, "stacked untried": 9.0, "slow untried": 6.0}
    failed = {"eager": 3.0, "eager begins": 2.0, "slow untried": 6.0}
    eager = {"eager": 2.0, "eager begins": 1.0, "slow untried": 5.0}
    assert pooled([tried, untried]) == eager | {"stacked, 1 at a time": 2.0, "stacked begins": 3.0}
    assert pooled([tried, failed]) == eager
    assert pooled([tried]) == tried
