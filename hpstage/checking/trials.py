"""The trials trained in a check: drawn at random from the space, with a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpstage.errors import UsageError
from hpstage.schedule import Scalar, Schedule
from hpstage.schedule.space import Described, Space, describe, with_defaults

_DRAWN = 16
_STEPS = 8
_NEAR = 16
"""The last step by which training is extended by default to cross the first joint of the schedules."""
_BEYOND = 3


@dataclass(frozen=True, slots=True)
class Trials:
    """The trial to check, and another one: values of every hyperparameter at each step."""

    subject: list[dict[str, Scalar]]
    other: list[dict[str, Scalar]]
    params: dict[str, object]
    """What the sampler chose for the trial to check."""

    @property
    def steps(self) -> int:
        return len(self.subject)


def draw(
    space: Space,
    steps: int | None,
    seed: int,
    defaults: Mapping[str, Scalar],
    catch: tuple[type[Exception], ...] = (Exception,),
) -> Trials:
    """Draw a trial whose schedules change early, and one that begins under other values.

    Args:
        steps: number of steps to train; ``None``: 8, or a few more if the schedules' first joint is near. Fewer if the
            trials are shorter.
        defaults: values of hyperparameters that trials lack.
        catch: exceptions by which the space rejects a trial: another is drawn.

    Raises:
        UsageError: the space is invalid.
    """
    import optuna

    from hpstage.optuna.quiet import quiet_optuna
    from hpstage.optuna.stand_in import described_trials

    with quiet_optuna():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    found = list(described_trials(study, space, _NEAR + _BEYOND, _DRAWN, catch=catch))
    drawn, near = [trial for trial, _ in found], [described for _, described in found]
    joints = [first_joint(trial.schedules) for trial in near]
    first = min(range(len(drawn)), key=lambda index: joints[index] or _NEAR + 1)
    if steps is None:
        joint = joints[first]
        steps = min(_STEPS if joint is None else max(_STEPS, joint + _BEYOND), near[first].steps)
    described = [with_defaults(describe(space, trial, steps, cut=True), defaults) for trial in drawn]
    steps = min(trial.steps for trial in described)
    if steps < 2:
        raise UsageError("the space has trials of a single step, where nothing can be forked; check longer ones")
    subject = _values(described[first], steps)
    others = [_values(trial, steps) for trial in described]
    other = max(others, key=lambda values: sum(values[0].get(name) != value for name, value in subject[0].items()))
    return Trials(subject, other, dict(drawn[first].params))


def first_joint(schedules: Mapping[str, Schedule]) -> int | None:
    """Return the first step at which a schedule changes its form, or ``None`` if none does so soon."""
    starts = [start for schedule in schedules.values() for start, _, _ in schedule.pieces() if 0 < start <= _NEAR]
    return min(starts, default=None)


def _values(trial: Described, steps: int) -> list[dict[str, Scalar]]:
    return [{name: schedule.value(step) for name, schedule in trial.schedules.items()} for step in range(steps)]
