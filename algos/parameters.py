"""How many trials are open at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpstage.algorithm import Setting

_LEAST_WINDOW = 16
"""Enough to keep some workers busy and to merge stages, and few for a sampler that learns from what is known."""


def window_in(setting: Setting, window: int | None) -> int:
    """Return how many trials or targets are open at a time: ``window``, or else 16, or twice the number of workers if
    that is more: some open trials share their stages, and some wait until the slowest of them is told."""
    return max(_LEAST_WINDOW, 2 * setting.workers) if window is None else window
