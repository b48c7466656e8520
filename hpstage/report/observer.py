"""The observer: a plan plus what its journal records beyond it. The only fold used by all readers. Pure.

Reports and commands keep all records (:mod:`hpstage.report.account`); the page on Dask's dashboard and its metrics are
updated as records arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from hpstage.plan.audits import AuditFigures
from hpstage.plan.facts import (
    Audited,
    ChainClosed,
    ChainId,
    ChainLost,
    ChainStarted,
    DriverId,
    DriverLeft,
    Fact,
    NodeId,
    StageFailed,
    StateLost,
    StateReached,
    StateRef,
    TrialId,
    WorkerId,
)
from hpstage.plan.payments import Charge, Waste
from hpstage.plan.plan import SearchPlan


class ChainRecord(msgspec.Struct):
    """A chain on its worker. ``ended``: when it was closed or its driver was struck off, ``None`` while running.

    ``outcome`` is why its training after the last boundary was discarded, ``None`` if nothing was discarded.
    """

    worker: WorkerId
    driver: DriverId
    began: float
    ended: float | None = None
    outcome: str | None = None
    gang: tuple[WorkerId, ...] = ()


class Observer:
    """Fold the facts of a journal, in its order.

    Args:
        plan: a plan with nothing folded yet.
    """

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.chains: dict[ChainId, ChainRecord] = {}
        self.trained: dict[NodeId, int] = {}  # the farthest step that each node has ever reached
        self.lost: dict[StateRef, StateLost] = {}  # the latest fact for each state
        self.audits = AuditFigures()
        self.now: float | None = None  # the latest time reported on the workers' clock; None: there was none
        # The latest exceptions of the user's code by node and place, until a later search gets past it.
        self._failures: dict[NodeId, dict[tuple[int, bool], StageFailed]] = {}

    def apply(self, fact: Fact) -> Charge | Waste | None:
        """Fold a fact and return the payment that results from it, if any."""
        handler = self.HANDLERS.get(fact.__class__)
        return self.plan.apply(fact) if handler is None else handler(self, fact)

    def _start(self, fact: ChainStarted) -> None:
        self.plan.apply(fact)
        self.now = fact.at
        self.chains[fact.chain] = ChainRecord(fact.worker, fact.driver, fact.at, gang=fact.gang)

    def _reached(self, fact: StateReached) -> Charge:
        paid = self.plan.apply(fact)
        assert isinstance(paid, Charge)
        self.now = fact.at
        node = fact.node
        if fact.step > self.trained.get(node, 0):
            self.trained[node] = fact.step
        if node in self._failures:
            left = {
                place: failed for place, failed in self._failures[node].items() if not self._is_overcome(failed)
            }  # fmt: skip
            if left:
                self._failures[node] = left
            else:
                del self._failures[node]
        return paid

    def _close(self, fact: ChainClosed) -> None:
        self.plan.apply(fact)
        self.now = fact.at
        if fact.chain in self.chains:
            self.chains[fact.chain].ended = fact.at

    def _waste(self, fact: ChainLost) -> Waste:
        self.now = fact.at
        if fact.chain in self.chains:
            self.chains[fact.chain].outcome = fact.outcome
        paid = self.plan.apply(fact)
        assert isinstance(paid, Waste)
        return paid

    def _leave(self, fact: DriverLeft) -> None:
        for id, chain in self.plan.chains.items():
            if chain.driver == fact.driver and id in self.chains:
                self.chains[id].ended = fact.at
        self.plan.apply(fact)

    def _lose(self, fact: StateLost) -> None:
        self.plan.apply(fact)
        self.lost[StateRef(fact.node, fact.step)] = fact

    def _fail(self, fact: StageFailed) -> None:
        self.plan.apply(fact)
        if not self._is_overcome(fact):
            self._failures.setdefault(fact.node, {})[fact.step, fact.evaluating] = fact

    def _audit(self, fact: Audited) -> None:
        self.plan.apply(fact)
        self.audits.add(fact, self.plan)

    def _is_overcome(self, failure: StageFailed) -> bool:
        if not failure.evaluating:
            return self.trained.get(failure.node, 0) > failure.step
        state = self.plan.nodes[failure.node].states.get(failure.step)
        return state is not None and state.metrics is not None

    # By type: a match would take as long as the handlers. Each of them applies the fact to the plan as well.
    HANDLERS: ClassVar[Mapping[type, Callable[[Any, Any], Charge | Waste | None]]] = {
        ChainStarted: _start,
        StateReached: _reached,
        ChainClosed: _close,
        ChainLost: _waste,
        DriverLeft: _leave,
        StateLost: _lose,
        StageFailed: _fail,
        Audited: _audit,
    }

    def waits_for(self, trial: TrialId) -> Literal["RUNNING", "PAUSED", "NOT BEGUN", "OPEN"]:
        """Return what a trial that has not ended waits for: for results (RUNNING), for the algorithm, since it has all
        results that were asked of it (PAUSED), or for its first step, which is trained for no other trial either
        (NOT BEGUN). OPEN: its search has ended."""
        record = self.plan.searches.get(self.plan.study_of(trial))
        if record is None or trial not in record.open:
            return "OPEN"
        if trial in record.paused:
            return "PAUSED"
        planned = self.plan.trials.get(trial)
        return "NOT BEGUN" if planned is None or record.unbegun[planned.root.id] else "RUNNING"

    def failures(self) -> list[StageFailed]:
        """Return the exceptions of the user's code, one per place, except those a later search got past."""
        return [failed for places in self._failures.values() for failed in places.values()]

    @property
    def has_failures(self) -> bool:
        return bool(self._failures)

    def fails_at(self, node: NodeId) -> int | None:
        """Return the first step of the node in which training is known to raise."""
        places = self._failures.get(node, ())
        return min((step for step, evaluating in places if not evaluating), default=None)
