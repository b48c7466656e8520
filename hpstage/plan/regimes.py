"""What kinds of values training is under: a fork that is verified under some tells nothing of others.

Code does other things where a switch is on, a category is another, or a factor is not 0 or 1 any more: what a state
leaves out may begin to matter there. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from hpstage.schedule import Constant, Form

Regime = tuple[tuple[str, str], ...]
"""Of each hyper-parameter, by name: a category or switch as it is, a number by where it lies of 0 and 1, or that it
varies."""
_COMBINATIONS = 16
"""Regimes that are verified though each of their kinds was verified in another."""


def regime(names: Iterable[str], forms: Iterable[Form]) -> Regime:
    return tuple((name, _kind(form)) for name, form in zip(names, forms, strict=True))


def is_news(regime: Regime, verified: Collection[Regime]) -> bool:
    """Is a fork to be verified under this regime, too?"""
    if regime in verified:
        return False
    return len(verified) < _COMBINATIONS or not set(regime).issubset(chain.from_iterable(verified))


def _kind(form: Form) -> str:
    if not isinstance(form, Constant):
        return "varies"
    value = form.value(0)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return repr(value)
    if value in (0, 1):
        return f"{value:g}"
    return "< 0" if value < 0 else "< 1" if value < 1 else "> 1"
