"""The steps beyond which training cannot continue, since the user's code raised an exception or ended it. Pure."""

from __future__ import annotations

from hpstage.errors import InternalError
from hpstage.plan.facts import NodeId, StageFailed, TrainingEnded, UserFailure
from hpstage.plan.nodes import PlannedTrial, State


class Endings:
    """The steps in which the user's code ended training or raised an exception.

    Ends of training are permanent. Failures are forgotten when the last driver leaves the plan: concurrent drivers
    agree on them, and a later call tries again.
    """

    def __init__(self) -> None:
        self.ended: dict[NodeId, TrainingEnded] = {}
        self._failed: dict[NodeId, tuple[int, UserFailure]] = {}

    def end(self, fact: TrainingEnded, last: State | None) -> None:
        """Add an end of training, whose last state is ``last``."""
        if fact.outcome == "complete" and (last is None or last.metrics is None):
            raise InternalError(f"training was completed at step {fact.last} of node {fact.node}, which has no metrics")
        known = self.ended.get(fact.node)
        if known is None or fact.step < known.step:
            self.ended[fact.node] = fact

    def fail(self, fact: StageFailed) -> None:
        known = self._failed.get(fact.node)
        self._failed[fact.node] = (min(fact.step, known[0]) if known else fact.step, fact.failure)

    def forget_failures(self) -> None:
        self._failed.clear()

    def ending(self, trial: PlannedTrial, step: int) -> TrainingEnded | None:
        """Return the fact that ended ``trial`` before it was trained to ``step``, if there is one."""
        if not self.ended:
            return None
        for node, _, stop in trial.path_to(step):
            ended = self.ended.get(node.id)
            if ended is not None and stop > ended.step and step > ended.last:
                return ended
        return None

    def failure(self, trial: PlannedTrial, step: int) -> UserFailure | None:
        """Return the failure that currently prevents training ``trial`` to ``step``, if any."""
        if not self._failed:
            return None
        for node, _, stop in trial.path_to(step):
            failed = self._failed.get(node.id)
            if failed is not None and stop > failed[0]:
                return failed[1]
        return None
