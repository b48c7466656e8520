"""Schedules: one hyper-parameter as a function of the step, and their constructors.

A schedule is segments laid end to end, each with a form (see ``forms``). Equality means equal values at every step,
however a schedule was written or cut. Constructors are named and parameterised after ``torch.optim.lr_scheduler``
where torch has them, and give torch's values; the first argument is the base value. Schedules are composed with
``.then``, ``.until`` and ``.since``::

    warm = linear(0.1, start_factor=0.1, total_iters=5).until(5).then(cosine(0.1, T_max=95)).until(100)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, cast

import msgspec

from hpstage.errors import ScheduleError
from hpstage.forms import (
    MAX_STEPS,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Form,
    Linear,
    Polynomial,
    Sampled,
    Scalar,
    Staircase,
    agreement,
    canonical,
    decayed,
    same,
    varies,
)

__all__ = [
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "Form",
    "Linear",
    "Polynomial",
    "Sampled",
    "Scalar",
    "Schedule",
    "Segment",
    "Staircase",
    "agreement",
    "as_schedule",
    "canonical",
    "constant",
    "cosine",
    "cosine_restarts",
    "exponential",
    "linear",
    "multistep",
    "onecycle",
    "piecewise",
    "polynomial",
    "same",
    "sampled",
    "step",
    "varies",
    "wsd",
]


class Segment(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """``length`` steps of one form; ``None``: for ever."""

    form: Form
    length: int | None = None


class Schedule(msgspec.Struct, frozen=True, gc=False):
    """One hyper-parameter as a function of the step 0, 1, 2, ...

    Made with the constructors of this module. Construction brings it to a normal form: no empty segments, no equal
    neighbours, constants wherever the value does not vary. Two schedules are equal if they have the same length and
    the same value at every step; open ones, if they agree up to the last joint and their last forms are equal.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        segments = self.segments
        if len(segments) == 1 and segments[0].form.__class__ is Constant and segments[0].length is None:
            return  # a plain value: by far the most frequent schedule
        msgspec.structs.force_setattr(self, "segments", _normal(segments))

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def length(self) -> int | None:
        """How many steps it has; ``None`` if it goes on for ever."""
        total = 0
        for segment in self.segments:
            if segment.length is None:
                return None
            total += segment.length
        return total

    def pieces(self) -> list[tuple[int, int | None, Form]]:
        """``(start, stop, form)`` of each segment in order; the ``stop`` of an open one is ``None``."""
        found: list[tuple[int, int | None, Form]] = []
        start = 0
        for segment in self.segments:
            if segment.length is None:
                found.append((start, None, segment.form))
            else:
                found.append((start, start + segment.length, segment.form))
                start += segment.length
        return found

    def form_at(self, step: int) -> Form:
        """The form at ``step``; ScheduleError past the end."""
        if step >= 0:
            end = 0
            for segment in self.segments:
                if segment.length is None:
                    return segment.form
                end += segment.length
                if step < end:
                    return segment.form
        raise ScheduleError(f"the schedule has no step {step}; it covers [0, {self.length})")

    def value(self, step: int) -> Scalar:
        """The value at ``step``; ScheduleError past the end, or where it is not finite."""
        return self.form_at(step).value(step)

    def values(self, stop: int) -> Iterator[Scalar]:
        """The values at steps 0 to ``stop - 1``."""
        for start, end, form in self.pieces():
            if start >= stop:
                return
            yield from map(form.value, range(start, stop if end is None else min(end, stop)))
        if (length := self.length) is not None and length < stop:
            raise ScheduleError(f"the schedule has no step {length}; it covers [0, {length})")

    # --- composing ----------------------------------------------------------------------------------------

    def then(self, other: Schedule | Scalar) -> Schedule:
        """This, and at its end the other, whose steps count from the joint."""
        joint = self.length
        if joint is None:
            raise ScheduleError(
                "nothing can follow a schedule that goes on for ever; bound it with .until(step)"
            )
        return Schedule(self.segments + _shifted(as_schedule(other).segments, joint))

    def until(self, step: int) -> Schedule:
        """The first ``step`` steps; ScheduleError if there are fewer."""
        stop = self._within(step)
        segments = []
        for start, end, form in self.pieces():
            if start >= stop:
                break
            segments.append(Segment(form, (stop if end is None else min(end, stop)) - start))
        return Schedule(tuple(segments))

    def since(self, step: int) -> Schedule:
        """What is left after the first ``step`` steps, counted from 0. ``s.until(k).then(s.since(k)) == s``."""
        first = self._within(step)
        segments = [
            Segment(form, None if end is None else end - max(start, first))
            for start, end, form in self.pieces()
            if end is None or end > first
        ]
        return Schedule(_shifted(segments, -first))

    def _within(self, step: int) -> int:
        step, length = _count("step", step), self.length
        if length is not None and step > length:
            raise ScheduleError(
                f"the schedule ends at step {length} and cannot be cut at step {step}; add .then(...) first"
            )
        return step

    # --- comparing ----------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        if self.segments == other.segments:
            return True
        if self.length != other.length:
            return False
        mine, theirs = self.pieces(), other.pieces()
        i = j = start = 0
        while i < len(mine) and j < len(theirs):
            my_end, their_end = mine[i][1], theirs[j][1]
            if my_end is None and their_end is None:
                return mine[i][2] == theirs[j][2]
            stop = min(MAX_STEPS if my_end is None else my_end, MAX_STEPS if their_end is None else their_end)
            if agreement(mine[i][2], theirs[j][2], start, stop) != stop:
                return False
            i += my_end == stop
            j += their_end == stop
            start = stop
        return True

    def __hash__(self) -> int:
        # Of what equal schedules have in common however they are written: length, some values, the open form.
        length = self.length
        if length is None:
            return hash((None, self.value(0), self.segments[-1].form))
        if length == 0:
            return 0
        return hash((length, self.value(0), self.value(length // 2), self.value(length - 1)))


def _normal(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The segments without empty ones, without equal neighbours, and in the plainest forms."""
    plain: list[Segment] = []
    start = 0
    last = len(segments) - 1
    for i, segment in enumerate(segments):
        length = segment.length
        if length is None:
            if i != last:
                raise ScheduleError(
                    "only the last segment of a schedule can be open; give the others a length"
                )
        elif not 0 <= length <= MAX_STEPS - start:
            raise ScheduleError(
                f"a segment cannot have {length} steps; lengths are at least 0 and below 2**53"
            )
        elif length == 0:
            continue
        form = segment.form
        if form.__class__ is Constant:
            _add(plain, form, length, segment)
        else:
            # Every form is monotone, periodic or a table: finite at both ends is finite between them.
            form.value(start)
            if length is not None:
                form.value(start + length - 1)
            for simple, part in form.simplified(start, length):
                _add(plain, simple, part, None)
        if length is not None:
            start += length
    return tuple(plain)


def _add(segments: list[Segment], form: Form, length: int | None, written: Segment | None) -> None:
    """Append ``length`` steps of ``form``; ``written`` is a segment that says just that, if there is one."""
    if segments and segments[-1].form == form:
        before = segments[-1].length
        segments[-1] = Segment(form, None if length is None or before is None else before + length)
    else:
        segments.append(Segment(form, length) if written is None else written)


def _shifted(segments: Iterable[Segment], by: int) -> tuple[Segment, ...]:
    return tuple([Segment(segment.form.shifted(by), segment.length) for segment in segments])


# --- plain values, pieces, tables -------------------------------------------------------------------------


def constant(value: Scalar) -> Schedule:
    """``value`` at every step."""
    return Schedule((Segment(Constant(value)),))


def as_schedule(x: Schedule | Scalar) -> Schedule:
    """A schedule as it is; a plain value as a constant schedule."""
    return x if isinstance(x, Schedule) else Schedule((Segment(Constant(x)),))


def piecewise(pieces: Mapping[int, Schedule | Scalar]) -> Schedule:
    """From each key on its value or schedule, whose steps count from there; the last goes on as it does.

    Covers torch's ConstantLR (``{0: value * factor, total_iters: value}``) and SequentialLR.
    """
    starts = [_count("start", start) for start in pieces]
    if not starts or starts[0] != 0:
        raise ScheduleError(f"the pieces start at {starts}; the first must start at step 0")
    segments: list[Segment] = []
    for start, stop, piece in zip(starts, [*starts[1:], None], pieces.values(), strict=True):
        schedule = as_schedule(piece)
        if stop is not None:
            if stop <= start:
                raise ScheduleError(f"the pieces start at {starts}; the starts must increase")
            length = schedule.length
            if length is not None and length < stop - start:
                raise ScheduleError(
                    f"the piece that starts at {start} has {length} steps, but the next starts at {stop}; "
                    f"start the next at {start + length} or add .then(...) to this one"
                )
            schedule = schedule.until(stop - start)
        segments += _shifted(schedule.segments, start)
    return Schedule(tuple(segments))


def sampled(source: Callable[[int], Scalar] | Sequence[Scalar], steps: int | None = None) -> Schedule:
    """A callable asked once for each of ``steps`` steps, or the values of a sequence. Ends after them."""
    if callable(source):
        if steps is None:
            raise ScheduleError("steps is missing; say for how many steps the callable is to be asked")
        values = [source(at) for at in range(_count("steps", steps))]
    else:
        if isinstance(source, str):
            raise ScheduleError(
                f"{source!r} is one value and not a sequence of values; use constant({source!r})"
            )
        values = list(source)
        if steps is not None and _count("steps", steps) != len(values):
            raise ScheduleError(
                f"steps is {steps}, but the sequence has {len(values)} values; leave steps out"
            )
    plain = []
    for at, value in enumerate(values):
        try:
            plain.append(canonical(value))
        except ScheduleError as error:
            raise ScheduleError(f"at step {at}: {error}") from None
    return Schedule((Segment(Sampled(tuple(plain)), len(plain)),))


# --- after torch.optim.lr_scheduler -----------------------------------------------------------------------


def multistep(value: float, milestones: Iterable[int], gamma: float = 0.1) -> Schedule:
    """MultiStepLR: multiplied by ``gamma`` at each milestone; a milestone that is listed twice counts twice."""
    base, factor = _real("value", value), _real("gamma", gamma)
    marks = sorted([_count("milestones", mark) for mark in milestones])
    segments = []
    start = 0
    for passed, mark in enumerate(marks):
        if mark > start:
            segments.append(Segment(Constant(decayed(base, factor, passed)), mark - start))
            start = mark
    segments.append(Segment(Constant(decayed(base, factor, len(marks)))))
    return Schedule(tuple(segments))


def step(value: float, step_size: int, gamma: float = 0.1) -> Schedule:
    """StepLR: multiplied by ``gamma`` every ``step_size`` steps, for ever."""
    width = _count("step_size", step_size, least=1)
    return _open(Staircase(_real("value", value), _real("gamma", gamma), width))


def exponential(value: float, gamma: float) -> Schedule:
    """ExponentialLR: multiplied by ``gamma`` at every step, for ever."""
    return _open(Exponential(_real("value", value), _real("gamma", gamma)))


def linear(
    value: float, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5
) -> Schedule:
    """LinearLR: from ``value * start_factor`` in a line to ``value * end_factor`` at ``total_iters``, and stays there."""
    base, steps = _real("value", value), _count("total_iters", total_iters, least=1)
    first, last = _real("start_factor", start_factor), _real("end_factor", end_factor)
    ramp = Linear(base * first, base * (last - first) / steps)
    return Schedule((Segment(ramp, steps), Segment(Constant(base * last))))


def polynomial(value: float, total_iters: int = 5, power: float = 1.0) -> Schedule:
    """PolynomialLR: ``value * (1 - t / total_iters)**power``, and 0 from ``total_iters`` on."""
    base, steps, exponent = (
        _real("value", value),
        _count("total_iters", total_iters, least=1),
        _real("power", power),
    )
    if exponent < 0:
        raise ScheduleError(f"power is {power!r}; it must be at least 0")
    if exponent == 0:
        return constant(base)
    if exponent == 1:
        return linear(base, 1.0, 0.0, steps)
    fall = Polynomial(0.0, base, steps, exponent, origin=steps)
    return Schedule((Segment(fall, steps), Segment(Constant(0))))


def cosine(value: float, T_max: int, eta_min: float = 0.0) -> Schedule:
    """CosineAnnealingLR: falls from ``value`` to ``eta_min`` in ``T_max`` steps along half a cosine, and back, for ever.

    Add ``.until(T_max)`` for the fall alone.
    """
    half = _count("T_max", T_max, least=1)
    return _open(Cosine(_real("value", value), _real("eta_min", eta_min), float(half)))


def cosine_restarts(value: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> Schedule:
    """CosineAnnealingWarmRestarts: falls along half a cosine and jumps back, in cycles of T_0, T_0 * T_mult, ... steps."""
    first, growth = _count("T_0", T_0, least=1), _count("T_mult", T_mult, least=1)
    return _open(CosineRestarts(_real("value", value), _real("eta_min", eta_min), first, growth))


def onecycle(
    max_value: float,
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """OneCycleLR: from ``max_value / div_factor`` up to ``max_value`` and down to ``1 / final_div_factor`` of the start.

    Ends at ``total_steps``. The joints stand, as torch's do, at ``pct_start * total_steps - 1``, between steps.
    """
    top, steps, share = (
        _real("max_value", max_value),
        _count("total_steps", total_steps),
        _real("pct_start", pct_start),
    )
    if not 0 <= share <= 1:
        raise ScheduleError(f"pct_start is {pct_start!r}; it must be from 0 to 1")
    if anneal_strategy not in ("cos", "linear"):
        raise ScheduleError(f"anneal_strategy is {anneal_strategy!r}; it must be 'cos' or 'linear'")
    divisor, final_divisor = _real("div_factor", div_factor), _real("final_div_factor", final_div_factor)
    if divisor == 0 or final_divisor == 0:
        raise ScheduleError("div_factor and final_div_factor divide; they cannot be 0")
    first = top / divisor
    last = first / final_divisor
    joints = [share * steps - 1, 2 * share * steps - 2] if three_phase else [share * steps - 1]
    heights = [first, top, first, last] if three_phase else [first, top, last]
    segments = []
    start, begin = 0, 0.0  # the phase's first step, and the point at which it begins
    for end, above, below in zip([*joints, float(steps - 1)], heights, heights[1:], strict=False):
        stop = min(max(math.floor(end) + 1, start), steps)
        if end <= begin:
            form: Form = Constant(below)
        elif anneal_strategy == "cos":
            form = Cosine(above, below, end - begin, begin)
        else:
            slope = (below - above) / (end - begin)
            form = Linear(above + slope * (start - begin), slope, origin=start)
        segments.append(Segment(form, stop - start))
        start, begin = stop, end
    return Schedule(tuple(segments))


# --- beyond torch -----------------------------------------------------------------------------------------


def wsd(
    value: float,
    steps: int,
    *,
    warmup: int,
    decay: int,
    final: float = 0.0,
    decay_form: Literal["linear", "cosine", "1-sqrt"] = "linear",
) -> Schedule:
    """Warm-up, stable, decay (arXiv 2404.06395; the 1-sqrt form: arXiv 2405.18392). Ends at ``steps``.

    Warm-up: its step t has ``value * (t + 1) / warmup``, so that none is spent at 0 and its last has ``value``.
    Decay: its step t is ``t / decay`` of the way to ``final``, so that its first still has ``value`` (and is shared
    with whoever decays later) and ``final`` is what step ``steps`` would have.
    """
    top, end = _real("value", value), _real("final", final)
    total, rise, fall = _count("steps", steps), _count("warmup", warmup), _count("decay", decay)
    joint = total - fall
    if rise > joint:
        raise ScheduleError(
            f"warmup ({rise}) and decay ({fall}) are longer than steps ({total}); shorten one"
        )
    if decay_form not in ("linear", "cosine", "1-sqrt"):
        raise ScheduleError(f"decay_form is {decay_form!r}; it must be 'linear', 'cosine' or '1-sqrt'")
    segments = []
    if rise > 1:
        segments.append(Segment(Linear(top / rise, top / rise), rise - 1))
    segments.append(Segment(Constant(top), joint - max(rise - 1, 0)))
    if fall:
        if decay_form == "linear":
            form: Form = Linear(top, (end - top) / fall, origin=joint)
        elif decay_form == "cosine":
            form = Cosine(top, end, float(fall), origin=joint)
        else:
            form = Polynomial(top, end - top, fall, 0.5, origin=joint)
        segments.append(Segment(form, fall))
    return Schedule(tuple(segments))


# --- arguments --------------------------------------------------------------------------------------------


def _open(form: Form) -> Schedule:
    return Schedule((Segment(form),))


def _real(name: str, value: float) -> float:
    """A finite number as a float; ScheduleError naming the argument."""
    try:
        plain = canonical(value)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise ScheduleError(
            f"{name} is {value!r}; it must be a number (for other values use piecewise or sampled)"
        )
    return float(plain)


def _count(name: str, value: int, *, least: int = 0) -> int:
    """A whole number of steps, at least ``least``; ScheduleError naming the argument."""
    try:
        plain = canonical(value)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from None
    if plain.__class__ is not int or not least <= cast(int, plain) < MAX_STEPS:
        raise ScheduleError(f"{name} is {value!r}; it must be a whole number of steps, at least {least}")
    return cast(int, plain)
