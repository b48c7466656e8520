"""The trials of a check, drawn at random from the space, with a seed; and the ways in which one of them is trained,
each compared with training it straight through."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from hpstage.errors import UsageError
from hpstage.execution.runs import Run
from hpstage.schedule import Scalar, Schedule
from hpstage.schedule.space import Described, Space, describe, with_defaults
from hpstage.training.identity.threads import VARIABLES

STRAIGHT = "straight through"
AGAIN = "again, in another process"
THREADS = "in a process that was given 3 threads"
MEMORY = "forked from memory"
DISK = "forked from disk"
ELSEWHERE = "forked from disk in a new process"
OTHER = "after another trial"
OTHER_FORK = "forked from disk after another trial"
EVALUATED = "evaluated after each step"
UNOBSERVED = "no state taken on the way"
ANOTHER = "another trial"

# In the order in which causes are looked for: a value that differs in every run differs in all other ways, too.
WAYS = (AGAIN, THREADS, MEMORY, DISK, ELSEWHERE, OTHER, OTHER_FORK, EVALUATED, UNOBSERVED)

_FIRST = {"PYTHONHASHSEED": "0"}
# What differs between workers: how strings are hashed, and the host's name.
_OTHER_PROCESS = {"PYTHONHASHSEED": "1", "HOSTNAME": "another-host"}
_THREADS = {**_FIRST, **dict.fromkeys(VARIABLES, "3")}
_SHORT = 4
"""Number of steps of the other trial."""
_DRAWN = 16
_STEPS = 8
_NEAR = 16
"""The latest first joint of the schedules for which training is extended by default, so that it is crossed."""
_BEYOND = 3


class Process(NamedTuple):
    """Runs trained by one process one after the other, and its environment variables.

    ``makes_it``: whether the process makes the trainable itself if possible, as a later search does."""

    runs: list[Run]
    variables: Mapping[str, str]
    makes_it: bool = False


def forks_of(steps: int, n_forks: int, seed: int) -> tuple[int, ...]:
    """Return random steps at which to fork."""
    return tuple(sorted(random.Random(f"forks {seed}").sample(range(1, steps), min(n_forks, steps - 1))))


def processes(trials: Trials, forks: tuple[int, ...]) -> tuple[list[Process], list[Process]]:
    """Return the processes to start at once, one of which trains straight through and keeps states, then the others,
    which need these states."""
    steps = trials.steps
    straight = Run(name=STRAIGHT, values=trials.subject, reported=sorted({*forks, steps}), kept=list(forks))
    few = list(range(1, min(_SHORT, steps) + 1))
    another = Run(name=ANOTHER, values=trials.other[: len(few)], reported=few, evaluated=True)

    def way(name: str) -> Run:
        return replace(straight, name=name, kept=[])

    def forked(name: str, fork: int, source: Literal["memory", "disk"]) -> Run:
        return replace(straight, name=name, kept=[], fork=fork, source=source)

    at_once = [
        Process(
            [straight, *(forked(MEMORY, fork, "memory") for fork in forks), forked(DISK, forks[-1], "disk")],
            _FIRST,
        ),
        Process(
            [
                way(AGAIN),
                replace(way(EVALUATED), evaluated=True, reported=list(range(1, steps + 1))),
                replace(way(UNOBSERVED), observed=False),
            ],
            _OTHER_PROCESS,
            makes_it=True,
        ),
    ]
    then = [
        Process([way(THREADS)], _THREADS),
        # The latest fork first: it differs most from the beginning of training straight through.
        Process([forked(ELSEWHERE, fork, "disk") for fork in reversed(forks)], _OTHER_PROCESS),
        Process([another, way(OTHER), another, forked(OTHER_FORK, forks[-1], "disk")], _FIRST),
    ]
    return at_once, then


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

    from hpstage.optuna.stand_in import described_trials, quiet_optuna

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
        raise UsageError("the space has trials of a single step, which cannot be forked; check longer trials")
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
