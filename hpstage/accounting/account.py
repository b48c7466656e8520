"""Account: the tables of ``accounting.py`` with every single record kept, for reports and exports."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import msgspec

from hpstage.accounting.accounting import Accounting
from hpstage.accounting.payments import Charge, Waste
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainLost,
    ChainStarted,
    DriverId,
    DriverLeft,
    Fact,
    StateLost,
    StateReached,
    StateRef,
    TargetAsked,
    TrialId,
    WorkerId,
)
from hpstage.plan.log import fold_all, from_snapshot, read_header, shares
from hpstage.plan.plan import SearchPlan
from hpstage.store import Journal


class ChainRecord(msgspec.Struct):
    """A chain on its worker. ``ended``: when it was closed or its driver was declared dead, ``None`` while running.

    ``outcome`` is why its training after the last boundary was discarded, ``None`` if nothing was discarded.
    """

    worker: WorkerId
    driver: DriverId
    began: float
    ended: float | None = None
    outcome: str | None = None
    gang: tuple[WorkerId, ...] = ()


class Target(msgspec.Struct, frozen=True):
    """A request for ``step`` of ``trial``, farther than any before. ``at`` is the latest time on the workers' clock
    reported before, ``None`` if there was none."""

    trial: TrialId
    step: int
    at: float | None


class Account(Accounting):
    """Like :class:`Accounting`, but keeps each record instead of only sums, for reports and exports."""

    def __init__(self, plan: SearchPlan) -> None:
        super().__init__(plan)
        self.charges: list[Charge] = []
        self.wastes: list[Waste] = []
        self.targets: list[Target] = []
        self.chains: dict[ChainId, ChainRecord] = {}
        self.lost: dict[StateRef, StateLost] = {}  # the latest fact for each state
        self.now: float | None = None  # the latest time reported on the workers' clock; None: there was none

    def fold(self, fact: Fact) -> None:
        self.plan.apply(fact)
        self.apply(fact)

    def _ask(self, fact: TargetAsked) -> None:
        row = self.trials.get(fact.trial)
        before = 0 if row is None else row.requested
        super()._ask(fact)
        if fact.step > before:
            self.targets.append(Target(fact.trial, fact.step, self.now))

    def _reached(self, fact: StateReached) -> Charge:
        self.now = fact.at
        charge = Accounting._reached(self, fact)
        self.charges.append(charge)
        return charge

    def _waste(self, fact: ChainLost) -> Waste:
        self.now = fact.at
        waste = super()._waste(fact)
        self.wastes.append(waste)
        if fact.chain in self.chains:
            self.chains[fact.chain].outcome = fact.outcome
        return waste

    def _start(self, fact: ChainStarted) -> None:
        self.now = fact.at
        super()._start(fact)
        self.chains[fact.chain] = ChainRecord(fact.worker, fact.driver, fact.at, gang=fact.gang)

    def _close(self, fact: ChainClosed) -> None:
        self.now = fact.at
        super()._close(fact)
        if fact.chain in self.chains:
            self.chains[fact.chain].ended = fact.at

    def _leave(self, fact: DriverLeft) -> None:
        for id, (driver, _) in self._open.items():
            if driver == fact.driver:
                self.chains[id].ended = fact.at
        super()._leave(fact)

    def _lose(self, fact: StateLost) -> None:
        self.lost[StateRef(fact.node, fact.step)] = fact

    HANDLERS: ClassVar = {
        **Accounting.HANDLERS,
        TargetAsked: _ask,
        StateReached: _reached,
        ChainLost: _waste,
        ChainStarted: _start,
        ChainClosed: _close,
        DriverLeft: _leave,
        StateLost: _lose,
    }

    def is_open(self, trial: TrialId) -> bool:
        """Whether the trial's search is still running and the trial has not ended."""
        record = self.plan.searches.get(self.plan.study_of(trial))
        return record is not None and trial in record.open

    def waits_for(self, trial: TrialId) -> Literal["RUNNING", "PAUSED", "NOT BEGUN", "OPEN"]:
        """Return what an unfinished trial waits for: results (RUNNING), the algorithm's decision, since it has all
        requested results (PAUSED), or its first step, which is not trained for any other trial either (NOT BEGUN).
        OPEN: its search has ended."""
        record = self.plan.searches.get(self.plan.study_of(trial))
        if record is None or trial not in record.open:
            return "OPEN"
        if trial in record.paused:
            return "PAUSED"
        planned = self.plan.trials.get(trial)
        return "NOT BEGUN" if planned is None or record.unbegun[planned.root.id] else "RUNNING"

    def catch_up(self, journal: Journal, seen: Callable[[Fact], object] = lambda fact: None) -> None:
        """Fold the records of the journal that have not been folded yet.

        Args:
            seen: called with each fact after it was folded.

        Raises:
            HistoryChanged: records that were folded are gone from the journal; a new account has to be created.
            StoreError: a record is not a fact, or contradicts earlier ones.
        """

        def fold_and_show(fact: Fact) -> None:
            self.fold(fact)
            seen(fact)

        self.follow(journal, seen)
        fold_all(journal, self.plan, fold_and_show)
        self.position = self.plan.position


def new_account(journal: Journal) -> Account:
    """Create the account of a journal's plan. Nothing is folded yet, except a snapshot of the plan if there is one.
    Raise :class:`StoreError` if there is no plan."""
    header = read_header(journal)
    plan = from_snapshot(journal, header.workload, shares(header))
    return Account(plan or SearchPlan(header.workload, sharing=shares(header)))
