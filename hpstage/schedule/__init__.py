"""Schedules: constructors, and everything needed to work with schedules.

Constructors are named and parameterised after ``torch.optim.lr_scheduler`` where torch has them, and give torch's
values; the first argument is the base value. They are composed with ``.then``, ``.until`` and ``.since``::

    linear(0.1, start_factor=0.1, total_iters=5).until(5).then(cosine(0.1, T_max=95)).until(100)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from hpstage.errors import ScheduleError
from hpstage.errors.arguments import Kind, instance, one_of, shown, switch
from hpstage.schedule.forms import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    Form,
    Linear,
    Polynomial,
    Sampled,
    Staircase,
    agreement,
    decayed,
    varies,
)
from hpstage.schedule.plateau import Plateau, plateau
from hpstage.schedule.scalars import PLAIN, Scalar, canonical, count, real, same
from hpstage.schedule.segments import Schedule, Segment, as_schedule, shifted
from hpstage.schedule.shapes import Shape, Strategy, line, one_cycle
from hpstage.schedule.warmup_stable_decay import WSDSweep, wsd, wsd_sweep

__all__ = [
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "Form",
    "Linear",
    "Plateau",
    "Polynomial",
    "Sampled",
    "Scalar",
    "Schedule",
    "Segment",
    "Staircase",
    "WSDSweep",
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
    "plateau",
    "polynomial",
    "same",
    "sampled",
    "step",
    "varies",
    "wsd",
    "wsd_sweep",
]


def __dir__() -> list[str]:
    return __all__


# --- plain values, pieces, tables -------------------------------------------------------------------------


def constant(value: Scalar) -> Schedule:
    """Return a schedule of ``value`` at every step."""
    return Schedule((Segment(Constant(value)),))


def piecewise(pieces: Mapping[int, Schedule | Scalar]) -> Schedule:
    """Use each key's value or schedule from that step on, with steps counted from there; the last is not cut.

    Covers torch's ConstantLR (``{0: value * factor, total_iters: value}``) and SequentialLR.
    """
    _PIECES.of("pieces", pieces, ScheduleError)
    starts = [count("a start of pieces", start) for start in pieces]
    if not starts or starts[0] != 0:
        raise ScheduleError(f"the pieces start at {starts}; the first must start at step 0")
    segments: list[Segment] = []
    for start, stop, piece in zip(starts, [*starts[1:], None], pieces.values(), strict=True):
        if stop is not None and stop <= start:
            raise ScheduleError(f"the pieces start at {starts}; the starts must increase")
        if piece.__class__ in PLAIN:  # as most pieces: it takes a tenth of the time of cutting and shifting a schedule
            form = Constant(piece)  # type: ignore[arg-type]
            segments.append(Segment(form, None if stop is None else stop - start))
            continue
        try:
            schedule = as_schedule(piece)
        except ScheduleError as error:
            raise ScheduleError(f"the piece that starts at {start}: {error}") from None
        if stop is not None:
            length = schedule.length
            if length is not None and length < stop - start:
                raise ScheduleError(
                    f"the piece that starts at {start} has {length} steps, but the next starts at {stop}; "
                    f"start the next at {start + length} or add .then(...) to this one"
                )
            schedule = schedule.until(stop - start)
        segments += shifted(schedule.segments, start)
    return Schedule(tuple(segments))


def sampled(source: Callable[[int], Scalar] | Sequence[Scalar], steps: int | None = None) -> Schedule:
    """Tabulate a callable, called once for each of ``steps`` steps, or the values of a sequence, and end after the
    last."""
    if callable(source):
        if steps is None:
            raise ScheduleError("steps is missing; give the number of steps for which to call it")
        values = [source(at) for at in range(count("steps", steps))]
    else:
        if isinstance(source, str):
            raise ScheduleError(f"source is {shown(source)}, one value and not a sequence of values; use constant(...)")
        values = _SEVERAL.of("source", source, ScheduleError)
        if steps is not None and count("steps", steps) != len(values):
            raise ScheduleError(f"steps is {steps}, but the sequence has {len(values)} values; leave steps out")
    plain = []
    for at, value in enumerate(values):
        try:
            plain.append(canonical(value))
        except ScheduleError as error:
            raise ScheduleError(f"source at step {at}: {error}") from None
    return Schedule((Segment(Sampled(tuple(plain)), len(plain)),) if plain else ())


# --- after torch.optim.lr_scheduler -----------------------------------------------------------------------


def multistep(value: float, milestones: Iterable[int], gamma: float = 0.1) -> Schedule:
    """MultiStepLR: multiplied by ``gamma`` at each milestone; a milestone listed twice counts twice."""
    base, factor = real("value", value), real("gamma", gamma)
    marks = sorted([count("milestones", mark) for mark in _SEVERAL.of("milestones", milestones, ScheduleError)])
    segments = []
    start = 0
    for passed, mark in enumerate(marks):
        if mark > start:
            segments.append(Segment(Constant(decayed(base, factor, passed)), mark - start))
            start = mark
    segments.append(Segment(Constant(decayed(base, factor, len(marks)))))
    return Schedule(tuple(segments))


def step(value: float, step_size: int, gamma: float = 0.1) -> Schedule:
    """StepLR: multiplied by ``gamma`` every ``step_size`` steps, forever."""
    width = count("step_size", step_size, least=1)
    return _open(Staircase(real("value", value), real("gamma", gamma), width))


def exponential(value: float, gamma: float) -> Schedule:
    """ExponentialLR: multiplied by ``gamma`` at every step, forever."""
    return _open(Exponential(real("value", value), real("gamma", gamma)))


def linear(value: float, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> Schedule:
    """LinearLR: a line from ``value * start_factor`` to ``value * end_factor``, constant from ``total_iters`` on."""
    base, steps = real("value", value), count("total_iters", total_iters, least=1)
    first, last = real("start_factor", start_factor), real("end_factor", end_factor)
    return _joined(line(base, first, last, steps))


def polynomial(value: float, total_iters: int = 5, power: float = 1.0) -> Schedule:
    """PolynomialLR: ``value * (1 - t / total_iters)**power``, and 0 from ``total_iters`` on."""
    base, steps = real("value", value), count("total_iters", total_iters, least=1)
    exponent = real("power", power)
    if exponent < 0:
        raise ScheduleError(f"power is {power!r}; it must be at least 0")
    if exponent == 0:
        return constant(base)
    if exponent == 1:
        return linear(base, 1.0, 0.0, steps)
    fall = Polynomial(0.0, base, steps, exponent, origin=steps)
    return Schedule((Segment(fall, steps), Segment(Constant(0))))


def cosine(value: float, T_max: int, eta_min: float = 0.0) -> Schedule:
    """CosineAnnealingLR: ``value`` to ``eta_min`` in ``T_max`` steps along half a cosine, and back, forever.

    Add ``.until(T_max)`` for the descent alone.
    """
    half = count("T_max", T_max, least=1)
    return _open(Cosine(real("value", value), real("eta_min", eta_min), float(half)))


def cosine_restarts(value: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> Schedule:
    """CosineAnnealingWarmRestarts: half a cosine down and a jump back, each ``T_mult`` times longer than the last."""
    first, growth = count("T_0", T_0, least=1), count("T_mult", T_mult, least=1)
    return _open(CosineRestarts(real("value", value), real("eta_min", eta_min), first, growth))


def onecycle(
    max_value: float,
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: Strategy = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """OneCycleLR: from ``max_value / div_factor`` up to ``max_value``, then down to the start ``/ final_div_factor``.

    Ends at ``total_steps``. The peak is where torch has it, at ``pct_start * total_steps - 1``, and thus usually
    between two steps.
    """
    top, steps = real("max_value", max_value), count("total_steps", total_steps)
    share = real("pct_start", pct_start)
    if not 0 <= share <= 1:
        raise ScheduleError(f"pct_start is {pct_start!r}; it must be from 0 to 1")
    one_of("cos", "linear").of("anneal_strategy", anneal_strategy, ScheduleError)
    switch.of("three_phase", three_phase, ScheduleError)
    divisor, final_divisor = real("div_factor", div_factor), real("final_div_factor", final_div_factor)
    if divisor == 0 or final_divisor == 0:
        raise ScheduleError("div_factor and final_div_factor divide; they cannot be 0")
    first = real("max_value / div_factor", top / divisor)
    last = real("max_value / div_factor / final_div_factor", first / final_divisor)
    return _joined(one_cycle(top, steps, share, anneal_strategy, first, last, three_phase))


def _listed(values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str | bytes | Mapping | Set):
        raise TypeError
    return list(values)


_PIECES = instance(Mapping, "a dict of schedules or values by their first steps")
_SEVERAL = Kind(_listed, "a list")


def _joined(shape: Shape) -> Schedule:
    return Schedule(tuple([Segment(form, length) for form, length in shape]))


def _open(form: Form) -> Schedule:
    return Schedule((Segment(form),))
