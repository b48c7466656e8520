"""Regimes: the kinds of values under which training runs. A fork verified in one says nothing about others.

Code behaves differently when a switch is on, a category changes, or a factor is no longer 0 or 1: something that a
state leaves out may begin to matter there. So may what code has read when training began, once that has changed. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from hpstage.schedule import Constant, Form

Regime = tuple[tuple[str, str], ...]
"""The kind of each hyper-parameter, by name: a category or switch itself, a number's position relative to 0 and 1 and
whether it is another than at step 0, or that it varies."""
_COMBINATIONS = 16
"""Maximum number of regimes to verify when each of their kinds was already verified in another."""


def regime(names: Iterable[str], forms: Iterable[Form], first: Iterable[Form]) -> Regime:
    """Return the regime under these forms in a line that has begun with the ``first`` ones."""
    return tuple((name, _kind(form, began)) for name, form, began in zip(names, forms, first, strict=True))


def is_news(regime: Regime, verified: Collection[Regime]) -> bool:
    """Whether to verify a fork under this regime too."""
    if regime in verified:
        return False
    return len(verified) < _COMBINATIONS or not set(regime).issubset(chain.from_iterable(verified))


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
