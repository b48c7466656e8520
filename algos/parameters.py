"""Checks of algorithms' parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpstage.errors import UsageError

if TYPE_CHECKING:
    from hpstage.algorithm import Setting

_LEAST_WINDOW = 16
"""Enough to keep some workers busy and to merge stages, and few for a sampler that learns from what is known."""


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raise :class:`UsageError` if a parameter is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number, {least} or more")


def check_window(window: object) -> None:
    """Raise :class:`UsageError` if ``window`` is neither ``None`` nor a whole number above zero."""
    if window is not None:
        check_whole("window", window, least=1)


def window_in(setting: Setting, window: int | None) -> int:
    """Return how many trials or targets are open at a time: ``window``, or else 16, or twice the number of workers if
    that is more: some open trials share their stages, and some wait until the slowest of them is told."""
    return max(_LEAST_WINDOW, 2 * setting.workers) if window is None else window
