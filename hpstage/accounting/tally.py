"""The sums of one study, with the state needed to update them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpstage.accounting.payments import NodeRow
from hpstage.accounting.sums import Sums
from hpstage.plan.facts import DriverId, NodeId, StateReached


@dataclass(slots=True)
class Tally:
    """A study's sums, now and when its last search began.

    Most nodes are used by one study alone. What is to be known of them is kept in the node's row for the study of the
    trial that made it, and here for other studies.
    """

    sums: Sums = field(default_factory=Sums)
    before: Sums = field(default_factory=Sums)
    """When the last search began; so are those below."""
    paid_before: float = 0.0
    drivers_before: frozenset[DriverId] = frozenset()
    reach: dict[NodeId, int] = field(default_factory=dict)  # the farthest step requested, unless it is the node's
    _answered: dict[NodeId, int] = field(default_factory=dict)  # steps of each trial up to its last result, summed

    def ask(self, row: NodeRow, stop: int, maker: Tally) -> None:
        """Count the unique steps of a target on a node, before its reach is extended.

        Args:
            maker: the tally of the study whose trial made the node.
        """
        id = row.node.id
        fresh = stop - self.reach.get(id, row.reach if maker is self else row.node.start)
        if fresh > 0:
            self.sums.steps_unique += fresh
            if maker is not self or id in self.reach:
                self.reach[id] = stop
            if maker is not self and stop > row.reach:
                maker.reach.setdefault(id, row.reach)  # from now on, they differ

    def retract(self, row: NodeRow, last: int, maker: Tally) -> None:
        """Take back the steps of a node beyond ``last``, where its training has ended, before its reach is."""
        id = row.node.id
        beyond = self.reach.get(id, row.reach if maker is self else last) - last
        if beyond > 0:
            self.sums.steps_unique -= beyond
            if id in self.reach:
                self.reach[id] = last

    def answer(self, row: NodeRow, steps: int, pace: float, maker: Tally) -> None:
        """Count further steps up to a trial's last result, at a node's seconds per step."""
        if maker is self:
            row.answered += steps
        else:
            self._answered[row.node.id] = self._answered.get(row.node.id, 0) + steps
        self.sums.alone_train_seconds += steps * pace

    def repace(self, row: NodeRow, fact: StateReached, maker: Tally) -> None:
        """Update estimates before folding ``fact``, which changes the seconds per step of a node trained before."""
        steps = row.answered if maker is self else self._answered.get(row.node.id)
        if steps:
            after = (row.seconds + fact.own_seconds) / (row.trained + fact.step - fact.start)
            self.sums.alone_train_seconds += steps * (after - row.seconds / row.trained)
