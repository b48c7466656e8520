"""Shapes: forms and their lengths, as constructors put them end to end. Pure.

The constructors of schedules and :mod:`hpstage.schedule.written`, which finds the constructor of a schedule, take them
from here.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from hpstage.errors import ScheduleError
from hpstage.schedule.forms import Constant, Cosine, Exponential, Form, Linear, Polynomial

DecayForm = Literal["linear", "cosine", "1-sqrt", "exponential"]
Strategy = Literal["cos", "linear"]

Shape: TypeAlias = list[tuple[Form, int | None]]
"""Forms with their numbers of steps; ``None``: forever."""


def line(value: float, first: float, last: float, steps: int) -> Shape:
    return [(Linear(value * first, value * (last - first) / steps), steps), (Constant(value * last), None)]


def one_cycle(
    top: float, steps: int, share: float, strategy: Strategy, first: float, last: float, three_phase: bool
) -> Shape:
    joints = [share * steps - 1, 2 * share * steps - 2] if three_phase else [share * steps - 1]
    heights = [first, top, first, last] if three_phase else [first, top, last]
    shape: Shape = []
    start, begin = 0, 0.0  # the phase's first step, and the exact point at which the phase begins
    for end, above, below in zip([*joints, float(steps - 1)], heights, heights[1:], strict=False):
        stop = min(max(math.floor(end) + 1, start), steps)
        if end <= begin:
            form: Form = Constant(below)
        elif strategy == "cos":
            form = Cosine(above, below, end - begin, begin)
        else:
            slope = (below - above) / (end - begin)
            form = Linear(above + slope * (start - begin), slope, origin=start)
        shape.append((form, stop - start))
        start, begin = stop, end
    return shape


def warmup_stable_decay(top: float, steps: int, rise: int, fall: int, end: float, form: DecayForm) -> Shape:
    joint = steps - fall
    shape: Shape = [(Linear(top / rise, top / rise), rise - 1)] if rise > 1 else []
    shape.append((Constant(top), joint - max(rise - 1, 0)))
    if fall:
        shape.append((_decay(top, end, fall, form, joint), fall))
    return shape


def _decay(top: float, end: float, fall: int, form: DecayForm, joint: int) -> Form:
    match form:
        case "linear":
            return Linear(top, (end - top) / fall, origin=joint)
        case "cosine":
            return Cosine(top, end, float(fall), origin=joint)
        case "1-sqrt":
            return Polynomial(top, end - top, fall, 0.5, origin=joint)
        case "exponential":
            if not top * end > 0:
                raise ScheduleError(
                    f"final is {end!r}, which an exponential decay from {top!r} never reaches; give a fraction of it, "
                    f"such as final={0.1 * top:g}"
                )
            return Exponential(top, (end / top) ** (1 / fall), origin=joint)
