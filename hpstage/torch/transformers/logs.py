"""Sends what a Trainer logs to hpstage's log of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpstage.training.step_log import log


def log_step(trainer: Any, values: Mapping[str, float]) -> None:
    """Log a step by ``trainer.log()``, as under ``logging_steps=1``: it may add what it has gathered, and empty that.

    What the Trainer has logged itself in the step, in ``compute_loss`` for instance, is logged as well. Callbacks,
    which show or collect logs, are not called.
    """
    handler = trainer.callback_handler
    callbacks, handler.callbacks = handler.callbacks, []
    try:
        trainer.log(dict(values))
    finally:
        handler.callbacks = callbacks
    history = trainer.state.log_history
    for entry in history:
        for name, value in entry.items():
            if name not in ("epoch", "step") and isinstance(value, int | float):
                log(name, value)
    history.clear()
