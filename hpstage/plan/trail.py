"""Histories of a branch at every step of one set of forms, from which planner and workers compute state keys. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hpstage.plan.facts import StateKey
from hpstage.plan.keys import ValueHistory
from hpstage.schedule import Form, varies
from hpstage.schedule.scalars import Scalar, same

# Steps between two remembered histories, and so the maximum cost of a look-up, whatever their order.
_SPACING = 64


class Trail:
    """The history of values before each step of a branch from ``start`` on.

    O(1) if no form varies. Otherwise the branch is walked once, as far as requested, and some digests are remembered.

    Args:
        seen: the history up to and including the values at ``start``.
        forms: the branch's forms from ``start`` on, by name; the names are sorted.
    """

    __slots__ = ("_last", "_remembered", "_start", "_varying")

    def __init__(self, seen: ValueHistory, start: int, forms: Mapping[str, Form]) -> None:
        self._start = start
        self._varying = [(name, form) for name, form in forms.items() if varies(form)]
        self._remembered = [seen]  # up to and including the values at ``start``, ``start + _SPACING``, ...
        self._last = start, seen  # last look-up: most are followed by the next step

    def history_before(self, step: int) -> ValueHistory:
        """Return the history before ``step``, which must be after ``start``."""
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
        """Return the key of the state at ``step``, which must be after ``start``."""
        return self.history_before(step).key(step)

    def _walk(self, history: ValueHistory, first: int, last: int) -> ValueHistory:
        """Extend a history that ends with the values at ``first`` to one that ends with the values at ``last``."""
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
