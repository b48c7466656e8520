"""Decides which programs of a step are worth building, and which existing program trains which members. Pure.

A member's bits are the same in every program, so members may be divided into programs in any way. Building takes as
long as dozens of steps. So a program is built only once its estimated savings so far, had it existed, amount to a
certain share of that time. Building therefore never takes more than a few times as long as the program would have
saved, however few steps there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

Form = tuple[int, frozenset[int]]
"""A program's number of members, and the indices of inputs that are one tensor for all of them."""

ALONE: Form = (1, frozenset())

_FIXED = 0.5
"""Assumed share of a member's seconds that several members have in common, until programs of several are measured."""
_BUILDS = 50.0
"""Assumed time for building a program, per member, in steps of one member, until a program was built."""
_PAID = 0.25
"""Share of the building time that must have been saved before a program for a power of two of members is built. Other
numbers of members need it, too, so that later steps save the rest."""
_RECENT = 0.02
"""Weight of the last run in a program's moving average, since conditions change."""


@dataclass
class _Runs:
    """Seconds of a program's runs; before the first run, it is assumed to take as long as expected."""

    seconds: float
    """Moving average of the seconds of a run."""
    count: int = 0


class Worth:
    """Seconds measured or estimated for the programs of one step.

    Args:
        in_common: returns the share of a member's work that is done once for all members which have inputs in common.
    """

    def __init__(self, in_common: Callable[[frozenset[int]], float]) -> None:
        self._in_common = cache(in_common)  # cached, since it looks at the whole graph
        self._runs: dict[Form, _Runs] = {}  # of existing programs
        self._each = 0.0  # seconds of building the last program, per member
        self._saved: dict[Form, float] = {}  # seconds that missing programs would have saved

    def __contains__(self, form: Form) -> bool:
        """Whether a program of this kind exists."""
        return form in self._runs

    def built(self, form: Form, seconds: float) -> None:
        """Record that a program was built, and the seconds that this took."""
        self._runs[form] = _Runs(self.expected(form))
        if form != ALONE:
            self._each = seconds / form[0]

    def refused(self, form: Form) -> None:
        """Record that this program cannot exist, since its bits would differ."""
        self._saved[form] = -math.inf

    def took(self, form: Form, seconds: float) -> None:
        """Record the seconds of a run of a program."""
        runs = self._runs[form]
        runs.count += 1
        weight = 1.0 if runs.count <= 2 else max(1 / (runs.count - 1), _RECENT)  # the first one takes longer
        runs.seconds = seconds if weight == 1.0 else runs.seconds + weight * (seconds - runs.seconds)

    def division(self, form: Form, most: int) -> list[Form]:
        """Return the existing programs by which the members of a step are trained, the largest first.

        Args:
            most: the largest number of members of one program.
        """
        if form in self._runs and form[0] <= most:
            return [form]
        return _divided(form, [of for of in self._runs if of[0] <= most])

    def pays(self, form: Form, most: int) -> list[Form]:
        """Record a step for which there is no program. Return the programs that are worth building for such steps: one
        for all members, or programs for powers of two into which the members are divided. Steps with other numbers of
        members need these, too.

        Args:
            most: the largest number of members of one program.
        """
        alone, found = self._runs[ALONE].seconds, []
        if not math.isfinite(alone):
            return []
        for further, saves in self._savings(form, most):
            self._saved[further] = self._saved.get(further, 0.0) + saves
            takes = further[0] * (self._each or _BUILDS * alone)
            if self._saved[further] >= takes * (_PAID if further[0].bit_count() == 1 else 1.0):
                found.append(further)
        return found

    def _savings(self, form: Form, most: int) -> list[tuple[Form, float]]:
        """Return the seconds that each further program would save in a step of this form."""
        width, shared = form
        there = [of for of in self._runs if of[0] <= most]
        now = self._seconds(_divided(form, there))
        usual = [(2**power, shared) for power in range(min(width, most).bit_length())]
        further = [form, *sorted({*_divided(form, [ALONE, *usual])} - {form, ALONE, (1, shared)})]
        with_it = ((of, self._seconds(_divided(form, [*there, of]))) for of in further if of not in self._runs)
        return [(of, now - then) for of, then in with_it if then < now < math.inf]

    def _seconds(self, division: list[Form]) -> float:
        return sum(self._runs[of].seconds if of in self._runs else self.expected(of) for of in division)

    def expected(self, form: Form) -> float:
        """Return the expected seconds of a step by a program. They are on a straight line through those of one member
        and those of the measured program whose number of members is nearest."""
        if form == ALONE or ALONE not in self._runs:
            return math.inf
        (width, shared), alone = form, self._runs[ALONE].seconds
        known = [of for of, runs in self._runs.items() if of[0] > 1 and runs.count]
        if not known:
            fixed = max(_FIXED, self._in_common(shared))
            return alone * (fixed + (1 - fixed) * width)
        near = min(known, key=lambda of: (of[1] != shared, abs(math.log(of[0] / width))))
        each = (self._runs[near].seconds - alone) / (near[0] - 1)
        if near[1] != shared:
            each -= alone * (self._in_common(shared) - self._in_common(near[1]))
        return alone + max(0.0, each) * (width - 1)


def _divided(form: Form, programs: Iterable[Form]) -> list[Form]:
    width, shared = form
    usable = [of for of in programs if of == ALONE or of[1] <= shared]
    parts: list[Form] = []
    while width:
        parts.append(max((of for of in usable if of[0] <= width), key=lambda of: (of[0], len(of[1]))))
        width -= parts[-1][0]
    return parts
