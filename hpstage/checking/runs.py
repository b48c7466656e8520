"""What is trained in a check, and what is told of it: the records between the process that checks and its children."""

from __future__ import annotations

from typing import Literal

import msgspec

from hpstage.schedule import Scalar

Snapshot = dict[str, str]
"""Paths of all that training can reach, each with a short text that is equal for equal content in every process."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One way through a trial.

    Attributes:
        values: of every hyper-parameter at each step, up to the last that is trained.
        fork: the step at which it begins.
        source: of the state there. A fresh one is set up and trained from step 0.
        reported: steps after which a report is wanted, as where a state is kept or evaluated.
        kept: steps after which the state is kept.
        evaluated: evaluate after each step, and not after the last alone.
        observed: take a snapshot after each step, and not after the last alone.
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
        """How many steps it trains."""
        return len(self.values) - self.fork


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do.

    Attributes:
        trainable: what the user passed, cloudpickled.
        path: where it finds modules.
        states: the folder of kept states.
        runs: one after the other, in one process.
    """

    trainable: bytes
    path: list[str]
    states: str
    runs: list[Run]


class Problem(msgspec.Struct, frozen=True):
    """Why a run came to no end. ``refused``: by hpstage, in a sentence; else the user's code failed: its traceback."""

    kind: Literal["refused", "failed"]
    text: str
    step: int
    """Steps that were trained."""


class Record(msgspec.Struct, kw_only=True):
    """What became of a run.

    Attributes:
        snapshots: by the number of steps trained.
        loaded: the snapshot right after the state was loaded.
        metrics: by the number of steps trained; exact, as text.
        workload: what the process says of its workload; of the first run in it.
    """

    name: str
    fork: int = 0
    snapshots: dict[int, Snapshot] = {}
    loaded: Snapshot = {}
    metrics: dict[int, Snapshot] = {}
    workload: Snapshot = {}
    seconds: float = 0.0
    problem: Problem | None = None


encode = msgspec.json.encode
decode_job = msgspec.json.Decoder(Job).decode
decode_record = msgspec.json.Decoder(Record).decode
