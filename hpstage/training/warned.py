"""Warnings that a process logs once, not for each trial."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

logger = logging.getLogger("hpstage")


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged it."""
    logger.warning("%s", message)


def each_once() -> Callable[..., None]:
    """Return a ``logger.warning`` that logs each warning once."""
    return functools.cache(logger.warning)
