"""Checks of algorithms' parameters."""

from __future__ import annotations

from hpstage.errors import UsageError


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raise :class:`UsageError` if a parameter is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number, {least} or more")
