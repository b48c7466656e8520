"""Regimes: the kinds of values under which training runs. A fork verified in one says nothing about others.

Code behaves differently when a switch is on, a category changes, or a factor is no longer 0 or 1: something that a
saved state omits may begin to matter there. So may a value that code read only when training began, once that value has
changed. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

from hpstage.schedule import Constant, Form

Regime = tuple[tuple[str, str], ...]
"""The kind of each hyperparameter, by name: for a category or switch, its value; for a number, its position relative to
0 and 1 and whether it differs from that at step 0, or that it varies."""
_T = TypeVar("_T")
_COMBINATIONS = 16
"""Maximum number of regimes to verify when each of their kinds was already verified in another."""


def regime(names: Iterable[str], forms: Iterable[Form], first: Iterable[Form]) -> Regime:
    """Return the regime under these forms on a branch that began with the ``first`` forms."""
    return tuple((name, _kind(form, began)) for name, form, began in zip(names, forms, first, strict=True))


class Regimes:
    """Regimes under which forks are verified: each as often as it was added, and the kinds that occur in them."""

    def __init__(self, regimes: Iterable[Regime] = ()) -> None:
        self._counts: Counter[Regime] = Counter()
        self._kinds: Counter[tuple[str, str]] = Counter()
        for one in regimes:
            self.add(one)

    def add(self, regime: Regime) -> None:
        self._counts[regime] += 1
        self._kinds.update(regime)

    def remove(self, regime: Regime) -> None:
        """Undo one :meth:`add`."""
        _drop(self._counts, regime)
        for kind in regime:
            _drop(self._kinds, kind)

    def __iter__(self) -> Iterator[Regime]:
        return iter(self._counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Regimes) and self._counts == other._counts and self._kinds == other._kinds

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, regime: Regime) -> bool:
        return regime in self._counts

    def has_kind(self, kind: tuple[str, str]) -> bool:
        return kind in self._kinds


def _drop(counts: Counter[_T], one: _T) -> None:
    counts[one] -= 1
    if not counts[one]:
        del counts[one]


def is_news(regime: Regime, *known: Regimes) -> bool:
    """Whether to verify a fork under this regime too. O(names of hyperparameters), however many are known."""
    if any(regime in regimes for regimes in known):
        return False
    few = max(map(len, known)) < _COMBINATIONS > len(set[Regime]().union(*known))
    return few or not all(any(regimes.has_kind(kind) for regimes in known) for kind in regime)


def _kind(form: Form, began: Form) -> str:
    if not isinstance(form, Constant):
        return "varies"
    value = form.value(0)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return repr(value)
    if value in (0, 1):
        return f"{value:g}"
    changed = "" if value == began.value(0) else ", changed"
    return ("< 0" if value < 0 else "< 1" if value < 1 else "> 1") + changed
