"""The ways in which a trial is trained, each compared with training it straight through."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from hpstage.checking.trials import Trials
from hpstage.execution.runs import Run
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

# In the order in which causes are looked for: what differs in every run differs in all other ways as well.
WAYS = (AGAIN, THREADS, MEMORY, DISK, ELSEWHERE, OTHER, OTHER_FORK, EVALUATED, UNOBSERVED)

_FIRST = {"PYTHONHASHSEED": "0"}
# What differs between workers: how strings are hashed, and the host's name.
_OTHER_PROCESS = {"PYTHONHASHSEED": "1", "HOSTNAME": "another-host"}
_THREADS = {**_FIRST, **dict.fromkeys(VARIABLES, "3")}
_SHORT = 4
"""Number of steps of the other trial."""


class Process(NamedTuple):
    """Runs trained by one process one after the other, and its environment variables.

    ``makes_it``: it makes the trainable itself, where that can be done, as a later search does."""

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
        # The latest fork first: it differs most from where a process begins that trains straight through.
        Process([forked(ELSEWHERE, fork, "disk") for fork in reversed(forks)], _OTHER_PROCESS),
        Process([another, way(OTHER), another, forked(OTHER_FORK, forks[-1], "disk")], _FIRST),
    ]
    return at_once, then
