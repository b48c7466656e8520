"""The step from which a parameter matters, found by evaluating the space again with one value changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from hpstage.optuna.private import Drawn, contains
from hpstage.schedule import Scalar, Schedule
from hpstage.schedule.space import Described, Space, describe, with_defaults

Draw = Callable[[str, BaseDistribution], Any]
_NONE: Mapping[str, Scalar] = {}


class Probe(Drawn):
    """A stand-in for a trial: each parameter gets its value from ``draw`` when it is first suggested."""

    def __init__(self, draw: Draw, number: int, study: optuna.Study | None = None) -> None:
        super().__init__(draw, number)
        self.study = study


def takes(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return contains(distribution, distribution.to_internal_repr(value))
    except ValueError:  # not one of the distribution's choices, or of another type
        return False


def within(distribution: BaseDistribution, value: Any) -> Any:
    """Return ``value`` if it is in the distribution, else the nearest number that is; ``None`` if there is no such
    number."""
    if takes(distribution, value):
        return value
    if isinstance(distribution, CategoricalDistribution) or isinstance(value, bool | str | None):
        return None
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    steps = 0 if step is None else round((min(max(value, low), high) - low) / step)
    return min(max(value, low), high) if step is None else min(low + steps * step, high)


def branch_point(a: Mapping[str, Schedule], b: Mapping[str, Schedule], steps: int) -> int:
    """Return the first step below ``steps`` at which any value differs, else ``steps``."""
    if a.keys() != b.keys():
        return 0
    for name, schedule in a.items():
        steps = schedule.agrees(b[name], steps)
    return steps


def _branch_point_of(a: Described, b: Described, steps: int) -> int:
    """Return the branch point of two trials. Where a metric decides a schedule, it is the first step at which the
    schedules may differ."""
    for name, plateau in a.plateaus.items():
        other = b.plateaus.get(name, plateau)
        if other != plateau:
            steps = min(steps, plateau.first_drop, other.first_drop)
    return branch_point(a.schedules, b.schedules, steps)


def begins(
    space: Space,
    steps: int,
    params: Mapping[str, Any],
    distributions: Mapping[str, BaseDistribution],
    radius: float,
    defaults: Mapping[str, Scalar] = _NONE,
) -> dict[str, int]:
    """Return the step from which each parameter matters near these values; ``steps`` if it does not matter.

    A number is moved by ``radius`` up and down in its scale; a choice is replaced by each of the others. The result is
    the first step at which a schedule then differs, or may differ if a metric decides it. A number takes two
    evaluations of the space. ``defaults`` are the values of hyperparameters that the space may leave out.
    """
    known = with_defaults(describe(space, Probe(lambda name, _: params[name], 0), steps), defaults)
    found = {}
    for name, distribution in distributions.items():
        first = steps
        for other in _neighbours(distribution, params[name], radius):
            if first == 0:
                break
            try:
                moved = with_defaults(describe(space, Probe(_with(params, name, other), 0), steps), defaults)
            except Exception:
                # The space may raise for a neighbour of the proposal, which then cannot share steps with it.
                continue
            first = min(first, _branch_point_of(known, moved, first))
        found[name] = first
    return found


def _with(params: Mapping[str, Any], changed: str, other: Any) -> Draw:
    """Return a function that draws the given parameters with one changed. New parameters, and those whose value is not
    in the distribution, get its low end or first choice."""

    def draw(name: str, distribution: BaseDistribution) -> Any:
        value = other if name == changed else params.get(name)
        if takes(distribution, value):
            return value
        return distribution.choices[0] if isinstance(distribution, CategoricalDistribution) else distribution.low  # type: ignore[attr-defined]

    return draw


def _neighbours(distribution: BaseDistribution, value: Any, radius: float) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return [choice for choice in distribution.choices if choice != value]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    found = []
    for by in (radius, -radius):
        moved = value * (high / low) ** by if distribution.log else value + by * (high - low)
        if step is not None:
            places = max(1, round(abs(moved - value) / step))
            moved = value + (places if by > 0 else -places) * step
        moved = type(value)(min(max(moved, low), high))
        if moved != value:
            found.append(moved)
    return found
