"""Guesses of constructors that make given pieces of a schedule, for :mod:`hpstage.schedule.written`. Pure.

The pieces begin at step 0. Where parameters do not follow from the forms, those with the fewest digits come first. A
guess may be wrong: what it makes is compared with the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import TypeAlias

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
)
from hpstage.schedule.scalars import MAX_STEPS
from hpstage.schedule.shapes import DecayForm, Shape, Strategy, line, one_cycle, warmup_stable_decay

Piece: TypeAlias = tuple[int, int | None, Form]
"""``(start, stop, form)``; without an end, ``stop`` is ``None``."""

Guess: TypeAlias = tuple[str, Callable[[], Shape]]
"""The text of a constructor with its parameters, and what it makes."""


def guesses(pieces: list[Piece]) -> list[Iterator[Guess]]:
    """Return the guesses of each group of constructors."""
    return [_alone(pieces[0][2]), _lines(pieces), _cycles(pieces), _decays(pieces), _warmups(pieces)]


def forms(pieces: list[Piece]) -> Iterator[Guess]:
    """Return expressions of any first piece: its form itself, or for a line the decay of a ``wsd``."""
    _, stop, form = pieces[0]
    if isinstance(form, Linear) and form.origin == 0 and stop is not None:
        for end in _rounded(form.at(stop)):
            yield _wsd(form.base, stop, 0, stop, end, "linear")
    yield f"Schedule((Segment({form!r}{'' if stop is None else f', {stop}'}),))", lambda: [(form, stop)]


def _alone(form: Form) -> Iterator[Guess]:
    """Guess the constructors whose parameters are those of a form."""
    shape: Shape = [(form, None)]
    text = ""
    match form:
        case Constant(scalar):
            text = repr(scalar)
        case Polynomial(0, base, span, power) if form.origin == span:
            text, shape = (
                f"polynomial({base!r}, total_iters={span}, power={power!r})",
                [(form, span), (Constant(0), None)],
            )
        case _ if form.origin != 0:
            return
        case Exponential(base, gamma):
            text = f"exponential({base!r}, gamma={gamma!r})"
        case Staircase(base, gamma, width):
            text = f"step({base!r}, step_size={width}, gamma={gamma!r})"
        case Cosine(base, floor, half, 0) if half.is_integer():
            text = f"cosine({base!r}, T_max={int(half)}{_word('eta_min', floor, 0)})"
        case CosineRestarts(base, floor, first, growth):
            text = f"cosine_restarts({base!r}, T_0={first}{_word('T_mult', growth, 1)}{_word('eta_min', floor, 0)})"
    if text:
        yield text, lambda: shape


# --- lines ------------------------------------------------------------------------------------------------


def _lines(pieces: list[Piece]) -> Iterator[Guess]:
    """Guess ``polynomial`` and ``linear``."""
    _, steps, form = pieces[0]
    if not isinstance(form, Linear) or form.origin or steps is None:
        return
    for total in (steps, _whole(-form.base / form.slope)):
        yield f"polynomial({form.base!r}, total_iters={total})", partial(line, form.base, 1.0, 0.0, total)
    for value, first, last, total in _factors(form, steps):
        factors = f"{_word('start_factor', first, 1 / 3)}{_word('end_factor', last, 1)}"
        yield f"linear({value!r}{factors}, total_iters={total})", partial(line, value, first, last, total)


def _factors(form: Linear, steps: int) -> Iterator[tuple[float, float, float, int]]:
    """Guess ``value``, ``start_factor``, ``end_factor`` and ``total_iters`` of a line."""
    base, end = form.base, form.base + form.slope * steps
    for digits in (4, 17):
        for value in _rounded(end, digits):
            if value:
                yield from ((value, factor, 1.0, steps) for factor in (1 / 3, *_rounded(base / value, digits)))
        if base:
            yield from ((base, 1.0, factor, steps) for factor in _rounded(end / base, digits))
            # The line may have been cut: with a usual factor, its length follows.
            for factor in (1 / 3, 0.5, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001):
                for value in _rounded(base / factor, 4):
                    yield value, factor, 1.0, _whole(value * (1 - factor) / form.slope)


# --- onecycle ---------------------------------------------------------------------------------------------


def _cycles(pieces: list[Piece]) -> Iterator[Guess]:
    match [form for _, _, form in pieces]:
        case [Cosine(first, top, joint, 0), Cosine(_, middle), Cosine(_, last, rest, begin)] if middle == first:
            yield from _onecycle(top, begin + rest, joint, "cos", first, last, three_phase=True)
        case [Cosine(first, top, joint, 0), Cosine(_, last, rest, begin), *_] if begin == joint:
            yield from _onecycle(top, joint + rest, joint, "cos", first, last)
        case [Cosine(first, last, half, -1), *_]:  # no steps up
            yield from _onecycle(first, half - 1, -1.0, "cos", first / 25, last)
        case [Cosine(first, last, half, 0), *_]:  # no steps down, or they were cut off
            for share in (0.3, 1.0):
                yield from _onecycle(last, (half + 1) / share - 1, half, "cos", first, first / 1e4)
        case [Cosine(top, last, rest, joint)] if joint > 0:  # the way down of two phases
            for text, make in _onecycle(top, joint + rest, joint, "cos", top / 25, last):
                yield text, partial(_without_first, make)
        case [Linear(first, up), Linear(begin, down) as fall, *more] if up != down:
            three_phase = bool(more) and isinstance(more[0], Linear)
            _, stop, form = pieces[2] if three_phase else pieces[1]
            if stop is not None and isinstance(form, Linear):
                joint = (begin - down * fall.origin - first) / (up - down)
                last = form.at(stop - 1 - form.origin)
                for top in _rounded(first + up * joint, 6):
                    yield from _onecycle(top, stop - 1.0, joint, "linear", first, last, three_phase=three_phase)


def _without_first(make: Callable[[], Shape]) -> Shape:
    """Return a shape whose second form begins at step 0: it was cut behind the first."""
    (_, before), (form, length), *more = make()
    return [(form, None if before is None or length is None else before + length), *more]


def _onecycle(
    top: float, end: float, joint: float, strategy: Strategy, first: float, last: float, *, three_phase: bool = False
) -> Iterator[Guess]:
    """Guess ``onecycle`` by its last step, the point of its peak, and its first and last value."""
    steps = _whole(end) + 1
    if not first or not last:
        return
    divisors = [divisor for divisor in _rounded(top / first, 6) if divisor and top / divisor == first]
    for share, divisor, final in product(_rounded((joint + 1) / steps, 6), divisors, _rounded(first / last, 6)):
        if final:
            words = (
                _word("pct_start", share, 0.3),
                _word("anneal_strategy", strategy, "cos"),
                _word("div_factor", divisor, 25),
                _word("final_div_factor", final, 1e4),
                _word("three_phase", three_phase, False),
            )
            make = partial(one_cycle, top, steps, share, strategy, first, first / final, three_phase)
            yield f"onecycle({top!r}, {steps}{''.join(words)})", make


# --- warm-up, stable, decay -------------------------------------------------------------------------------


def _warmups(pieces: list[Piece]) -> Iterator[Guess]:
    """Guess ``wsd`` without a decay."""
    rise = _rise(pieces)
    if rise == 0:
        return
    match pieces[1:]:
        case [(_, int(stop), Constant(float() | int() as top)), *_]:
            yield _wsd(float(top), stop, rise, 0, 0.0, "linear")
    form = pieces[0][2]
    if isinstance(form, Linear):
        for top in _rounded(form.at(rise - 1)):
            yield _wsd(top, rise, rise, 0, 0.0, "linear")


def _decays(pieces: list[Piece]) -> Iterator[Guess]:
    """Guess ``wsd`` with a decay."""
    rise = _rise(pieces)
    rest = pieces[1:] if rise else pieces
    if rest and isinstance(rest[0][2], Constant):
        rest = rest[1:]
    if not rest:
        return
    joint, stop, form = rest[0]
    if stop is None or isinstance(form, Constant | Sampled) or form.origin != joint:
        return
    steps = stop - joint
    match form:
        case Linear(top, slope) if joint:
            for fall in (steps, _whole(-top / slope)):
                for end in _rounded(top + slope * fall):
                    yield _wsd(top, joint + fall, rise, fall, end, "linear")
        case Cosine(top, end, half, 0):
            yield _wsd(top, joint + _whole(half), rise, _whole(half), end, "cosine")
        case Polynomial(top, change, fall, 0.5):
            for end in _rounded(top + change):
                yield _wsd(top, joint + fall, rise, fall, end, "1-sqrt")
        case Exponential(top, gamma):
            for end in _rounded(form.at(steps - 1) * gamma):
                yield _wsd(top, stop, rise, steps, end, "exponential")


def _rise(pieces: list[Piece]) -> int:
    """Return the number of steps of a warm-up as in ``wsd``; 0 if the pieces do not begin with one."""
    _, stop, form = pieces[0]
    is_warmup = isinstance(form, Linear) and form.origin == 0 and form.base == form.slope
    return stop + 1 if is_warmup and stop is not None else 0


def _wsd(top: float, steps: int, rise: int, fall: int, end: float, form: DecayForm) -> Guess:
    words = f"{_word('final', end, 0)}{_word('decay_form', form, 'linear')}"
    text = f"wsd({top!r}, {steps}, warmup={rise}, decay={fall}{words})"
    return text, partial(warmup_stable_decay, top, steps, rise, fall, end, form)


# --- parameters -------------------------------------------------------------------------------------------


def _rounded(number: float, digits: int = 17) -> Iterator[float]:
    if abs(number) < 1e-9:
        yield 0.0
    yield from rounded(number, digits)


def rounded(number: float, digits: int = 17) -> Iterator[float]:
    """Yield a number with one digit, two digits and so on."""
    for count in range(1, digits + 1):
        yield float(f"{number:.{count}g}")


def _whole(number: float) -> int:
    return round(number) if abs(number) < MAX_STEPS else 0


def _word(name: str, value: object, default: object) -> str:
    return "" if value == default else f", {name}={value!r}"
