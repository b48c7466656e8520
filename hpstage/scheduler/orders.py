"""What the workers of this driver's chains were told. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpstage.plan.facts import StateRef
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.ordered import Ordered
from hpstage.plan.regimes import Regime


@dataclass(slots=True)
class Orders:
    """What the worker of a chain was told: where it keeps states, and where it is to end."""

    chain: OpenChain
    marks: Ordered[int] = field(default_factory=Ordered)  # boundaries ahead, but for those that the worker sets itself
    evaluated: set[int] = field(default_factory=set)  # marks that are to be evaluated
    verifying: set[Regime] = field(default_factory=set)  # a fork is verified on it under each of these
    passed: int = 0  # where it is known to have been, if that is beyond where it was reported
    end: int | None = None
    cut: int | None = None  # where it is cut so that all workers end together
    rest: int | None = None  # where it may give way before its next mark
    stopping: bool = False

    @property
    def end_ref(self) -> StateRef | None:
        return None if self.end is None else StateRef(self.chain.span_at(self.end).node, self.end)
