"""Costs of steps, evaluations and checkpoints: learnt from a plan, or measured over a few steps."""

from __future__ import annotations

import re
import time
from random import Random

import numpy as np
import pytest

import hpstage
from hpstage.rehearsal.costs import Timing, by_values, measured
from hpstage.rehearsal.samplers import values_met
from hpstage.testing.toys import Tape
from tests.unit.rehearsal.drops import STEPS, random, space, true_seconds


def test_costs_of_steps_and_checkpoints_are_estimated_from_a_trained_plan(costs):
    assert costs.evaluate_seconds == pytest.approx(0.02) and costs.save_seconds == pytest.approx(0.004)
    assert costs.checkpoint_bytes == 5000 and 0 < costs.load_seconds <= 0.01
    for batch in (64, 256):
        values = {"lr": 0.1, "momentum": 0.9, "batch_size": batch}
        assert costs.step_seconds(values) == pytest.approx(true_seconds(values), rel=0.1)


def test_effects_of_several_hyperparameters_on_step_seconds_are_separated():
    batches, rates = {64: 1.0, 256: 0.5}, {0.1: 1.0, 0.2: 1.0, 0.3: 1.0}
    timings = [
        Timing({"batch": batch, "lr": lr, "drop": drop}, 100, 100 * 0.04 * scale * (3.0 if drop else 1.0))
        for batch, scale in batches.items()
        for lr in rates
        for drop in (True, False)
        if (batch, lr) != (256, 0.3)
    ]
    seconds = by_values(timings)
    assert seconds({"batch": 256, "lr": 0.3, "drop": True}) == pytest.approx(0.06, rel=0.1)  # never measured together
    ratio = seconds({"batch": 64, "lr": 0.7, "drop": False}) / seconds({"batch": 256, "lr": 0.7, "drop": False})
    assert ratio == pytest.approx(2.0, rel=0.1)
    predicted = sum(timing.steps * seconds(timing.values) for timing in timings)
    assert predicted == pytest.approx(sum(timing.seconds for timing in timings))


def test_step_seconds_of_a_busy_machine_are_not_taken_for_an_effect_of_a_hyperparameter():
    """While the rates 0.2 and 0.4 were trained, for short, something else ran on the machine."""
    timings = [Timing({"batch": 64, "lr": lr}, steps, steps * seconds) for lr, steps, seconds in _BUSY]
    timings += [Timing({"batch": 256, "lr": lr}, steps, steps * seconds / 2) for lr, steps, seconds in _BUSY[:4]]
    seconds = by_values(timings)
    assert len({seconds({"batch": 64, "lr": lr}) for lr, _, _ in _BUSY}) == 1
    assert seconds({"batch": 64, "lr": 0.1}) / seconds({"batch": 256, "lr": 0.1}) == pytest.approx(2.0, rel=0.2)


_BUSY = [(0.1, 40, 0.10), (0.05, 40, 0.11), (0.01, 70, 0.09), (0.01, 30, 0.12), (0.2, 5, 0.3), (0.4, 5, 0.25)]


@pytest.mark.parametrize("seed", range(5))
def test_outliers_among_timings_do_not_change_estimated_step_seconds(seed):
    """Every eighth stage was trained while its host was paged out, or slept."""
    drawn = Random(seed)
    timings = []
    for number in range(40):
        values = {"batch": drawn.choice([64, 256]), "lr": drawn.uniform(0.01, 0.1), "depth": drawn.choice([2, 3, 4])}
        true = 0.04 * (0.5 if values["batch"] == 256 else 1.0) * drawn.uniform(0.9, 1.1)
        timings.append(Timing(values, 50, 50 * true * (drawn.uniform(20, 500) if number % 8 == 0 else 1.0)))
    seconds = by_values(timings)
    for batch, true in ((64, 0.04), (256, 0.02)):
        for depth in (2, 3, 4):
            assert seconds({"batch": batch, "lr": 0.05, "depth": depth}) == pytest.approx(true, rel=0.15)


class Uneven(Tape):
    """A large batch takes a hundred times as long, by a clock on which other processes do not matter."""

    added = 0.0

    def perf_counter(self):
        return time.perf_counter() + self.added

    def train(self, step, hp):
        super().train(step, hp)
        self.added += 1e6 if hp["batch_size"] == 256 else 1e4


def test_costs_are_measured_in_a_few_steps_under_sampled_hyperparameters(monkeypatch):
    samples = values_met(space, STEPS, sampler=random(), most=6)
    assert len(samples) == 6 and {sample["batch_size"] for sample in samples} == {64, 256}
    uneven = Uneven()
    monkeypatch.setattr("hpstage.rehearsal.costs.time", uneven)
    costs = measured(uneven, samples)
    small, large = (costs.step_seconds({"lr": 0.1, "momentum": 0.9, "batch_size": batch}) for batch in (64, 256))
    assert (small, large) == pytest.approx((1e4, 1e6), rel=0.1)
    assert costs.evaluate_seconds > 0 and costs.save_seconds > 0 and costs.load_seconds > 0
    assert costs.checkpoint_bytes > 0


class OnAFrozenBase(Uneven):
    """Its state has 100 kB that no step changes."""

    def state_dict(self):
        return {"base": np.arange(25_000, dtype=np.float32), "own": super().state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state["own"])


def test_bytes_shared_by_checkpoints_count_once_in_a_preflight():
    costs = measured(OnAFrozenBase(), values_met(space, STEPS, sampler=random(), most=2))
    assert 100_000 <= costs.shared_bytes < 101_000 and 0 < costs.checkpoint_bytes < 5_000
    found = hpstage.preflight(
        space, steps=STEPS, n_trials=2, checkpoint_bytes=costs.checkpoint_bytes, shared_bytes=costs.shared_bytes
    )
    assert re.search(r"needed at most .*\b10\d\.\d kB", str(found))
