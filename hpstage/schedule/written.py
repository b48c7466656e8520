"""The ``repr`` of schedules: the constructors that make them, found from their forms. Pure.

A schedule does not record how it was written: its ``repr`` is the same in every process, and when it is read from a
store. Where several expressions make the schedule, it is the shortest; where no constructor does, it has the forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import NamedTuple

from hpstage.errors import ScheduleError
from hpstage.schedule.forms import Constant, Linear, Polynomial, Sampled, decayed
from hpstage.schedule.guesses import Guess, Piece, forms, guesses, rounded
from hpstage.schedule.scalars import Scalar, same
from hpstage.schedule.shapes import Shape

_MOST_MILESTONES = 3  # with more of them at equal distances, it is a step(...)
_SHORT = 4  # Constants of so few steps next to a table are written as values of it.


class _Part(NamedTuple):
    """The text of a constructor, how many of the pieces it makes, and its number of steps."""

    text: str
    pieces: int
    length: int | None


def written(pieces: list[Piece]) -> str:
    """Return an expression, with the names of :mod:`hpstage.schedule`, of the schedule with these pieces."""
    if not pieces:
        return "Schedule(())"
    pieces = _shortened(pieces)
    text, end, at = "", None, 0
    while at < len(pieces):
        start = pieces[at][0]
        part = _table(pieces, at) or _constants(pieces, at) or _curves(pieces, at)
        if at:
            text += f"{'' if end == start else f'.until({start})'}.then({part.text})"
        else:
            text = f"constant({part.text})" if _is_constant(pieces[0]) and part.pieces == 1 else part.text
        at += part.pieces
        end = None if part.length is None else start + part.length
    stop = pieces[-1][1]
    return text if end == stop else f"{text}.until({stop})"


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


def _is_constant(piece: Piece) -> bool:
    return isinstance(piece[2], Constant)


# --- tables and constants ---------------------------------------------------------------------------------


def _table(pieces: list[Piece], at: int) -> _Part | None:
    def fits(piece: Piece) -> bool:
        start, stop, form = piece
        return isinstance(form, Sampled) or (_is_constant(piece) and stop is not None and stop - start <= _SHORT)

    found = list(takewhile(fits, pieces[at:]))
    if not any(isinstance(form, Sampled) for _, _, form in found):
        return None
    values = [form.value(step) for start, stop, form in found for step in range(start, stop or start)]
    return _Part(f"sampled({values!r})", len(found), len(values))


def _constants(pieces: list[Piece], at: int) -> _Part | None:
    """Return ``multistep``, ``step`` or ``piecewise`` for several constants in a row."""
    origin = pieces[at][0]
    found = list(takewhile(_is_constant, pieces[at:]))
    if len(found) < 2:
        return None
    values = [form.value(start) for start, _, form in found]
    marks = [start - origin for start, _, _ in found[1:]]
    decay = _decay(values)
    if decay is None:
        return _Part(f"piecewise({dict(zip([0, *marks], values, strict=True))!r})", len(found), None)
    base, gamma, times = decay
    milestones = [
        mark for mark, (before, after) in zip(marks, pairwise(times), strict=True) for _ in range(before, after)
    ]
    stop, width = found[-1][1], marks[0]
    even = milestones == [*range(width, milestones[-1] + 1, width)]
    if even and len(marks) > _MOST_MILESTONES and stop is not None and stop - origin <= marks[-1] + width:
        return _Part(f"step({base!r}, step_size={width}, gamma={gamma!r})", len(found), None)
    return _Part(f"multistep({base!r}, {milestones!r}, gamma={gamma!r})", len(found), None)


def _decay(values: list[Scalar]) -> tuple[float, float, list[int]] | None:
    """Return the first value, a factor, and how often the factor is in each value. Whole numbers are choices (64, 32):
    they have none."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values) or 0 in numbers or all(map(float.is_integer, numbers)):
        return None
    base, digits = numbers[0], 3 if len(values) == 2 else 17
    shares = [number / base for number in numbers]
    ratios = [after / before for before, after in pairwise(numbers)]
    for gamma in (gamma for ratio in (max(ratios), ratios[0]) for gamma in rounded(ratio, digits)):
        if 0 < gamma < 1 and min(shares) > 0:
            times = [round(math.log(share, gamma)) for share in shares]
            if times == sorted({*times}) and numbers == [decayed(base, gamma, count) for count in times]:
                return base, gamma, times
    return None


# --- curves -----------------------------------------------------------------------------------------------


def _curves(pieces: list[Piece], at: int) -> _Part:
    """Return the constructor of the first piece, and of those after it if possible."""
    since = _since(pieces[at])
    origin = pieces[at][0] - since
    here = [
        (start - origin if index else 0, None if stop is None else stop - origin, form.shifted(-origin))
        for index, (start, stop, form) in enumerate(pieces[at : at + 3])
    ]
    following = list(map(_is_constant, pieces[at : at + 5]))
    part = _best(guesses(here), here, following) or _best([forms(here)], here, following)
    assert part is not None
    if since:
        part = _Part(f"{part.text}.since({since})", part.pieces, None if part.length is None else part.length - since)
    return part


def _best(groups: list[Iterator[Guess]], here: list[Piece], constant: list[bool]) -> _Part | None:
    """Return the guess that makes the most pieces, and of those the one with the shortest text."""
    best, cost = None, (0, 0)
    for group in groups:
        for text, make in group:
            try:
                shape = make()
                count = _matched(here, shape)
            except (ScheduleError, ArithmeticError):  # what was guessed is no schedule
                continue
            complete = count in (len(here), len(shape))
            if count > 1 and constant[count - 1 : count + 2] == [True] * 3:
                count -= 1  # the first of several constants is written with those after it
            length = _length(shape)
            bound = "" if count and length == here[count - 1][1] else ".until(100)"
            if (-count, len(text + bound)) < cost:
                cost = -count, len(text + bound)
                best = _Part(text, count, length)
            if complete:
                break
    return best


def _since(piece: Piece) -> int:
    """Return how many steps before a piece its curve begins: those that ``.since`` has cut off."""
    start, _, form = piece
    if isinstance(form, Constant | Sampled):
        return 0
    span = form.span if isinstance(form, Polynomial) and form.base == 0 else 0
    return max(start - (form.origin - span), 0)


def _length(shape: Shape) -> int | None:
    lengths = [length for _, length in shape if length is not None]
    return sum(lengths) if len(lengths) == len(shape) else None


def _matched(pieces: list[Piece], shape: Shape) -> int:
    """Return how many of the pieces the shape begins with. The last of them may be longer in the shape."""
    count = start = 0
    for form, length in shape:
        if length == 0:
            continue
        if count == len(pieces):
            break
        _, stop, wanted = pieces[count]
        if form != wanted and not (stop == start + 1 and same(form.value(start), wanted.value(start))):
            break
        end = None if length is None else start + length
        if end is not None and (stop is None or end < stop):
            break
        count += 1
        if end is None or end != stop:
            break
        start = end
    return count
