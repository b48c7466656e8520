"""The ways on which a trial is trained, each compared with training it straight through."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

from hpstage.checking.runs import Run
from hpstage.checking.trials import Trials
from hpstage.threads import VARIABLES

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
HASHED = "again, under the same PYTHONHASHSEED"
ANOTHER = "another trial"

# In the order in which causes are looked for: what differs in every run differs on all other ways as well.
WAYS = (AGAIN, THREADS, MEMORY, DISK, ELSEWHERE, OTHER, OTHER_FORK, EVALUATED, UNOBSERVED)

_SAME_HASHES = {"PYTHONHASHSEED": "0"}
# What is another from worker to worker: the host's name, and how texts are hashed.
_OTHER_PROCESS = {"PYTHONHASHSEED": "1", "HOSTNAME": "another-host"}
_SHORT = 4
"""Steps of the other trial."""


class Process(NamedTuple):
    """Runs that one process trains, one after the other, and variables of its environment."""

    runs: list[Run]
    variables: Mapping[str, str]


def forks_of(steps: int, n_forks: int, seed: int) -> tuple[int, ...]:
    """Steps at which forks are made, at random."""
    return tuple(sorted(random.Random(f"forks {seed}").sample(range(1, steps), min(n_forks, steps - 1))))


def processes(trials: Trials, forks: tuple[int, ...]) -> tuple[list[Process], list[Process]]:
    """Those that begin at once, one of which trains straight through and keeps states; then those that need them."""
    values, steps = trials.subject, trials.steps
    reported = [*forks, steps] if forks[-1] != steps else list(forks)

    def run(name: str, **options: object) -> Run:
        return Run(name=name, values=values, **{"reported": reported, **options})  # type: ignore[arg-type]

    def forked(name: str, fork: int, source: str) -> Run:
        return run(name, fork=fork, source=source)

    first = Process(
        [
            run(STRAIGHT, kept=list(forks)),
            *(forked(MEMORY, fork, "memory") for fork in forks),
            forked(DISK, forks[-1], "disk"),
        ],
        _SAME_HASHES,
    )
    few = min(_SHORT, steps)
    another = run(ANOTHER, values=trials.other[:few], evaluated=True, reported=list(range(1, few + 1)))
    again = Process(
        [
            run(AGAIN),
            run(EVALUATED, evaluated=True, reported=list(range(1, steps + 1))),
            run(UNOBSERVED, observed=False),
        ],
        _OTHER_PROCESS,
    )
    others = [
        Process(
            [run(THREADS)],
            {**_SAME_HASHES, **dict.fromkeys(VARIABLES, "3")},
        ),
        Process([forked(ELSEWHERE, fork, "disk") for fork in forks], _OTHER_PROCESS),
        Process(
            [
                another,
                run(OTHER),
                another,
                forked(OTHER_FORK, forks[0], "disk"),
            ],
            _SAME_HASHES,
        ),
    ]
    return [first, again], others


def again_under_the_same_hashes(trials: Trials, forks: tuple[int, ...]) -> Process:
    """Tells whether it is hashes by which processes differ."""
    return Process([Run(name=HASHED, values=trials.subject, reported=[*forks, trials.steps])], _SAME_HASHES)
