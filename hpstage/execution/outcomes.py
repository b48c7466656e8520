"""What an exception in a chain means: how training ends, how the chain does, and what the user is told."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Literal

from hpstage.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointFull,
    CheckpointMissing,
    NonFiniteLoss,
    StopTraining,
)
from hpstage.plan.facts import UserFailure
from hpstage.text import writable


def outcome_of_store(error: CheckpointError) -> Literal["unreadable", "cut_off", "full"]:
    """Return how a chain ends after an error of its checkpoints. Unknown errors are treated as temporary."""
    if isinstance(error, CheckpointMissing | CheckpointCorrupt):
        return "unreadable"
    return "full" if isinstance(error, CheckpointFull) else "cut_off"


def outcome_of(error: Exception) -> Literal["complete", "pruned"] | None:
    """Return how an exception of the user's code ends training, ``None`` for a failure."""
    if isinstance(error, StopTraining):
        return "complete"
    optuna = sys.modules.get("optuna")
    is_pruned = optuna is not None and isinstance(error, optuna.TrialPruned)
    return "pruned" if is_pruned or isinstance(error, NonFiniteLoss) else None


def missing_hyperparameter(error: BaseException, values: Mapping[str, object]) -> str | None:
    """Return what to say of a name that was looked up and is no hyperparameter, of all others ``None``."""
    match error:
        case KeyError(args=[str(name)]) if name not in values:
            has = ", ".join(map(repr, sorted(values))) or "none"
            return f"the space returns no hyperparameter {name!r}; it has {has}"
    return None


def failure_of(error: BaseException, within: str, values: Mapping[str, object]) -> UserFailure:
    """Convert an exception to text, its traceback cut to what follows the frames of the file ``within``: the user's.

    Args:
        values: the hyperparameters of training.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == within:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    kinds = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__ if kind is not object)
    shown = traceback.TracebackException(type(error), error, None)
    shown.__notes__ = None  # they tell of another process, and are part of the traceback
    summary = list(shown.format_exception_only())[-1].strip()
    if isinstance(error, StopTraining):
        summary += " (raise it in a training step, or leave the loop of a function: it ends no setup and no evaluation)"
    if (missing := missing_hyperparameter(error, values)) is not None:
        summary += f" ({missing})"
    return UserFailure(summary=writable(summary), traceback=writable(text), kinds=kinds)
