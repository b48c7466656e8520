"""Silence Optuna's log messages about studies that only hpstage creates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import optuna


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Suppress log messages below warnings, such as that a study was created."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
