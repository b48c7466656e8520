"""Schedules against their oracle: torch.optim.lr_scheduler, stepped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from hpstage import schedule as s

# torch multiplies recursively, and so drifts by an ulp a step. Near zero its own sums leave an error of some
# ulps of the largest value: there the bound is absolute, in units of the base value.
RELATIVE = 1e-12
FLOOR = 1e-14


def stepped(base: float, make: Callable[[torch.optim.Optimizer], LRScheduler], steps: int) -> list[float]:
    """The learning rates that training sees at steps 0 to ``steps - 1``."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
    scheduler = make(optimizer)
    rates = []
    for at in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if at < steps - 1:  # OneCycleLR refuses to step past its end
            scheduler.step()
    return rates


def check(schedule: s.Schedule, base: float, make: Callable[[torch.optim.Optimizer], LRScheduler], steps: int) -> None:
    assert list(schedule.values(steps)) == pytest.approx(stepped(base, make, steps), rel=RELATIVE, abs=FLOOR * base)


@pytest.mark.parametrize("milestones", [[30, 60], [60, 30], [0, 10], [10, 10, 40], []])
@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0, 2.0])
def test_multistep_equals_multistep_lr(milestones: list[int], gamma: float) -> None:
    check(s.multistep(0.1, milestones, gamma), 0.1, lambda o: MultiStepLR(o, milestones, gamma), 80)


@pytest.mark.parametrize("size", [1, 7, 30])
def test_step_equals_step_lr(size: int) -> None:
    check(s.step(0.3, size, 0.7), 0.3, lambda o: StepLR(o, size, 0.7), 200)


@pytest.mark.parametrize("gamma", [0.9, 0.999, 1.01])
def test_exponential_equals_exponential_lr(gamma: float) -> None:
    check(s.exponential(0.1, gamma), 0.1, lambda o: ExponentialLR(o, gamma), 300)


@pytest.mark.parametrize(("first", "last", "iters"), [(1 / 3, 1.0, 5), (1.0, 0.0, 50), (0.01, 0.5, 100), (1.0, 1.0, 3)])
def test_linear_equals_linear_lr(first: float, last: float, iters: int) -> None:
    check(s.linear(0.1, first, last, iters), 0.1, lambda o: LinearLR(o, first, last, iters), 120)


def test_default_arguments_of_schedules_equal_those_of_torch() -> None:
    check(s.linear(0.1), 0.1, LinearLR, 10)
    check(s.polynomial(0.1), 0.1, PolynomialLR, 10)
    check(s.step(0.1, 3), 0.1, lambda o: StepLR(o, 3), 10)
    check(s.multistep(0.1, [3]), 0.1, lambda o: MultiStepLR(o, [3]), 10)
    check(s.cosine(0.1, 7), 0.1, lambda o: CosineAnnealingLR(o, 7), 7)
    check(s.cosine_restarts(0.1, 4), 0.1, lambda o: CosineAnnealingWarmRestarts(o, 4), 10)
    check(s.onecycle(0.1, 30), 0.1, lambda o: OneCycleLR(o, 0.1, 30), 30)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.5])
def test_polynomial_equals_polynomial_lr(power: float) -> None:
    check(s.polynomial(0.1, 40, power), 0.1, lambda o: PolynomialLR(o, 40, power), 60)


def test_polynomial_of_power_zero_equals_polynomial_lr() -> None:
    check(s.polynomial(0.1, 5, 0), 0.1, lambda o: PolynomialLR(o, 5, 0), 12)


@pytest.mark.parametrize(("half", "floor"), [(10, 0.0), (50, 0.001), (7, 0.2), (1, 0.0)])
def test_cosine_equals_cosine_annealing_lr_over_several_periods(half: int, floor: float) -> None:
    # Past the first fall torch's recursion divides by a distance to the floor of about zero and carries the
    # error on; its own closed form is the oracle there.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    closed = CosineAnnealingLR(optimizer, half, floor)
    expected = []
    for at in range(3 * half):
        closed.last_epoch = at
        expected.append(closed._get_closed_form_lr()[0])
    schedule = s.cosine(0.1, half, floor)
    assert list(schedule.values(3 * half)) == pytest.approx(expected, rel=RELATIVE, abs=FLOOR * 0.1)
    check(schedule, 0.1, lambda o: CosineAnnealingLR(o, half, floor), half)


@pytest.mark.parametrize("growth", [1, 2, 3])
@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_cosine_restarts_equals_cosine_annealing_warm_restarts(growth: int, floor: float) -> None:
    check(
        s.cosine_restarts(0.1, 5, growth, floor),
        0.1,
        lambda o: CosineAnnealingWarmRestarts(o, 5, growth, floor),
        100,
    )


@pytest.mark.parametrize("steps", [20, 47, 100])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 0.45])
@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize("three_phase", [False, True])
def test_onecycle_equals_one_cycle_lr(steps: int, share: float, anneal: str, three_phase: bool) -> None:
    schedule = s.onecycle(0.1, steps, share, anneal, 10.0, 1000.0, three_phase)  # type: ignore[arg-type]

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return OneCycleLR(
            optimizer,
            0.1,
            steps,
            pct_start=share,
            anneal_strategy=anneal,  # type: ignore[arg-type]
            cycle_momentum=False,
            div_factor=10.0,
            final_div_factor=1000.0,
            three_phase=three_phase,
        )

    assert schedule.length == steps
    check(schedule, 0.1, make, steps)


def test_piecewise_equals_constant_lr_and_sequential_lr() -> None:
    check(s.piecewise({0: 0.1 * 0.5, 6: 0.1}), 0.1, lambda o: ConstantLR(o, 0.5, 6), 12)

    def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return SequentialLR(
            optimizer, [LinearLR(optimizer, 0.1, 1.0, 5), ExponentialLR(optimizer, 0.9)], milestones=[5]
        )

    check(s.piecewise({0: s.linear(0.1, 0.1, 1.0, 5), 5: s.exponential(0.1, 0.9)}), 0.1, sequence, 30)
