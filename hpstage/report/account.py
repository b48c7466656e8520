"""The account of a plan: an observer that records what workers reported and which trial paid for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from hpstage.plan.facts import (
    ChainId,
    ChainLost,
    DriverId,
    Fact,
    NodeId,
    StateReached,
    TargetAsked,
    TrainingEnded,
    TrialId,
)
from hpstage.plan.log import fold_all, read_header, shares
from hpstage.plan.payments import Charge, Waste
from hpstage.plan.plan import SearchPlan
from hpstage.report.observer import Observer
from hpstage.store import Journal


class Ask(msgspec.Struct, frozen=True):
    """``trial`` was asked for ``step``, farther than ever before. ``at`` is the latest time on the workers' clock
    reported before, ``None`` if there was none."""

    trial: TrialId
    step: int
    at: float | None


class Account(Observer):
    """An observer that keeps all records. Facts must be passed to ``apply`` in the order of the journal."""

    def __init__(self, plan: SearchPlan) -> None:
        super().__init__(plan)
        self.charges: list[Charge] = []
        self.wastes: list[Waste] = []
        self.asks: list[Ask] = []
        self.targeted: dict[tuple[NodeId, int], TrialId] = {}  # the first trial to ask for a node's state at a step

    def _reached(self, fact: StateReached) -> Charge:
        paid = super()._reached(fact)
        self.charges.append(paid)
        return paid

    def _waste(self, fact: ChainLost) -> Waste:
        paid = super()._waste(fact)
        self.wastes.append(paid)
        return paid

    def _ask(self, fact: TargetAsked) -> None:
        id, step = fact.trial, fact.step
        planned = self.plan.trials.get(id)
        before = step if planned is None else planned.asked
        self.plan.apply(fact)
        if step > before:
            self.asks.append(Ask(id, step, self.now))
        ending = self.plan.ending_on(id, step)
        if ending is None:
            self.targeted.setdefault((self.plan.trials[id].node_at(step).id, step), id)

    def _end(self, fact: TrainingEnded) -> None:
        for state in self.plan.beyond(fact):
            for trial in state.unanswered or ():
                self.targeted.setdefault((fact.node, fact.last), trial)
        self.plan.apply(fact)

    HANDLERS: ClassVar = {
        **Observer.HANDLERS,
        StateReached: _reached,
        ChainLost: _waste,
        TargetAsked: _ask,
        TrainingEnded: _end,
    }

    def drivers(self) -> set[DriverId]:
        """Return the drivers that have started chains: one for each call of ``optimize``."""
        return {chain.driver for chain in self.chains.values()}

    def driver_of(self, chain: ChainId) -> DriverId | None:
        """Return the driver of a chain, ``None`` if the journal does not record it."""
        record = self.chains.get(chain)
        return None if record is None else record.driver

    def is_open(self, trial: TrialId) -> bool:
        """Whether the trial's search is still running and the trial has not ended."""
        record = self.plan.searches.get(self.plan.study_of(trial))
        return record is not None and trial in record.open

    def catch_up(self, journal: Journal, seen: Callable[[Fact], object] | None = None) -> None:
        """Fold the records of the journal that have not been folded yet.

        Args:
            seen: called with each fact after it was folded.

        Raises:
            HistoryChanged: records that were folded are gone from the journal; a new account has to be created.
            StoreError: a record is not a fact, or contradicts earlier ones.
        """

        def fold_and_show(fact: Fact) -> None:
            self.apply(fact)
            seen(fact)  # type: ignore[misc]

        fold_all(journal, self.plan, self.apply if seen is None else fold_and_show)


def new_account(journal: Journal) -> Account:
    """Create the account of a journal's plan, with nothing folded yet. Raise :class:`StoreError` if there is none."""
    header = read_header(journal)
    return Account(SearchPlan(header.workload, sharing=shares(header)))
