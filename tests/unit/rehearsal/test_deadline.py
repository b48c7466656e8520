"""The cheapest fleets that make a deadline."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.errors import UsageError
from hpstage.execution.simulated_cluster import Disruptions

pytestmark = pytest.mark.sampled(8)

HOUR = 3600.0


def trunk(trial: optuna.Trial) -> dict[str, Any]:
    """Equal for 40 of 60 steps."""
    return {"lr": s.piecewise({0: 0.1, 40: trial.suggest_float("lr", 1e-4, 0.1, log=True)})}


def estimated(deadline: float | None, **options: Any) -> hpstage.rehearsal.preflight.Preflight:
    given = {"steps": 60, "n_trials": 12, "workers": (2,), "step_seconds": 120.0}
    return hpstage.preflight(trunk, deadline=deadline, **given | options)


@pytest.mark.ci
def test_the_smallest_fleet_that_meets_the_deadline_is_named() -> None:
    found = estimated(3.0 * HOUR)
    assert found.fixed is not None and found.elastic is not None
    assert found.fixed.makespan <= 3.0 * HOUR and found.elastic.makespan <= 3.0 * HOUR
    tried = estimated(None, workers=(found.fixed.workers - 1, found.fixed.workers))
    assert [fleet.makespan.high <= 3.0 * HOUR for fleet in tried.fleets] == [False, True]
    assert found.fixed.paid_seconds == found.fixed.workers * found.fixed.makespan
    # One worker trains the trunk, and the others are allocated from their request.
    used = found.worker_seconds.median
    assert used < found.elastic.paid_seconds <= used + found.elastic.workers * 90.0 < found.fixed.paid_seconds


@pytest.mark.ci
def test_the_fleet_found_for_successive_halving_meets_the_deadline_in_every_rehearsal() -> None:
    found = estimated(4.0 * HOUR, algorithm=SuccessiveHalving(20, 2), rehearsals=3)
    assert found.rehearsals == 3 and found.fixed is not None
    again = estimated(None, algorithm=SuccessiveHalving(20, 2), rehearsals=3, workers=(found.fixed.workers,))
    assert again.fleets[0].makespan.high == found.fixed.makespan <= 4.0 * HOUR


@pytest.mark.ci
def test_a_deadline_that_no_fleet_meets_is_reported() -> None:
    found = estimated(1.9 * HOUR)  # a trial takes 2 hours by itself
    assert found.fixed is None and found.elastic is None
    assert "No fixed fleet finishes within 114.0 min" in str(found)


@pytest.mark.ci
def test_prices_are_computed_from_allocated_worker_hours() -> None:
    text = str(found := estimated(3.0 * HOUR, gpu_price=2.0))
    assert found.fixed is not None and found.elastic is not None
    assert f"for {2.0 * found.fixed.paid_seconds / HOUR:.2f}." in text
    assert f"for {2.0 * found.elastic.paid_seconds / HOUR:.2f}." in text
    [table] = [line for line in text.splitlines() if line.strip().startswith("2 ")]
    assert table.endswith(f"{2.0 * 2 * found.fleets[0].makespan.median / HOUR:.2f}")


@pytest.mark.ci
def test_preemptible_workers_take_longer_and_train_no_step_twice_if_given_notice() -> None:
    calm = estimated(None, workers=(4,))
    spot = {"lifetime_seconds": HOUR, "replace_seconds": 300.0}
    unnoticed = estimated(None, workers=(4,), disruptions=Disruptions(**spot))
    noticed = estimated(None, workers=(4,), disruptions=Disruptions(notice_seconds=240.0, **spot))
    assert unnoticed.rehearsals == noticed.rehearsals == 9 > calm.rehearsals
    assert unnoticed.steps_unique == noticed.steps_unique == calm.steps_unique
    assert calm.fleets[0].makespan.median < noticed.fleets[0].makespan.median <= unnoticed.fleets[0].makespan.median
    assert noticed.worker_seconds.high == pytest.approx(calm.worker_seconds.median)
    assert unnoticed.worker_seconds.median > noticed.worker_seconds.high


def test_slow_workers_lengthen_the_predicted_makespan_by_their_factor() -> None:
    calm, slow = (estimated(None, workers=(4,), disruptions=Disruptions(slow=share)) for share in (0.0, 1.0))
    assert slow.fleets[0].makespan.median == pytest.approx(3.0 * calm.fleets[0].makespan.median, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": 0.0}, "deadline is 0.0; give a number of seconds above 0"),
        ({"deadline": float("nan")}, "deadline is nan"),
        ({"gpu_price": -1.0}, "gpu_price is -1.0"),
        ({"start_seconds": -1.0}, "start_seconds is -1.0"),
        ({"deadline": 1.0, "step_seconds": None}, "deadline needs step_seconds"),
        (
            {"disruptions": Disruptions(slow=0.1), "step_seconds": None},
            "disruptions needs step_seconds",
        ),
    ],
)
def test_invalid_arguments_of_preflight_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        estimated(**{"deadline": None, **options})
