"""Forms: how a hyper-parameter's value follows from the step, in closed form and knowing of no segment.

A form is asked for its value at a step counted from the trial's start. It does not know where its segment starts
or stops, so cutting a segment changes no form; a form that needs a starting point carries it as an integer
``origin``, so that shifting it there and back restores it bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias, cast

import msgspec

from hpstage.errors import ScheduleError

Scalar: TypeAlias = str | int | float | bool | None
"""A value of a hyper-parameter. What one may be, and in which spelling, is decided by ``canonical``."""

MAX_STEPS = 2**53
"""Steps below this are exact as floats; lengths and origins stay below it."""

# What JSON carries as an integer. Whole floats of this range become integers and larger integers are refused, so
# that two canonical numbers that compare equal are one number, of one type.
_LEAST_INT, _PAST_INT = -(2**63), 2**64

# A bounded staircase of up to this many stairs is written out as constants: it then meets a schedule with the same
# milestones in O(pieces). Longer ones stay closed-form, for their size.
_MOST_STAIRS = 256


# --- values -----------------------------------------------------------------------------------------------


def canonical(value: object) -> Scalar:
    """The one spelling of a value: ``1.0`` is ``1``, ``-0.0`` is ``0``, ``True`` is not ``1``; numpy scalars as Python's.

    Raises:
        ScheduleError: not a JSON scalar; NaN or infinite; an integer or a text that JSON cannot carry.
    """
    kind = value.__class__
    if kind is float:
        return _number(cast(float, value))
    if kind is int:
        if _LEAST_INT <= cast(int, value) < _PAST_INT:
            return cast(int, value)
        raise ScheduleError(f"{value!r} does not fit 64 bits; write it as a float or as a string")
    if kind is str:
        text = cast(str, value)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ScheduleError(f"{text!r} is not valid Unicode and cannot be written as JSON") from None
        return text
    if value is None or kind is bool:
        return cast(Scalar, value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        item = value.item()  # numpy's scalars, and 0-dimensional arrays and tensors
        if item.__class__ is not kind:
            return canonical(item)
    # Enums with a plain value, and other subclasses: the plain value.
    if isinstance(value, str):
        return canonical(str.__str__(value))
    if isinstance(value, int):
        return canonical(int.__int__(value))
    if isinstance(value, float):
        return canonical(float.__float__(value))
    raise ScheduleError(
        f"{value!r} ({kind.__name__}) cannot be a hyper-parameter's value; use a string, a number, a bool or None"
    )


def same(a: Scalar, b: Scalar) -> bool:
    """Whether training sees the same thing. ``True`` and ``1`` differ, ``1`` and ``1.0`` do not."""
    return a == b and (a.__class__ is bool) is (b.__class__ is bool)


def _number(value: float) -> int | float:
    """A float in canonical spelling; ScheduleError for NaN and infinities."""
    if value.is_integer():
        return int(value) if _LEAST_INT <= value < _PAST_INT else value
    if value - value != 0.0:
        raise ScheduleError(f"{value!r} cannot be a hyper-parameter's value; it must be finite")
    return value


def _finite(form: str, **fields: float) -> None:
    for name, value in fields.items():
        if not math.isfinite(value):
            raise ScheduleError(f"{name} of {form} is {value!r}; it must be finite")


def _positive(form: str, **fields: float) -> None:
    for name, value in fields.items():
        if not 0 < value < math.inf:
            raise ScheduleError(f"{name} of {form} is {value!r}; it must be greater than 0 and finite")


def decayed(base: float, gamma: float, times: int) -> float:
    """``base * gamma**times``: the one way in which stairs, milestones and exponentials are computed."""
    return base * gamma**times


# --- forms ------------------------------------------------------------------------------------------------


class Constant(msgspec.Struct, frozen=True, gc=False, tag="constant"):
    """The same value at every step."""

    scalar: Scalar

    def __post_init__(self) -> None:
        scalar = canonical(self.scalar)
        if scalar is not self.scalar:
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


class _Curve(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What the forms share that vary. ``origin`` is the step, from the trial's start, at which they count 0."""

    origin: int = 0

    def __post_init__(self) -> None:
        if not -MAX_STEPS < self.origin < MAX_STEPS:
            raise ScheduleError(f"origin {self.origin} is out of range; it must be below 2**53")
        self.check()

    def check(self) -> None:
        """Raise ScheduleError for a field that cannot be."""
        raise NotImplementedError

    def at(self, t: int) -> float:
        """The value ``t`` steps after the origin."""
        raise NotImplementedError

    def value(self, step: int) -> Scalar:
        """The value at ``step``, counted from the trial's start; ScheduleError where it is not finite."""
        try:
            return _number(float(self.at(step - self.origin)))
        except (ArithmeticError, ValueError):  # beyond the floats; ScheduleError is a ValueError
            raise ScheduleError(
                f"{self!r} has no finite value at step {step}; bound it with .until(step)"
            ) from None

    def shifted(self, by: int) -> Form:
        """The same curve ``by`` steps later."""
        return cast(Form, msgspec.structs.replace(self, origin=self.origin + by))

    def holds(self, step: int) -> int:
        """A step up to which (exclusive) the value at ``step`` is sure to last."""
        return step + 1

    def simplified(self, start: int, length: int | None) -> Iterator[tuple[Form, int | None]]:
        """The plainest forms, with lengths, that have the same values over ``[start, start + length)``."""
        flat = self.flat()
        if flat is None and length == 1:
            flat = self.value(start)
            yield Constant(flat), 1
        elif flat is None:
            yield cast(Form, self), length
        else:
            yield Constant(flat), length

    def flat(self) -> Scalar:
        """The one value of a curve whose parameters make it flat; None if it is not."""
        return None


class Linear(_Curve, frozen=True, gc=False, tag="linear"):
    """``base + slope * t``. Warm-ups of one slope are one form, whatever the peak at which they end."""

    base: float
    slope: float

    def check(self) -> None:
        _finite("Linear", base=self.base, slope=self.slope)

    def at(self, t: int) -> float:
        return self.base + self.slope * t

    def flat(self) -> Scalar:
        return self.base if self.slope == 0 else None


class Exponential(_Curve, frozen=True, gc=False, tag="exponential"):
    """``base * gamma**t``."""

    base: float
    gamma: float

    def check(self) -> None:
        _finite("Exponential", base=self.base, gamma=self.gamma)

    def at(self, t: int) -> float:
        return decayed(self.base, self.gamma, t)

    def flat(self) -> Scalar:
        return self.base if self.gamma == 1 or self.base == 0 else None


class Staircase(_Curve, frozen=True, gc=False, tag="staircase"):
    """``base * gamma**(t // width)``: infinitely many constant stairs of ``width`` steps."""

    base: float
    gamma: float
    width: int

    def check(self) -> None:
        _finite("Staircase", base=self.base, gamma=self.gamma)
        _positive("Staircase", width=self.width)

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
    """Falls from ``base`` to ``floor`` in ``half`` steps along half a cosine, and back, for ever.

    Its top is ``delay`` steps after the origin (a fraction of a step: torch's OneCycleLR has its joints between steps).
    """

    base: float
    floor: float
    half: float
    delay: float = 0.0

    def check(self) -> None:
        _finite("Cosine", base=self.base, floor=self.floor, delay=self.delay)
        _positive("Cosine", half=self.half)

    def at(self, t: int) -> float:
        # fmod is exact, so that every period has the values of the first.
        phase = math.fmod(t - self.delay, 2 * self.half)
        return _half_cosine(self.base, self.floor, phase / self.half)

    def flat(self) -> Scalar:
        return self.base if self.base == self.floor else None


class CosineRestarts(_Curve, frozen=True, gc=False, tag="cosine-restarts"):
    """Falls from ``base`` to ``floor`` along half a cosine and jumps back; each cycle is ``growth`` times the last."""

    base: float
    floor: float
    first: int
    growth: int = 1

    def check(self) -> None:
        _finite("CosineRestarts", base=self.base, floor=self.floor)
        _positive("CosineRestarts", first=self.first, growth=self.growth)

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

    A decay that flattens towards its end (torch's PolynomialLR) has its origin at that end; one that is steepest at its
    beginning (1-sqrt) has its origin there.
    """

    base: float
    change: float
    span: int
    power: float

    def check(self) -> None:
        _finite("Polynomial", base=self.base, change=self.change)
        _positive("Polynomial", span=self.span, power=self.power)

    def at(self, t: int) -> float:
        return self.base + self.change * math.pow(abs(t) / self.span, self.power)

    def flat(self) -> Scalar:
        return self.base if self.change == 0 else None


class Sampled(_Curve, frozen=True, gc=False, tag="sampled"):
    """``values[t]``: any values at all, one for each step from the origin on."""

    values: tuple[Scalar, ...]

    def check(self) -> None:
        msgspec.structs.force_setattr(self, "values", tuple([canonical(value) for value in self.values]))

    def value(self, step: int) -> Scalar:
        t = step - self.origin
        if not 0 <= t < len(self.values):
            raise ScheduleError(
                f"a sampled form has values for steps {self.origin} to {self.origin + len(self.values) - 1}, not for {step}"
            )
        return self.values[t]

    def shifted(self, by: int) -> Sampled:
        # Not through the constructor: it would look at every value again.
        twin = Sampled((), origin=self.origin + by)
        msgspec.structs.force_setattr(twin, "values", self.values)
        return twin

    def simplified(self, start: int, length: int | None) -> Iterator[tuple[Form, int | None]]:
        """Runs of equal values become constants; what lies between them keeps this form."""
        if length is None:
            raise ScheduleError("a sampled form cannot be open; give its segment a length")
        self.value(start)
        self.value(start + length - 1)
        window = self.values[start - self.origin : start - self.origin + length]
        loose = 0  # of the window, where the steps begin that are in no run yet
        first = 0
        while first < length:
            last = first
            while last + 1 < length and same(window[last + 1], window[first]):
                last += 1
            if last > first:
                yield from self._plain(window, loose, first)
                yield Constant(window[first]), last + 1 - first
                loose = last + 1
            first = last + 1
        yield from self._plain(window, loose, length)

    def _plain(self, window: tuple[Scalar, ...], start: int, stop: int) -> Iterator[tuple[Form, int]]:
        if stop - start == 1:
            yield Constant(window[start]), 1
        elif stop > start:
            yield self, stop - start

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


def _half_cosine(top: float, floor: float, x: float) -> float:
    """From ``top`` at ``x = 0`` to ``floor`` at ``x = 1``."""
    return floor + (top - floor) * (1 + math.cos(math.pi * x)) / 2


def varies(form: Form) -> bool:
    """Whether the form's value may change from step to step."""
    return form.__class__ is not Constant


def agreement(a: Form, b: Form, start: int, stop: int) -> int:
    """The first step in ``[start, stop)`` at which the forms' values differ; ``stop`` if there is none.

    O(1) for equal forms and for constants, one comparison a stair for staircases, else one a step.
    """
    if a is b:
        return stop
    if isinstance(a, Constant) and isinstance(b, Constant):
        return stop if same(a.scalar, b.scalar) else min(start, stop)
    if a == b:
        return stop
    step = start
    while step < stop:
        if not same(a.value(step), b.value(step)):
            return step
        step = min(a.holds(step), b.holds(step))
    return stop
