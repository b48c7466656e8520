"""Spaces: checking the result of the user's ``space(trial)``, and the schedules of trials forked from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpstage.errors import ScheduleError, UsageError
from hpstage.schedule import Scalar, Schedule, as_schedule
from hpstage.schedule.trial import check_trial

if TYPE_CHECKING:
    from optuna.trial import Trial

Space = Callable[["Trial"], Mapping[str, Schedule | Scalar]]


def describe(space: Space, trial: Any, steps: int) -> dict[str, Schedule]:
    """Return the schedules of an Optuna trial, each of ``steps`` steps.

    Args:
        trial: a ``Trial``, or any object with its ``suggest_`` methods: a ``FrozenTrial`` repeats its parameters.

    Raises:
        UsageError: names the trial, the hyper-parameter and the remedy.
    """
    described = space(trial)
    if not isinstance(described, Mapping):
        raise UsageError(
            f"space() returned {type(described).__name__}; return a dict of hyper-parameter names to schedules or "
            f"values"
        )
    schedules = {}
    for name, value in described.items():
        if not isinstance(name, str):
            raise UsageError(f"space() returned the name {name!r}; names of hyper-parameters are strings")
        try:
            schedules[name] = as_schedule(value)
        except UsageError as error:
            raise type(error)(f"trial {trial.number}, hyper-parameter {name!r}: {error}") from None
    check_trial(schedules, steps, f"trial {trial.number}")
    return {name: schedule.until(steps) for name, schedule in schedules.items()}


def grown(donor: Mapping[str, Schedule], step: int, own: Mapping[str, Schedule]) -> dict[str, Schedule]:
    """Return ``donor``'s schedules up to ``step``, and ``own`` from there on.

    Raises:
        ScheduleError: the hyper-parameters differ, so that one trial cannot continue the other's training.
    """
    if donor.keys() != own.keys():
        raise ScheduleError(
            f"a trial with {', '.join(sorted(own))} cannot continue the training of one with "
            f"{', '.join(sorted(donor))}; let space() return the same names for all trials of this algorithm"
        )
    return {name: donor[name].until(step).then(schedule.since(step)) for name, schedule in own.items()}
