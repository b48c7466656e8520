"""The four kinds of failure: the caller's mistake, the caller's training code, the cluster, a bug of hpstage."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointForeign",
    "CheckpointFull",
    "CheckpointMissing",
    "CheckpointUnreachable",
    "ClusterError",
    "CompilerFailed",
    "DeviceFull",
    "GangApart",
    "GangLost",
    "HistoryChanged",
    "HpstageError",
    "InternalError",
    "LeaseLost",
    "MetricsError",
    "NonFiniteLoss",
    "ScheduleError",
    "StateError",
    "StopTraining",
    "StoreError",
    "TrainingError",
    "UsageError",
]


def __dir__() -> list[str]:
    return __all__


class HpstageError(Exception):
    """Base of every error that hpstage raises on purpose."""


class UsageError(HpstageError, ValueError):
    """The caller made a mistake: the message names the argument and the remedy. Raised before anything is trained."""


class ScheduleError(UsageError):
    """An impossible schedule: a value that is no JSON scalar, NaN, an end before the trial's end."""


class TrainingError(HpstageError):
    """Your training code failed; the text ends with its own traceback."""


class StopTraining(Exception):
    """Raise it in training code to end training with the current step: its trials are complete there.

    The step counts as trained, and the state after it is evaluated. The decision must depend on values that every step
    computes, not on when metrics are measured, since that depends on the algorithm. (``optuna.TrialPruned`` ends
    training before the current step, and its trials as pruned.)
    """


class NonFiniteLoss(Exception):
    """The training loss is NaN or infinite; trials that reach this step end before it, as pruned."""

    steps_late: int = 0
    """Number of steps trained after this one before its loss was read."""


class MetricsError(UsageError, TrainingError):
    """``evaluate()`` does not return a mapping of metrics."""


class ClusterError(HpstageError):
    """The cluster failed: no workers, missing devices, or workers lost more often than the bound allows."""


class GangApart(ClusterError):
    """The processes of a gang did not meet: some did not come in time, or cannot be reached. Nothing was trained."""


class GangLost(ClusterError):
    """A process of a gang is gone, so that the others cannot continue. The steps that they have trained since the last
    saved state are lost."""


class CompilerFailed(ClusterError):
    """A compiler that training needs has failed for a reason that may pass: no room, a killed process, a broken file.
    The step was not trained."""


class DeviceFull(ClusterError):
    """A device had too little free memory for a step or an evaluation. More memory is free at the retry."""


class StoreError(HpstageError):
    """A journal cannot be read or written: newer format, another workload, full or read-only disk."""


class LeaseLost(StoreError):
    """Another owner has taken leases that a write depends on, or they were released. The write changed nothing.

    ``names`` are the leases that are lost.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(self.names)

    def __str__(self) -> str:
        return (
            f"the leases {', '.join(map(repr, self.names))} are no longer held: another process has taken over the work"
        )


class HistoryChanged(StoreError):
    """A journal no longer holds records that were read from it. Others may have been written in their places."""


class CheckpointError(HpstageError):
    """A checkpoint cannot be used. Recomputing the state from an ancestor is always a remedy."""


class CheckpointFull(CheckpointError):
    """There is no room for a checkpoint: the disk or a quota is full. Removing others makes room."""


class CheckpointUnreachable(CheckpointError):
    """The location of the checkpoints cannot be reached from here, or refuses this process: a missing mount, expired
    credentials, an outage, a time-out. The cause may be temporary, and says nothing about the checkpoints there."""


class CheckpointMissing(CheckpointError):
    """No complete checkpoint is published under the key."""


class CheckpointCorrupt(CheckpointError):
    """The checkpoint's bytes or identity do not agree with its manifest."""


class CheckpointForeign(CheckpointCorrupt):
    """The checkpoint belongs to another workload."""


class StateError(UsageError):
    """A state holds something that cannot be captured exactly; the message gives the path to it."""


class InternalError(HpstageError):
    """A bug of hpstage: an illegal event reached the planner. Nothing was changed; please report it."""
