"""What a check trains and what it records: messages between the checking process and its children."""

from __future__ import annotations

from typing import Literal

import msgspec

from hpstage.execution.retraining import Problem
from hpstage.schedule import Scalar

Snapshot = dict[str, str]
"""Paths of all that training can reach, each with a short string that is equal for equal content in every process."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One way of training a trial.

    Attributes:
        values: value of every hyperparameter at each step, up to the last step trained.
        fork: the step at which the run begins.
        source: where the state at that step comes from. A fresh run is set up and trained from step 0.
        reported: steps after which a report is wanted, as where a state is kept or evaluated.
        kept: steps after which the state is kept.
        evaluated: evaluate after each step, not only after the last.
        observed: take a snapshot after each step, not only after the last.
    """

    name: str
    values: list[dict[str, Scalar]]
    fork: int = 0
    source: Literal["fresh", "memory", "disk"] = "fresh"
    reported: list[int]
    kept: list[int] = []
    evaluated: bool = False
    observed: bool = True

    @property
    def steps(self) -> int:
        """Number of steps to train."""
        return len(self.values) - self.fork


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a child.

    Attributes:
        trainable: what the user passed, cloudpickled.
        path: where to find modules.
        states: the folder of saved states.
        runs: trained one after the other in one process.
    """

    trainable: bytes
    path: list[str]
    states: str
    runs: list[Run]


class Record(msgspec.Struct, kw_only=True):
    """The outcome of a run.

    Attributes:
        snapshots: by number of steps trained.
        loaded: the snapshot right after the state was loaded.
        metrics: by number of steps trained; exact, as strings.
        workload: the process's description of its workload; only in the first run of a process.
        beside_eager: how its first steps compare with eager ones, if they were computed otherwise.
    """

    name: str
    fork: int = 0
    snapshots: dict[int, Snapshot] = {}
    loaded: Snapshot = {}
    metrics: dict[int, Snapshot] = {}
    workload: Snapshot = {}
    beside_eager: str = ""
    seconds: float = 0.0
    problem: Problem | None = None


encode = msgspec.json.encode
decode_job = msgspec.json.Decoder(Job).decode
decode_record = msgspec.json.Decoder(Record).decode
