"""Schedules: one hyperparameter as a function of the step, as segments laid end to end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar, overload, runtime_checkable

import msgspec

from hpstage.errors import ScheduleError
from hpstage.schedule.forms import Constant, Form, agreement
from hpstage.schedule.scalars import MAX_STEPS, Scalar, count
from hpstage.schedule.written import written

_T = TypeVar("_T", covariant=True)


@runtime_checkable
class Undecided(Protocol[_T]):
    """A schedule whose values are decided while the trial is trained; it may follow an ordinary one."""

    def after(self, before: Schedule) -> _T: ...


class Segment(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """``length`` steps of one form; ``None``: forever."""

    form: Form
    length: int | None = None


class Schedule(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One hyperparameter as a function of the step 0, 1, 2, ...

    Created with the constructors of ``hpstage.schedule``. Construction normalizes it: no empty segments, no equal
    neighbours, constants where the value does not vary. Two schedules are equal if they have the same length and the
    same value at every step, however they were written or cut; open ones, if they agree up to the last joint and their
    last forms are equal.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not _is_normal(self.segments):
            msgspec.structs.force_setattr(self, "segments", _normal(self.segments))

    # --- reading ------------------------------------------------------------------------------------------

    @property
    def length(self) -> int | None:
        """The number of steps; ``None`` if the schedule is open."""
        total = 0
        for segment in self.segments:
            if segment.length is None:
                return None
            total += segment.length
        return total

    def pieces(self) -> list[tuple[int, int | None, Form]]:
        """Return ``(start, stop, form)`` of each segment in order; the ``stop`` of an open one is ``None``."""
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
        """Return the form at ``step``; ScheduleError past the end."""
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
        """Return the value at ``step``; ScheduleError past the end, or if it is not finite."""
        return self.form_at(step).value(step)

    def values(self, stop: int) -> Iterator[Scalar]:
        """Yield the values at steps 0 to ``stop - 1``."""
        for start, end, form in self.pieces():
            if start >= stop:
                return
            yield from map(form.value, range(start, stop if end is None else min(end, stop)))
        if (length := self.length) is not None and length < stop:
            raise ScheduleError(f"the schedule has no step {length}; it covers [0, {length})")

    def __repr__(self) -> str:
        """Return constructors that make the schedule, such as ``multistep(0.1, [30], gamma=0.1)``."""
        return written(self.pieces())

    # --- composing ----------------------------------------------------------------------------------------

    @overload
    def then(self, other: Schedule | Scalar) -> Schedule: ...
    @overload
    def then(self, other: Undecided[_T]) -> _T: ...
    def then(self, other: Schedule | Scalar | Undecided[_T]) -> Schedule | _T:
        """Append another schedule, whose steps count from the joint."""
        if isinstance(other, Undecided):
            return other.after(self)
        joint = self.length
        if joint is None:
            raise ScheduleError("nothing can follow a schedule without an end; bound it with .until(step)")
        return Schedule(self.segments + shifted(as_schedule(other).segments, joint))

    def until(self, step: int) -> Schedule:
        """Return the first ``step`` steps; ScheduleError if there are fewer."""
        stop = self._within(step)
        segments = []
        for start, end, form in self.pieces():
            if start >= stop:
                break
            segments.append(Segment(form, (stop if end is None else min(end, stop)) - start))
        return Schedule(tuple(segments))

    def since(self, step: int) -> Schedule:
        """Return the rest after the first ``step`` steps; its steps count from 0.

        ``s.until(k).then(s.since(k)) == s``.
        """
        first = self._within(step)
        segments = [
            Segment(form, None if end is None else end - max(start, first))
            for start, end, form in self.pieces()
            if end is None or end > first
        ]
        return Schedule(shifted(segments, -first))

    def _within(self, step: int) -> int:
        step, length = count("step", step), self.length
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
        length = self.length
        if length != other.length:
            return False
        if length is None:
            if self.segments[-1].form != other.segments[-1].form:
                return False
            length = max(self.pieces()[-1][0], other.pieces()[-1][0])
        return self.agrees(other, length) == length

    def agrees(self, other: Schedule, stop: int) -> int:
        """Return the first step before ``stop`` at which two schedules differ, or one has ended; else ``stop``."""
        mine, theirs = self.pieces(), other.pieces()
        step = i = j = 0
        while step < stop and i < len(mine) and j < len(theirs):
            end = min([stop, *(end for end in (mine[i][1], theirs[j][1]) if end is not None)])
            differ = agreement(mine[i][2], theirs[j][2], step, end)
            if differ < end:
                return differ
            step = end
            i += mine[i][1] == end
            j += theirs[j][1] == end
        one_has_ended = (i < len(mine)) != (j < len(theirs))
        return step if one_has_ended else stop

    def __hash__(self) -> int:
        # Hash the properties that all spellings of equal schedules have in common: length, some values, the open form.
        length = self.length
        if length is None:
            return hash((None, self.value(0), self.segments[-1].form))
        if length == 0:
            return 0
        return hash((length, self.value(0), self.value(length // 2), self.value(length - 1)))


def _is_normal(segments: tuple[Segment, ...]) -> bool:
    """Whether :func:`_normal` is certain to change nothing: true for constants, as in plain values and journals."""
    left = MAX_STEPS
    last = len(segments) - 1
    before: object = _is_normal  # nothing equals it
    for i, segment in enumerate(segments):
        form, length = segment.form, segment.length
        if form.__class__ is not Constant or form.scalar == before:
            return False
        before = form.scalar
        if length is None:
            return i == last
        if not 0 < length <= left:
            return False
        left -= length
    return True


def _normal(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Return the segments without empty ones, without equal neighbours, and in the simplest forms."""
    plain: list[Segment] = []
    start = 0
    last = len(segments) - 1
    for i, segment in enumerate(segments):
        length = segment.length
        if length is None:
            if i != last:
                raise ScheduleError("only the last segment of a schedule can be open; give the others a length")
        elif not 0 <= length <= MAX_STEPS - start:
            raise ScheduleError(f"a segment cannot have {length} steps; lengths are at least 0 and below 2**53")
        elif length == 0:
            continue
        form = segment.form
        if form.__class__ is Constant:
            _add(plain, form, length, segment)
        else:
            # Every form is monotone, periodic or a table: if it is finite at both ends, it is finite between them.
            form.value(start)
            if length is not None:
                form.value(start + length - 1)
            for simple, part in form.simplified(start, length):
                _add(plain, simple, part, None)
        if length is not None:
            start += length
    return tuple(plain)


def _add(segments: list[Segment], form: Form, length: int | None, written: Segment | None) -> None:
    """Append ``length`` steps of ``form``; ``written`` is an equal segment to reuse, if there is one."""
    if segments and segments[-1].form == form:
        before = segments[-1].length
        segments[-1] = Segment(form, None if length is None or before is None else before + length)
    else:
        segments.append(Segment(form, length) if written is None else written)


def shifted(segments: Iterable[Segment], by: int) -> tuple[Segment, ...]:
    return tuple([Segment(segment.form.shifted(by), segment.length) for segment in segments])


def as_schedule(x: Schedule | Scalar) -> Schedule:
    """Return a schedule unchanged, and a plain value as a constant schedule."""
    if isinstance(x, Schedule):
        return x
    if hasattr(x, "after"):
        raise ScheduleError("s.plateau(...) is the last part of a schedule: .until(step).then(s.plateau(...))")
    if (callable(x) and not isinstance(x, type)) or isinstance(x, list | tuple | dict):
        by = "sampled(f, steps)" if callable(x) else "piecewise({0: ...})" if isinstance(x, dict) else "sampled([...])"
        raise ScheduleError(f"a {type(x).__name__} is not a value; for values over steps, use hpstage.schedule.{by}")
    return Schedule((Segment(Constant(x)),))
