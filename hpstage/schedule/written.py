"""The ``repr`` of schedules: the constructors that make them, found from their forms. Pure.

A schedule does not record how it was written. The text found here makes an equal schedule; it contains the forms
themselves where no constructor makes them.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    decayed,
)
from hpstage.schedule.scalars import same

Piece = tuple[int, int | None, Form]
"""``(start, stop, form)``; without an end, ``stop`` is ``None``."""


def written(pieces: list[Piece]) -> str:
    """Return an expression, with the names of :mod:`hpstage.schedule`, of the schedule with these pieces."""
    if not pieces:
        return "Schedule(())"
    text = _in_steps(pieces) or _joined(_shortened(pieces))
    stop, last = pieces[-1][1:]
    return text if stop is None or isinstance(last, Sampled) else f"{text}.until({stop})"


def _shortened(pieces: list[Piece]) -> list[Piece]:
    """End each line where it reaches the constant after it. The plan ends it a step later, since both agree there."""
    found: list[Piece] = []
    for start, stop, form in pieces:
        if found and isinstance(form, Constant) and isinstance(found[-1][2], Linear):
            first, _, line = found[-1]
            while start - 1 > first and same(line.value(start - 1), form.scalar):
                start -= 1
            found[-1] = first, start, line
        found.append((start, stop, form))
    return found


def _in_steps(pieces: list[Piece]) -> str | None:
    """Return ``constant``, ``multistep`` or ``piecewise``; ``None`` unless all pieces are constants."""
    values = [form.scalar for _, _, form in pieces if isinstance(form, Constant)]
    if len(values) < len(pieces):
        return None
    if len(values) == 1:
        return f"constant({values[0]!r})"
    starts = [start for start, _, _ in pieces]
    first, second = values[:2]
    if isinstance(first, float) and isinstance(second, int | float):
        for gamma in _rounded(second / first, digits=3):
            if abs(gamma) < 1 and values == [decayed(first, gamma, times) for times in range(len(values))]:
                return f"multistep({first!r}, {starts[1:]!r}, gamma={gamma!r})"
    return f"piecewise({dict(zip(starts, values, strict=True))!r})"


def _joined(pieces: list[Piece]) -> str:
    """Return the pieces as a chain of ``until`` and ``then``."""
    text, done = "", False
    for at, (start, stop, form) in enumerate(pieces):
        if done:  # a constant with which the previous constructor ends
            done = False
            continue
        after = pieces[at + 1][2] if at + 1 < len(pieces) else None
        part, done = _part(form.shifted(-start), None if stop is None else stop - start, after)
        if not text:
            text = f"constant({part})" if isinstance(form, Constant) else part
        else:
            ended = isinstance(pieces[at - 1][2], Sampled)
            text += f"{'' if ended else f'.until({start})'}.then({part})"
    return text


def _part(form: Form, length: int | None, after: Form | None) -> tuple[str, bool]:
    """Return the text of a piece from step 0, and whether it includes the constant after the piece."""
    if isinstance(form, Constant):
        return repr(form.scalar), False
    at_0 = form.origin == 0
    match form:
        case Sampled() if length is not None:
            return f"sampled({[form.value(step) for step in range(length)]!r})", False
        case Exponential(base, gamma) if at_0:
            return f"exponential({base!r}, gamma={gamma!r})", False
        case Staircase(base, gamma, width) if at_0:
            return f"step({base!r}, step_size={width}, gamma={gamma!r})", False
        case Cosine(base, floor, half, 0) if at_0 and half.is_integer():
            return f"cosine({base!r}, T_max={int(half)}{f', eta_min={floor!r}' if floor else ''})", False
        case CosineRestarts(base, floor, first, growth) if at_0:
            return f"cosine_restarts({base!r}, T_0={first}, T_mult={growth}, eta_min={floor!r})", False
        case Polynomial(0, base, span, power) if form.origin == span:
            return f"polynomial({base!r}, total_iters={span}, power={power!r})", length == span and after == Constant(0)
        case Linear() if at_0 and length is not None:
            for value, start, end in _lines(form, length):
                if form == Linear(value * start, value * (end - start) / length):
                    factors = f"start_factor={start!r}{f', end_factor={end!r}' if end != 1 else ''}"
                    return f"linear({value!r}, {factors}, total_iters={length})", after == Constant(value * end)
    return f"Schedule((Segment({form!r}),))", False


def _lines(form: Linear, length: int) -> Iterator[tuple[float, float, float]]:
    """Yield guesses of a line's ``value``, ``start_factor`` and ``end_factor``, those with the fewest digits first."""
    end = form.base + form.slope * length
    for value in _rounded(end):
        if value:
            yield from ((value, factor, 1.0) for factor in _rounded(form.base / value))
    if form.base:
        yield from ((form.base, 1.0, factor) for factor in _rounded(end / form.base))


def _rounded(number: float, digits: int = 17) -> Iterator[float]:
    for count in range(1, digits + 1):
        yield float(f"{number:.{count}g}")
