"""Identifiers, and the values that facts contain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NewType

import msgspec

NodeId = NewType("NodeId", int)
"""Position of a node in the plan, in order of creation. Identical in every fold of the same journal."""
TrialId = NewType("TrialId", str)
"""Identifies a trial within a plan: ``"<study name>/<number>"``."""
WorkerId = NewType("WorkerId", str)
DriverId = NewType("DriverId", str)
"""Identifies a driver: one process's participation in a plan, until it leaves or its lease expires."""
ChainId = NewType("ChainId", str)
StateKey = NewType("StateKey", str)
"""Permanent identifier of a state: 32 hex digits (see ``keys.py``)."""
Workers = Annotated[float, msgspec.Meta(gt=0)]
Metric = float | Annotated[str, msgspec.Meta(pattern="^(nan|-?inf)$")]
Metrics = dict[str, Metric]
"""Serialized metrics. JSON has no NaN or infinities, so these are strings (``"nan"``, ``"inf"``, ``"-inf"``)."""


def number_of(trial: TrialId) -> int:
    """Return the number of a trial in its study."""
    return int(trial.rpartition("/")[2])


def to_metrics(numbers: Mapping[str, float]) -> Metrics:
    return {name: to_metric(value) for name, value in numbers.items()}


def to_metric(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def to_numbers(metrics: Metrics) -> dict[str, float]:
    """Return metrics as numbers. Raise ValueError for a string that is not a number."""
    return {name: float(value) for name, value in metrics.items()}


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a journal's record. Unknown fields are refused, since they may change the meaning of the others."""


class StateRef(Record, frozen=True, order=True):
    """A state: ``node``'s branch trained up to, but not including, step ``step``."""

    node: NodeId
    step: int


class Span(Record, frozen=True):
    """Steps ``[start, stop)`` of a node, which produce its states ``(start, stop]``."""

    node: NodeId
    start: int
    stop: int


class Part(Record, frozen=True):
    """Leaves that several states have in common, stored once in the checkpoint store, under ``key``."""

    key: StateKey
    bytes: int


class Kept(Record, frozen=True, omit_defaults=True):
    """A state published in the checkpoint store. ``digest`` covers its content (tensors and structure)."""

    key: StateKey
    bytes: int
    """Bytes of the whole state, including its parts: the same in every run."""
    digest: str
    marks: str = ""
    """Marks of its leaves, to identify those that differ when the state is retrained."""
    parts: tuple[Part, ...] = ()
    """Parts that hold the leaves that it has in common with other states."""
    rest: int | None = None
    """Bytes of its own files, without those of its parts; ``None`` if it has no parts."""

    @property
    def own(self) -> int:
        """Bytes of its own files, without those of its parts."""
        return self.bytes if self.rest is None else self.rest


class UserFailure(Record, frozen=True):
    """Why a stage failed: an exception in the user's code, or the deaths of its workers. ``summary`` has one line.

    ``kinds`` holds the qualified names of the exception's class and its bases, so that ``catch`` can be honoured
    without sending the exception itself.
    """

    summary: str
    traceback: str
    kinds: tuple[str, ...] = ()


class FrozenWork(Record, frozen=True):
    """The work of frozen layers that precede all trained ones. ``batches``: the number of batches to apply them to;
    ``skipped``: for how many of these a sibling or an earlier step had computed the result; ``seconds``: the estimated
    time that this saved."""

    batches: int
    skipped: int
    seconds: float

    def __add__(self, other: FrozenWork) -> FrozenWork:
        return FrozenWork(self.batches + other.batches, self.skipped + other.skipped, self.seconds + other.seconds)


NO_FROZEN_WORK = FrozenWork(0, 0, 0.0)
ChainOutcome = Literal["done", "stopped", "failed", "unreadable", "cut_off", "full", "apart", "lost"]
Departure = Literal["died", "closed", "unreachable"]
StateLoss = Literal["evicted", "unreadable"]
AuditOutcome = Literal["equal", "differs", "stopped", "failed"]
