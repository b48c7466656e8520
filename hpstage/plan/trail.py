"""The history of a line under one set of forms, at every step. Pure; the planner and the workers name states by it."""

from __future__ import annotations

from collections.abc import Mapping

from hpstage.plan.facts import StateKey
from hpstage.plan.keys import History
from hpstage.schedule import Form, varies
from hpstage.schedule.scalars import Scalar, same

# Steps between two histories that are remembered: what finding one costs, in any order of asking.
_SPACING = 64


class Trail:
    """What a line has seen before each step from ``start`` on.

    O(1) where no form varies. Else the line is walked once, as far as is asked, and some digests are remembered.

    Args:
        seen: the values up to and including those at ``start``.
        forms: the line's from ``start`` on, by name; the names are sorted.
    """

    __slots__ = ("_last", "_remembered", "_start", "_varying")

    def __init__(self, seen: History, start: int, forms: Mapping[str, Form]) -> None:
        self._start = start
        self._varying = [(name, form) for name, form in forms.items() if varies(form)]
        self._remembered = [seen]  # up to and including the values at ``start``, ``start + _SPACING``, ...
        self._last = start, seen  # what was asked for last: most ask for the next

    def before(self, step: int) -> History:
        """The values seen before ``step``, which lies after ``start``."""
        last = step - 1
        if not self._varying:
            return self._remembered[0]
        index = (last - self._start) // _SPACING
        while len(self._remembered) <= index:
            end = self._start + (len(self._remembered) - 1) * _SPACING
            self._remembered.append(self._walk(self._remembered[-1], end, end + _SPACING))
        first = self._start + index * _SPACING
        if first <= self._last[0] <= last:
            first, history = self._last
        else:
            history = self._remembered[index]
        self._last = last, self._walk(history, first, last)
        return self._last[1]

    def key(self, step: int) -> StateKey:
        """Key of the state at ``step``, which lies after ``start``."""
        return self.before(step).key(step)

    def _walk(self, history: History, first: int, last: int) -> History:
        """On from a history that ends with the values at ``first``, to one that ends with those at ``last``."""
        if first == last:
            return history
        past = [form.value(first) for _, form in self._varying]
        for step in range(first + 1, last + 1):
            changed: list[tuple[str, Scalar]] = []
            for index, (name, form) in enumerate(self._varying):
                now = form.value(step)
                if not same(now, past[index]):
                    changed.append((name, now))
                    past[index] = now
            if changed:
                history = history.changed(step, changed)
        return history
