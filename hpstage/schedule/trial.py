"""The schedules of one trial, side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from hpstage.errors import ScheduleError
from hpstage.schedule import Constant, Form, Schedule
from hpstage.schedule.scalars import distinct

Piece = tuple[int, int, tuple[object, ...], list[Form] | None]
"""``(start, stop, values, forms)``: see :func:`pieces`."""


def pieces(schedules: Sequence[Schedule], steps: int) -> Iterable[Piece]:
    """Return ``(start, stop, values, forms)`` for each range in ``[0, steps)`` on which no schedule changes its form.

    If no form varies in a range, ``values`` are the forms' values in the form for look-ups
    (:func:`hpstage.schedule.scalars.distinct`), and ``forms`` is ``None``. Otherwise ``values`` is empty, and ``forms``
    is a list that is changed in place from range to range.
    """
    return _aligned(schedules, steps) or _merged(schedules, steps)


def _aligned(schedules: Sequence[Schedule], steps: int) -> list[Piece] | None:
    """Return the pieces if all schedules consist of constants and change at the same steps, in two thirds of the time
    that :func:`_merged` takes; otherwise ``None``."""
    pieces = len(schedules[0].segments)
    for schedule in schedules:
        if len(schedule.segments) != pieces:
            return None
    found: list[Piece] = []
    start = 0
    for row in zip(*[schedule.segments for schedule in schedules], strict=True):
        if start >= steps:
            break
        length = row[0].length
        values: list[object] = []
        for segment in row:
            form = segment.form
            if form.__class__ is not Constant or segment.length != length:
                return None
            scalar = form.scalar
            values.append(scalar if scalar.__class__ is not bool else distinct(scalar))
        found.append((start, steps if length is None else start + length, tuple(values), None))
        start += length or 0
    if not found:
        return None
    begin, _, last, _ = found[-1]
    found[-1] = begin, steps, last, None
    return found


def _merged(schedules: Sequence[Schedule], steps: int) -> Iterator[Piece]:
    """Yield the pieces of any schedules."""
    forms: list[Form] = [schedule.segments[0].form for schedule in schedules]
    joints: list[tuple[int, int, Form]] = []  # (step, index of the schedule, its form from there on)
    for index, schedule in enumerate(schedules):
        begin = 0
        for segment in schedule.segments:
            if 0 < begin < steps:
                joints.append((begin, index, segment.form))
            begin += segment.length or 0
    joints.sort(key=_step)
    values: list[object] = [distinct(form.scalar) if form.__class__ is Constant else None for form in forms]
    varying = sum([form.__class__ is not Constant for form in forms])
    start = 0
    for step, index, form in joints:
        if step > start:
            yield (start, step, (), forms) if varying else (start, step, tuple(values), None)
            start = step
        if form.__class__ is Constant:
            scalar = form.scalar
            values[index] = scalar if scalar.__class__ is not bool else distinct(scalar)
            varying -= forms[index].__class__ is not Constant
        else:
            varying += forms[index].__class__ is Constant
        forms[index] = form
    yield (start, steps, (), forms) if varying else (start, steps, tuple(values), None)


_step = itemgetter(0)


def length_of(schedules: Mapping[str, Schedule], stated: int | None, trial: str) -> int | None:
    """Return the number of steps of a trial: as ``stated``, or else where its schedules end; ``None`` if none ends.

    Raises:
        ScheduleError: schedules end at different steps, or not at the stated one; the message names them and the
            remedy.
    """
    if not schedules:
        raise ScheduleError(f"{trial}: there are no hyperparameters; the space must return at least one")
    lengths = {name: schedule.length for name, schedule in schedules.items() if schedule.length is not None}
    for name, length in sorted(lengths.items()):
        if length == 0:
            raise ScheduleError(f"{trial}: the schedule of {name!r} has no steps; give it at least one")
        if stated is not None and length != stated:
            remedy = "add .then(...)" if length < stated else f"bound it with .until({stated})"
            raise ScheduleError(
                f"{trial}: the schedule of {name!r} ends at step {length}, but space() returned {stated} steps; "
                f"{remedy}, or leave 'steps' out of what space() returns"
            )
    if len(set(lengths.values())) > 1:
        ends = ", ".join(f"{name!r} at {length}" for name, length in sorted(lengths.items()))
        shortest = min(lengths.values())
        raise ScheduleError(
            f"{trial}: schedules end at different steps ({ends}); bound them with .until({shortest}), or add .then(...)"
        )
    return stated if stated is not None else next(iter(lengths.values()), None)
