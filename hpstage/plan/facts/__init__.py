"""Facts, the events of a search that the journal records, and the values that they contain.

All are frozen ``msgspec`` structs: tagged, validated on decoding, and stored as JSON, never pickled.
There is one file for each subject; all names are imported from here. :data:`Fact` is the union of all facts.
Seconds are wall-clock durations; ``at`` is a time on the executor's clock (seconds since the epoch, or virtual).
"""

from __future__ import annotations

from hpstage.plan.facts.chains import (
    ChainClosed,
    ChainLost,
    ChainProlonged,
    ChainStarted,
    DriverJoined,
    DriverLeft,
    WorkersChanged,
)
from hpstage.plan.facts.searches import ForkedFrom, RandomState, SearchEnded, SearchStarted, TrialEnded, TrialProposed
from hpstage.plan.facts.states import (
    Audited,
    ForkVerified,
    InputsRead,
    PlanCreated,
    StageFailed,
    StateDiffers,
    StateLost,
    StateReached,
    StepsTimed,
    TargetAsked,
    TrainingEnded,
    TrialAdded,
)
from hpstage.plan.facts.values import (
    NO_FROZEN_WORK,
    AuditOutcome,
    ChainId,
    ChainOutcome,
    Departure,
    DriverId,
    FrozenWork,
    Kept,
    Metric,
    Metrics,
    NodeId,
    Part,
    Record,
    Span,
    StateKey,
    StateLoss,
    StateRef,
    TrialId,
    UserFailure,
    WorkerId,
    Workers,
    number_of,
    to_metric,
    to_metrics,
    to_numbers,
)

__all__ = [
    "NO_FROZEN_WORK",
    "AuditOutcome",
    "Audited",
    "ChainClosed",
    "ChainId",
    "ChainLost",
    "ChainOutcome",
    "ChainProlonged",
    "ChainStarted",
    "Departure",
    "DriverId",
    "DriverJoined",
    "DriverLeft",
    "Fact",
    "ForkVerified",
    "ForkedFrom",
    "FrozenWork",
    "InputsRead",
    "Kept",
    "Metric",
    "Metrics",
    "NodeId",
    "Part",
    "PlanCreated",
    "RandomState",
    "Record",
    "SearchEnded",
    "SearchStarted",
    "Span",
    "StageFailed",
    "StateDiffers",
    "StateKey",
    "StateLoss",
    "StateLost",
    "StateReached",
    "StateRef",
    "StepsTimed",
    "TargetAsked",
    "TrainingEnded",
    "TrialAdded",
    "TrialEnded",
    "TrialId",
    "TrialProposed",
    "UserFailure",
    "WorkerId",
    "Workers",
    "WorkersChanged",
    "number_of",
    "to_metric",
    "to_metrics",
    "to_numbers",
]

Fact = (
    PlanCreated
    | TrialAdded
    | TargetAsked
    | StateReached
    | StateLost
    | StateDiffers
    | ForkVerified
    | Audited
    | InputsRead
    | StageFailed
    | TrainingEnded
    | ChainLost
    | DriverJoined
    | DriverLeft
    | WorkersChanged
    | ChainStarted
    | ChainProlonged
    | ChainClosed
    | SearchStarted
    | TrialProposed
    | TrialEnded
    | SearchEnded
    | StepsTimed
)
