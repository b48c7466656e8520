"""The meaning of an exception in a chain: how training ends, how the chain ends, and the message to the user."""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from hpstage.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointFull,
    CheckpointMissing,
    NonFiniteLoss,
    StopTraining,
    TrainingError,
    UsageError,
)
from hpstage.errors.text import writable
from hpstage.plan.facts import UserFailure
from hpstage.training.code.owner import is_users

_USAGE = f"{UsageError.__module__}.{UsageError.__qualname__}"

causes: dict[UserFailure, BaseException] | None = None
"""The exceptions that caused failures, if training is in the process of the search."""


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
    """Return a hint if the user's code looked up a name that is not a hyperparameter; ``None`` for other errors, such
    as a KeyError of a library for one of its own names."""
    match error:
        case KeyError(args=[str(name)]) if name not in values and _is_raised_by_user(error):
            has = ", ".join(map(repr, sorted(values))) or "none"
            return f"the space returns no hyperparameter {name!r}; it has {has}"
    return None


def _is_raised_by_user(error: BaseException) -> bool:
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not modules or is_users(modules[-1])


def failure_of(error: BaseException, within: str, values: Mapping[str, object]) -> UserFailure:
    """Convert an exception to text. Its traceback begins at the first frame of the user's code or, if there is none,
    after the frames of the file ``within``.

    Args:
        values: the hyperparameters of training.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == within:
        frames = frames.tb_next
    own = frames
    while own is not None and not is_users(own.tb_frame.f_globals.get("__name__", "")):
        own = own.tb_next
    frames = own or frames
    text = "".join(traceback.format_exception(type(error), error, frames))
    kinds = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__ if kind is not object)
    shown = traceback.TracebackException(type(error), error, None)
    shown.__notes__ = None  # notes describe another process, and are in the traceback
    summary = list(shown.format_exception_only())[-1].strip()
    if isinstance(error, StopTraining):
        summary += " (raise it in a training step, or leave the loop of a function; it cannot end setup or evaluation)"
    if (missing := missing_hyperparameter(error, values)) is not None:
        summary += f" ({missing})"
    failure = UserFailure(summary=writable(summary), traceback=writable(text), kinds=kinds)
    if causes is not None:
        traceback.clear_frames(frames)  # local variables may be large
        causes[failure] = error.with_traceback(frames)
    return failure


def is_misuse(failure: UserFailure, catch: Collection[str] = ()) -> bool:
    """Whether hpstage has refused the trainable, as opposed to a failure of the user's code. A refusal is an exception
    of hpstage that ``catch`` does not name."""
    ours = [kind for kind in failure.kinds if kind.startswith("hpstage.errors.")]
    return ours[:1] == list(failure.kinds[:1]) != [] and not any(kind in catch for kind in ours)


def training_error(failure: UserFailure) -> TrainingError:
    """Return the error with which a failure ends a search.

    It is also an instance of the builtin type of the user's exception, so that ``except ValueError`` works as it does
    around Optuna's ``study.optimize``, or of :class:`UsageError`. Its cause is the user's exception if that was raised
    in this process.
    """
    why = "no trial can be trained" if is_misuse(failure) else "a trial failed"
    error = _error_of(f"{why}: {failure.summary}\n{failure.traceback}", failure.kinds)
    error.__cause__ = (causes or {}).get(failure)
    return error


def _error_of(text: str, kinds: tuple[str, ...]) -> TrainingError:
    for kind in kinds:
        module, _, name = kind.rpartition(".")
        found = UsageError if kind == _USAGE else getattr(builtins, name, None) if module == "builtins" else None
        if isinstance(found, type) and issubclass(found, Exception) and found is not Exception:
            try:
                return _both(found)(text, kinds)
            except (TypeError, ValueError):  # a type with other arguments, such as ExceptionGroup
                continue
    return TrainingError(text)


def _both(builtin: type[Exception]) -> Callable[[str, tuple[str, ...]], TrainingError]:
    class Both(TrainingError, builtin):  # type: ignore[misc, valid-type]
        def __init__(self, text: str, kinds: tuple[str, ...]) -> None:
            Exception.__init__(self, text, kinds)

        def __str__(self) -> str:
            return str(self.args[0])

        def __reduce__(self) -> tuple[Any, ...]:
            return _error_of, self.args

    Both.__name__ = Both.__qualname__ = TrainingError.__name__
    Both.__module__ = TrainingError.__module__
    return Both
