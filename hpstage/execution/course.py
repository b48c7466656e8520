"""Course: where a running chain evaluates, saves and ends, as amended while it runs, on any kind of worker. Pure."""

from __future__ import annotations

from bisect import bisect_left

from msgspec.structs import replace

from hpstage.errors import InternalError
from hpstage.plan.facts import NodeId, StateRef
from hpstage.plan.keys import ValueHistory
from hpstage.plan.messages import Amendment, Boundary, Chain, Stage
from hpstage.plan.trail import Trail


class Course:
    """A chain's stages, and the boundaries ahead. Steps are unique on it, since the stages are consecutive."""

    def __init__(self, chain: Chain) -> None:
        self.stages = list(chain.stages)
        self.boundaries: dict[int, Boundary] = {}
        self.end: int | None = None
        self._every = chain.keep_every
        self._trail: tuple[int, Trail] | None = None  # index of a stage, and its trail
        for boundary in chain.boundaries:
            if not self._passes(boundary.node, boundary.step):
                raise InternalError(
                    f"{chain.id} has a boundary at step {boundary.step} of node {boundary.node}, which is not "
                    f"on its path"
                )
            self.boundaries[boundary.step] = boundary
        if chain.end is not None:
            self.end = chain.end.step

    def index_at(self, step: int) -> int:
        """Return the index of the stage on which the state at ``step`` is reached; 0 for the state before the first."""
        return bisect_left(self.stages, step, key=lambda stage: stage.stop)

    def stage_at(self, step: int) -> Stage:
        return self.stages[self.index_at(step)]

    def own(self, step: int, *, keep: bool = True) -> Boundary:
        """Create a boundary that the chain sets itself, at a step after its first. The plan does not know it."""
        index = self.index_at(step)
        if self._trail is None or self._trail[0] != index:
            stage = self.stages[index]
            self._trail = index, Trail(ValueHistory(stage.history), stage.start, stage.forms)
        return Boundary(self.stages[index].node, step, self._trail[1].key(step), evaluate=False, keep=keep)

    def keep_at(self, step: int) -> None:
        """Keep the state at ``step``, in addition to whatever else is requested there."""
        self.boundaries[step] = replace(self.boundaries.get(step) or self.own(step), keep=True)

    def keeps(self, step: int) -> bool:
        """Whether the state at ``step`` is kept because of its number alone."""
        return self._every is not None and step % self._every == 0

    def amend(self, amendment: Amendment, position: int) -> list[StateRef]:
        """Apply a change; return the boundaries for which it came too late."""
        missed: list[StateRef] = []
        self.stages += amendment.stages
        for boundary in amendment.boundaries:
            if boundary.step <= position or not self._passes(boundary.node, boundary.step):
                missed.append(StateRef(boundary.node, boundary.step))
            else:
                self.boundaries[boundary.step] = boundary
        self.end = None
        end = amendment.end
        if end is not None:
            if end.step <= position or not self._passes(end.node, end.step):
                missed.append(end)
            else:
                self.end = end.step
        return missed

    def _passes(self, node: NodeId, step: int) -> bool:
        index = self.index_at(step)
        if index == len(self.stages) or step < self.stages[0].start:
            return False
        return self.stages[index].node == node
