"""Spaces: checking the result of the user's ``space(trial)``, and the schedules of trials forked from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpstage.errors import ScheduleError, UsageError
from hpstage.schedule import Scalar, Schedule, as_schedule
from hpstage.schedule.scalars import count
from hpstage.schedule.trial import length_of

if TYPE_CHECKING:
    from optuna.trial import Trial

Space = Callable[["Trial"], Mapping[str, Schedule | Scalar]]

# The name under which a space states a trial's length.
_LENGTH = "steps"


@dataclass(frozen=True, slots=True)
class Described:
    """A trial as its space describes it: ``steps`` steps under schedules of that length."""

    schedules: dict[str, Schedule]
    steps: int


def describe(space: Space, trial: Any, steps: int, *, cut: bool = False) -> Described:
    """Return the schedules of an Optuna trial.

    It has as many steps as the space states under the name ``"steps"``, or else as its schedules have that end, or
    else ``steps``.

    Args:
        trial: a ``Trial``, or any object with its ``suggest_`` methods: a ``FrozenTrial`` repeats its parameters.
        steps: the most steps that a trial may have. Schedules that are longer are cut.
        cut: whether to cut also where the space states more; otherwise that is an error.

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
    stated: int | None = None
    for name, value in described.items():
        if not isinstance(name, str):
            raise UsageError(f"space() returned the name {name!r}; names of hyper-parameters are strings")
        try:
            if name == _LENGTH:
                stated = _length(value)
            else:
                schedules[name] = as_schedule(value)
        except UsageError as error:
            raise type(error)(f"trial {trial.number}, hyper-parameter {name!r}: {error}") from None
    named = f"trial {trial.number}"
    length = length_of(schedules, stated, named)
    if stated is not None and stated > steps and not cut:
        raise ScheduleError(
            f"{named}: space() returned {stated} steps, but a trial of this call has at most {steps}; raise the call's "
            f"steps, or bound the trial's"
        )
    length = steps if length is None else min(length, steps)
    return Described({name: schedule.until(length) for name, schedule in schedules.items()}, length)


def _length(value: object) -> int:
    if isinstance(value, Schedule):
        raise ScheduleError("this name is for the trial's length, a whole number; give the hyper-parameter another")
    return count("the trial's length", value, least=1)


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


def check_forkable(described: Described, steps: int, number: int) -> None:
    """Raise :class:`UsageError` for a trial that is too short for an algorithm that forks trials from one another."""
    if described.steps < steps:
        raise UsageError(
            f"trial {number} has {described.steps} steps, but the algorithm forks trials from one another, which must "
            f"all have {steps}; let the schedules go on, or use another algorithm"
        )
