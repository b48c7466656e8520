"""Spaces: checking the result of the user's ``space(trial)``, and the schedules of trials forked from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from hpstage.errors import HpstageError, ScheduleError, UsageError
from hpstage.schedule import Plateau, Scalar, Schedule, WSDSweep, as_schedule, constant
from hpstage.schedule.plateau import ReduceOnPlateau
from hpstage.schedule.scalars import canonical, count
from hpstage.schedule.trial import length_of

if TYPE_CHECKING:
    from optuna.trial import Trial

Space = Callable[["Trial"], Mapping[str, Schedule | Plateau | Scalar | Iterable[int]]]

# The names under which a space states a trial's length, and the steps at which its states are saved for later trials.
_LENGTH, _KEEP = RESERVED = "steps", "keep_at"
MIXTURE = "mixture."
"""Prefix of the names of a mixture's weights: ``mixture.code`` is the weight of the source ``code``."""

_MOST_MARKS = 100_000
"""Maximum number of steps at which a space saves states, including those beyond the trial's end."""


class Rejected(Exception):
    """The space raised ``optuna.TrialPruned`` or an exception in ``catch``; ``cause`` is that exception."""

    def __init__(self, trial: int, cause: Exception) -> None:
        super().__init__(f"the space rejects trial {trial}: {cause!r}")
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Described:
    """A trial as its space describes it: ``steps`` steps under schedules of that length."""

    schedules: dict[str, Schedule]
    steps: int
    keep_at: tuple[int, ...] = ()
    """Steps after which its states are saved, in ascending order."""
    plateaus: Mapping[str, Plateau] = field(default_factory=dict)
    """Hyperparameters whose schedules are decided by metrics; in ``schedules``, their values are not reduced yet."""
    unreached: Mapping[str, int] = field(default_factory=dict, compare=False)
    """See :func:`unreached`."""


def describe(
    space: Space, trial: Any, steps: int, *, cut: bool = False, catch: tuple[type[Exception], ...] = ()
) -> Described:
    """Return the schedules of an Optuna trial.

    Its length is the number that the space returns under the name ``"steps"``, or else the length of the schedules that
    have an end, or else ``steps``. The name ``"keep_at"`` is for steps, within that length or not, whose states are
    saved since trials that are not known yet may be forked there.

    Args:
        trial: a ``Trial``, or any object with its ``suggest_`` methods: a ``FrozenTrial`` repeats its parameters.
        steps: maximum length of a trial. Longer schedules are cut.
        cut: whether to cut a trial as well whose space states more steps; otherwise that is an error.
        catch: exceptions of the space that reject only this trial. Exceptions of hpstage are always raised.

    Raises:
        Rejected: the space has rejected the trial's parameters.
        UsageError: the space returned something invalid; the message names the trial, the hyperparameter and the
            remedy.
    """
    described = _called(space, trial, catch)
    if not isinstance(described, Mapping):
        raise UsageError(
            f"space() returned {type(described).__name__}; return a dict of hyperparameter names to schedules or values"
        )
    schedules = {}
    plateaus = {}
    stated: int | None = None
    keep_at: tuple[int, ...] = ()
    for name, value in described.items():
        if not isinstance(name, str):
            raise UsageError(f"space() returned the name {name!r}; names of hyperparameters are strings")
        try:
            canonical(name)  # refuses what is not valid Unicode
            if name == _LENGTH:
                stated = _length(value)
            elif name == _KEEP:
                keep_at = _marks(value)
            elif isinstance(value, Plateau):
                plateaus[name] = value
                schedules[name] = ReduceOnPlateau(value).schedule()
            elif name == "betas" and isinstance(value, tuple | list):
                raise ScheduleError("a pair is not a value; give two hyperparameters, 'beta1' and 'beta2'")
            else:
                schedules[name] = as_schedule(value)  # refuses the rest
        except UsageError as error:
            raise type(error)(f"trial {trial.number}, hyperparameter {name!r}: {error}") from None
    named = f"trial {trial.number}"
    length = length_of(schedules, stated, named)
    if stated is not None and stated > steps and not cut:
        raise ScheduleError(
            f"{named}: space() returned {stated} steps, but a trial of this call has at most {steps}; raise the call's "
            f"steps, or bound the trial's"
        )
    length = steps if length is None else min(length, steps)
    return Described(
        {name: schedule.until(length) for name, schedule in schedules.items()},
        length,
        tuple(step for step in keep_at if step <= length),
        plateaus,
        unreached(schedules, steps),
    )


def unreached(schedules: Mapping[str, Schedule], steps: int) -> dict[str, int]:
    """Return the first change beyond ``steps``, the maximum length of trials, of each schedule that has one.

    Users put a change at ``steps`` itself if it should not happen, so that does not count. Neither do schedules with an
    end, which may be longer.
    """
    found = {}
    for name, schedule in schedules.items():
        late = [start for start, _, _ in schedule.pieces() if start > steps]
        if late and schedule.length is None:
            found[name] = late[0]
    return found


def with_defaults(described: Described, defaults: Mapping[str, Scalar]) -> Described:
    """Return a trial to which default values are added for the hyperparameters that it lacks."""
    lacking = {name: constant(value) for name, value in defaults.items() if name not in described.schedules}
    if not lacking:
        return described
    schedules = {name: schedule.until(described.steps) for name, schedule in lacking.items()}
    return replace(described, schedules={**described.schedules, **schedules})


def _called(space: Space, trial: Any, catch: tuple[type[Exception], ...]) -> object:
    try:
        return space(trial)
    except HpstageError:
        raise
    except Exception as error:
        from optuna import TrialPruned  # its import takes long, but is done by now

        if isinstance(error, (TrialPruned, *catch)):
            raise Rejected(trial.number, error) from error
        raise


def _length(value: object) -> int:
    if isinstance(value, Schedule | Plateau):
        raise ScheduleError(
            "this name is reserved for the trial's length, a whole number; give the hyperparameter another name"
        )
    return count("the trial's length", value, least=1)


def grown(donor: Mapping[str, Schedule], step: int, own: Mapping[str, Schedule]) -> dict[str, Schedule]:
    """Return ``donor``'s schedules up to ``step``, and ``own`` from there on.

    Raises:
        ScheduleError: the hyperparameters differ, so that one trial cannot continue the other's training.
    """
    if donor.keys() != own.keys():
        raise ScheduleError(
            f"a trial with {', '.join(sorted(own))} cannot continue the training of one with "
            f"{', '.join(sorted(donor))}; let space() return the same names for all trials of this algorithm"
        )
    return {name: donor[name].until(step).then(schedule.since(step)) for name, schedule in own.items()}


def _marks(value: object) -> tuple[int, ...]:
    if isinstance(value, str | Schedule | Plateau) or not isinstance(value, Iterable):
        raise ScheduleError(
            f"{value!r}: this name is for steps at which to keep the state; give the hyperparameter another"
        )
    steps = {count("a step at which to keep the state", step, least=1) for step in islice(value, _MOST_MARKS + 1)}
    if len(steps) > _MOST_MARKS:
        raise ScheduleError(f"there are more than {_MOST_MARKS:,} steps at which to keep the state; give fewer")
    return tuple(sorted(steps))


def check_forkable(described: Described, steps: int, number: int) -> None:
    """Raise :class:`UsageError` for a trial that is too short for an algorithm that forks trials from one another."""
    if described.steps < steps:
        raise UsageError(
            f"trial {number} has {described.steps} steps, but the algorithm forks trials from one another, which must "
            f"all have {steps}; extend the schedules to that step, or use another algorithm"
        )


def points_of(space: Space) -> tuple[dict[str, Any], ...]:
    """Return the parameters of all trials of a space that lists them; ``()`` for any other space."""
    return space.points if isinstance(space, WSDSweep) else ()


def longest(space: Space, steps: int | None) -> int:
    """Return the ``steps`` of a call, which may be left out if the space lists its trials."""
    if steps is not None:
        return steps
    if not isinstance(space, WSDSweep):
        raise UsageError("steps is missing; give steps=, the maximum number of steps of a trial")
    return space.steps
