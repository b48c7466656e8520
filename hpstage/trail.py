"""The history of a line under one set of forms, at every step. Pure; the planner and the workers name states by it."""

from __future__ import annotations

from collections.abc import Mapping

from hpstage.events import StateKey
from hpstage.keys import History
from hpstage.scalars import Scalar, same
from hpstage.schedule import Form, varies

# Steps between two histories that are remembered: what finding one costs, in any order of asking.
_SPACING = 64


class Trail:
    """What a line has seen before each step from ``start`` on.

    O(1) where no form varies. Else the line is walked once, as far as is asked, and some digests are remembered.

    Args:
        seen: the values up to and including those at ``start``.
        forms: the line's from ``start`` on, by name; the names are sorted.
    """

    __slots__ = ("_remembered", "_start", "_varying")

    def __init__(self, seen: History, start: int, forms: Mapping[str, Form]) -> None:
        self._start = start
        self._varying = [(name, form) for name, form in forms.items() if varies(form)]
        self._remembered = [seen]  # up to and including the values at ``start``, ``start + _SPACING``, ...

    def before(self, step: int) -> History:
        """The values seen before ``step``, which lies after ``start``."""
        steps = step - 1 - self._start
        if not self._varying or not steps:
            return self._remembered[0]
        while len(self._remembered) <= steps // _SPACING:
            last = len(self._remembered) - 1
            self._remembered.append(self._walk(last, _SPACING))
        return self._walk(steps // _SPACING, steps % _SPACING)

    def key(self, step: int) -> StateKey:
        """Key of the state at ``step``, which lies after ``start``."""
        return self.before(step).key(step)

    def _walk(self, remembered: int, steps: int) -> History:
        """So many steps on from a history that is remembered."""
        history = self._remembered[remembered]
        if not steps:
            return history
        first = self._start + remembered * _SPACING
        past = [form.value(first) for _, form in self._varying]
        for step in range(first + 1, first + steps + 1):
            changed: list[tuple[str, Scalar]] = []
            for index, (name, form) in enumerate(self._varying):
                now = form.value(step)
                if not same(now, past[index]):
                    changed.append((name, now))
                    past[index] = now
            if changed:
                history = history.changed(step, changed)
        return history
