"""Forms: a hyperparameter's value as a closed-form function of the step, independent of segments.

The step is counted from the trial's start. A form does not know where its segment starts or stops, so cutting a segment
changes no form. A form that needs a starting point stores it as an integer ``origin``, so that shifting it there and
back restores it bit for bit. A form is defined beyond its segment: the planner checks whether it would have agreed with
its successor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias, cast

import msgspec

from hpstage.errors import ScheduleError
from hpstage.schedule.scalars import MAX_STEPS, Scalar, canonical, finite, same

# A bounded staircase of up to this many stairs is written out as constants, so that it is compared with a schedule with
# the same milestones in O(pieces). Longer ones stay closed-form because of their size.
_MOST_STAIRS = 256

_POSITIVE = frozenset({"first", "growth", "half", "power", "span", "width"})
"""Fields of forms that must be greater than 0; all must be finite."""


class Constant(msgspec.Struct, frozen=True, gc=False, tag="constant", forbid_unknown_fields=True):
    """The same value at every step."""

    scalar: Scalar

    def __post_init__(self) -> None:
        given = self.scalar
        if type(given) is float and not given.is_integer() and given - given == 0.0:
            return  # it is canonical, as most are
        scalar = canonical(given)
        if scalar is not given:
            msgspec.structs.force_setattr(self, "scalar", scalar)

    def value(self, step: int) -> Scalar:
        return self.scalar

    def shifted(self, by: int) -> Constant:
        return self

    def holds(self, step: int) -> int:
        return MAX_STEPS

    def simplified(self, start: int, length: int | None) -> Iterator[tuple[Form, int | None]]:
        yield self, length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and same(self.scalar, other.scalar)

    def __hash__(self) -> int:
        return hash(self.scalar)


class _Curve(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the varying forms. ``origin`` is the step, from the trial's start, from which ``t`` counts."""

    origin: int = 0

    def __post_init__(self) -> None:
        if not -MAX_STEPS < self.origin < MAX_STEPS:
            raise ScheduleError(f"origin {self.origin} is out of range; it must be below 2**53")
        self.check()

    def check(self) -> None:
        """Raise ScheduleError for an invalid field."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in _POSITIVE and not 0 < value < math.inf:
                raise ScheduleError(
                    f"{name} of {type(self).__name__} is {value!r}; it must be greater than 0 and finite"
                )
            if not math.isfinite(value):
                raise ScheduleError(f"{name} of {type(self).__name__} is {value!r}; it must be finite")

    def at(self, t: int) -> float:
        """Return the value ``t`` steps after the origin."""
        raise NotImplementedError

    def value(self, step: int) -> Scalar:
        """Return the value at ``step``, counted from the trial's start; ScheduleError if it is not finite."""
        try:
            return finite(float(self.at(step - self.origin)))
        except (ArithmeticError, ValueError):  # out of range of floats; ScheduleError is a ValueError
            raise ScheduleError(
                f"{self!r} has no finite value at step {step}; bound it before that with .until(...)"
            ) from None

    def shifted(self, by: int) -> Form:
        """Return the same curve ``by`` steps later."""
        return cast(Form, msgspec.structs.replace(self, origin=self.origin + by))

    def holds(self, step: int) -> int:
        """Return a step up to which (exclusive) the value at ``step`` is certain not to change."""
        return step + 1

    def simplified(self, start: int, length: int | None) -> Iterator[tuple[Form, int | None]]:
        """Yield the simplest forms, with lengths, that have the same values over ``[start, start + length)``."""
        flat = self.value(start) if length == 1 else self.flat()
        yield (cast(Form, self) if flat is None else Constant(flat)), length

    def flat(self) -> Scalar:
        """Return the value of a curve that is flat because of its parameters; None if it is not."""
        return None


class Linear(_Curve, frozen=True, gc=False, tag="linear"):
    """``base + slope * t``. Warm-ups of equal slope are the same form, regardless of the peak at which they end."""

    base: float
    slope: float

    def at(self, t: int) -> float:
        return self.base + self.slope * t

    def flat(self) -> Scalar:
        return self.base if self.slope == 0 else None


class Exponential(_Curve, frozen=True, gc=False, tag="exponential"):
    """``base * gamma**t``."""

    base: float
    gamma: float

    def at(self, t: int) -> float:
        return decayed(self.base, self.gamma, t)

    def flat(self) -> Scalar:
        return self.base if self.gamma == 1 or self.base == 0 else None


class Staircase(_Curve, frozen=True, gc=False, tag="staircase"):
    """``base * gamma**(t // width)``: infinitely many constant stairs of ``width`` steps."""

    base: float
    gamma: float
    width: int

    def at(self, t: int) -> float:
        return decayed(self.base, self.gamma, t // self.width)

    def flat(self) -> Scalar:
        return self.base if self.gamma == 1 or self.base == 0 else None

    def holds(self, step: int) -> int:
        return step + self.width - (step - self.origin) % self.width

    def simplified(self, start: int, length: int | None) -> Iterator[tuple[Form, int | None]]:
        if self.flat() is None and self.width == 1:
            yield from Exponential(self.base, self.gamma, origin=self.origin).simplified(start, length)
        elif self.flat() is None and length is not None and length <= _MOST_STAIRS * self.width:
            stop = start + length
            while start < stop:
                end = min(self.holds(start), stop)
                yield Constant(self.value(start)), end - start
                start = end
        else:
            yield from super().simplified(start, length)


class Cosine(_Curve, frozen=True, gc=False, tag="cosine"):
    """Falls from ``base`` to ``floor`` in ``half`` steps along half a cosine, and back, forever.

    Its top is ``delay`` steps after the origin: torch's OneCycleLR has its peak between two steps.
    """

    base: float
    floor: float
    half: float
    delay: float = 0.0

    def at(self, t: int) -> float:
        # fmod is exact, so that every period has the values of the first.
        phase = math.fmod(t - self.delay, 2 * self.half)
        return _half_cosine(self.base, self.floor, phase / self.half)

    def flat(self) -> Scalar:
        return self.base if self.base == self.floor else None


class CosineRestarts(_Curve, frozen=True, gc=False, tag="cosine-restarts"):
    """Half a cosine from ``base`` to ``floor`` and a jump back, each cycle ``growth`` times longer than the last."""

    base: float
    floor: float
    first: int
    growth: int = 1

    def at(self, t: int) -> float:
        cycle = self.first
        if self.growth == 1:
            t %= cycle
        else:
            while t >= cycle:
                t -= cycle
                cycle *= self.growth
        return _half_cosine(self.base, self.floor, t / cycle)

    def flat(self) -> Scalar:
        return self.base if self.base == self.floor else None


class Polynomial(_Curve, frozen=True, gc=False, tag="polynomial"):
    """``base + change * (|t| / span)**power``.

    A decay that flattens towards its end (torch's PolynomialLR) has its origin at that end; a decay that is steepest at
    its start (1-sqrt) has its origin there.
    """

    base: float
    change: float
    span: int
    power: float

    def at(self, t: int) -> float:
        return self.base + self.change * math.pow(abs(t) / self.span, self.power)

    def flat(self) -> Scalar:
        return self.base if self.change == 0 else None


class Sampled(_Curve, frozen=True, gc=False, tag="sampled"):
    """``values[t]``: arbitrary values. Before and after the table, its first and its last value."""

    values: tuple[Scalar, ...]

    def check(self) -> None:
        if not self.values:
            raise ScheduleError("a sampled form needs at least one value")
        msgspec.structs.force_setattr(self, "values", tuple([canonical(value) for value in self.values]))

    def value(self, step: int) -> Scalar:
        return self.values[min(max(step - self.origin, 0), len(self.values) - 1)]

    def shifted(self, by: int) -> Sampled:
        return _table(self.values, self.origin + by)

    def holds(self, step: int) -> int:
        return step + 1 if step - self.origin < len(self.values) - 1 else MAX_STEPS

    def simplified(self, start: int, length: int | None) -> Iterator[tuple[Form, int | None]]:
        """Turn runs of equal values into constants; the values between them stay a table."""
        size = len(self.values)
        begin = start - self.origin
        end = size if length is None else begin + length
        if end <= 1 or begin >= size - 1:
            yield Constant(self.value(start)), length
            return
        first, last = max(begin, 0), min(end, size)
        # Each run is [its first t, its length]; steps outside the table belong to the outermost runs.
        runs: list[list[int]] = []
        for t in range(first, last):
            if runs and same(self.values[t], self.values[t - 1]):
                runs[-1][1] += 1
            else:
                runs.append([t, 1])
        runs[0][1] += first - begin
        runs[-1][1] += end - last
        if length is not None and len(runs) == length > 1:
            yield self, length
            return
        loose: list[int] = []
        for i, (t, steps) in enumerate(runs):
            forever = length is None and i == len(runs) - 1
            if steps == 1 and not forever:
                loose.append(t)
                continue
            yield from self._part(loose)
            loose = []
            yield Constant(self.values[t]), None if forever else steps
        yield from self._part(loose)

    def _part(self, loose: list[int]) -> Iterator[tuple[Form, int]]:
        if len(loose) == 1:
            yield Constant(self.values[loose[0]]), 1
        elif loose:
            yield _table(self.values[loose[0] : loose[-1] + 1], self.origin + loose[0]), len(loose)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sampled) or self.origin != other.origin:
            return False
        # Python holds (True,) == (1,): compare the values one by one.
        return self.values is other.values or (
            self.values == other.values and all(map(same, self.values, other.values))
        )

    def __hash__(self) -> int:
        return hash((self.values, self.origin))


Form: TypeAlias = Constant | Linear | Exponential | Staircase | Cosine | CosineRestarts | Polynomial | Sampled


def _table(values: tuple[Scalar, ...], origin: int) -> Sampled:
    """Return a sampled form of canonical values, bypassing the constructor, which would check each again."""
    table = Sampled(values[:1], origin=origin)
    msgspec.structs.force_setattr(table, "values", values)
    return table


def _half_cosine(top: float, floor: float, x: float) -> float:
    """Interpolate from ``top`` at ``x = 0`` to ``floor`` at ``x = 1``."""
    return floor + (top - floor) * (1 + math.cos(math.pi * x)) / 2


def varies(form: Form) -> bool:
    """Whether the form's value may change from step to step."""
    return form.__class__ is not Constant


def agreement(a: Form, b: Form, start: int, stop: int) -> int:
    """Return the first step in ``[start, stop)`` at which the forms' values differ; ``stop`` if there is none.

    Forms may be evaluated beyond their segments; a form that has no finite value there differs from any other. O(1) for
    equal forms and for constants, one comparison per stair for staircases, else one per step.
    """
    if a is b:
        return stop
    if isinstance(a, Constant) and isinstance(b, Constant):
        return stop if same(a.scalar, b.scalar) else min(start, stop)
    if a == b:
        return stop
    step = start
    while step < stop:
        try:
            if not same(a.value(step), b.value(step)):
                return step
        except ScheduleError:
            return step
        step = min(a.holds(step), b.holds(step))
    return stop


def decayed(base: float, gamma: float, times: int) -> float:
    """Return ``base * gamma**times``, computed in the same way for stairs, milestones and exponentials."""
    try:
        return base * gamma**times
    except OverflowError:
        raise ScheduleError(f"{base!r} * {gamma!r}**{times} is not finite") from None
