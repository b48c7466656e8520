"""The way a running chain is on, as amended while it runs. Shared by real and simulated workers. Pure."""

from __future__ import annotations

from hpstage.errors import InternalError
from hpstage.events import Amendment, Boundary, Chain, NodeId


class Course:
    """Stages and the boundaries ahead. A place is ``(index of the stage, step)``."""

    def __init__(self, chain: Chain) -> None:
        self.stages = list(chain.stages)
        self.boundaries: dict[tuple[int, int], Boundary] = {}
        self.end: tuple[int, int] | None = None
        for boundary in chain.boundaries:
            where = self.locate(boundary.node, boundary.step)
            if where is None:
                raise InternalError(
                    f"{chain.id} has a boundary at step {boundary.step} of node {boundary.node}, beside it"
                )
            self.boundaries[where] = boundary
        if chain.end is not None:
            self.end = self.locate(chain.end.node, chain.end.step)

    def locate(self, node: NodeId, step: int) -> tuple[int, int] | None:
        for index, stage in enumerate(self.stages):
            if stage.node == node and stage.start <= step <= stage.stop:
                return index, step
        return None

    def amend(self, amendment: Amendment, position: tuple[int, int]) -> list[tuple[NodeId, int]]:
        """Take a change in; return the boundaries for which it came too late."""
        missed: list[tuple[NodeId, int]] = []
        self.stages += amendment.stages
        for boundary in amendment.boundaries:
            where = self.locate(boundary.node, boundary.step)
            if where is None or where <= position:
                missed.append((boundary.node, boundary.step))
            else:
                self.boundaries[where] = boundary
        self.end = None
        if amendment.end is not None:
            where = self.locate(amendment.end.node, amendment.end.step)
            if where is None or where <= position:
                missed.append((amendment.end.node, amendment.end.step))
            else:
                self.end = where
        return missed
