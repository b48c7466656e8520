"""Book: what a report is about, that is one study of a plan or all, with its figures. From the journal alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from hpstage.accounting.account import Account, new_account
from hpstage.accounting.accounting import Call
from hpstage.accounting.branches import Measured, TreeBranch, branches_of, measured, merit, ranking
from hpstage.accounting.pauses import Pauses, Period, united
from hpstage.accounting.payments import Charge, Waste, rounded
from hpstage.accounting.savings import Savings, answered_steps, savings_of, seconds_alone
from hpstage.accounting.sums import Sums
from hpstage.checkpoints.opening import open_checkpoints
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import UsageError
from hpstage.plan.facts import (
    ChainLost,
    Fact,
    NodeId,
    PlanCreated,
    SearchStarted,
    StateReached,
    TrialId,
    TrialProposed,
    WorkerId,
)
from hpstage.plan.log import shares
from hpstage.plan.messages import host_of
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.plan.uncollected import uncollected
from hpstage.plan.winners import Costs, best_first, costs_of, dominates
from hpstage.store import Journal
from hpstage.store.opening import address_of, open_journal

# Maximum number of studies listed in a message.
_NAMED = 20


@dataclass(slots=True)
class Worked:
    """A worker's first start and last end of work, on its clock, and its rounded seconds of work."""

    first: float
    last: float
    seconds: float


@dataclass(frozen=True)
class Book:
    """The part of an account that concerns one study, or all of it (``study=None``).

    A stage belongs to a study if it was charged to one of its trials (:mod:`hpstage.accounting.payments`). The books of
    a plan's studies are therefore disjoint and sum to the plan's.
    """

    account: Account
    study: str | None = None
    checkpoints: CheckpointStore | None = None
    """The store that holds the plan's training logs, if it is known."""
    store: str = ""
    """The address of the store, without secrets; ``""`` if the journal was given without one."""

    def is_mine(self, trial: TrialId) -> bool:
        """Whether the trial belongs to the book."""
        return self.study is None or self.account.plan.study_of(trial) == self.study

    @cached_property
    def trials(self) -> dict[TrialId, PlannedTrial]:
        """The trials in the order in which they were added to the plan."""
        return {id: trial for id, trial in self.account.plan.trials.items() if self.is_mine(id)}

    @cached_property
    def rejected(self) -> dict[TrialId, TrialProposed]:
        """The trials that the space has rejected. They have no schedules and so are not among :attr:`trials`."""
        proposed = self.account.plan.searches.proposed
        return {id: fact for id, fact in proposed.items() if fact.rejected is not None and self.is_mine(id)}

    @cached_property
    def charges(self) -> list[Charge]:
        """The workers' reports, in the order of the journal."""
        charges = self.account.charges
        return list(charges) if self.study is None else [charge for charge in charges if self.is_mine(charge.trial)]

    @cached_property
    def wastes(self) -> list[Waste]:
        return [waste for waste in self.account.wastes if self.is_mine(waste.trial)]

    @cached_property
    def began(self) -> list[float]:
        """When the worker started each of :attr:`charges`."""
        return [charge.fact.began for charge in self.charges]

    @cached_property
    def calls(self) -> list[Call]:
        """The calls of ``optimize`` that worked for the book."""
        account = self.account
        if self.study is None:
            return [*account.calls.values()]
        chains = {charge.fact.chain for charge in self.charges} | {waste.fact.chain for waste in self.wastes}
        drivers = {account.chains[chain].driver for chain in chains if chain in account.chains}
        return [call for driver, call in account.calls.items() if driver in drivers]

    @cached_property
    def pauses(self) -> Pauses:
        """The periods between the calls of ``optimize`` that worked for the book."""
        return Pauses((call.first, call.last) for call in self.calls)

    @cached_property
    def presence(self) -> dict[WorkerId, list[Period]]:
        """When each worker was present, as far as the journal shows: during the calls in which it worked."""
        found: dict[WorkerId, list[Period]] = {worker: [] for worker in self.workers}
        for call in self.calls:
            for worker in call.workers & found.keys():
                found[worker].append((call.first, call.last))
        return {worker: united(periods) for worker, periods in found.items()}

    @cached_property
    def workers(self) -> dict[WorkerId, Worked]:
        """The workers that worked for the book's trials."""
        works: list[tuple[StateReached | ChainLost, float, float]] = [
            (charge.fact, start, charge.seconds) for start, charge in zip(self.began, self.charges, strict=True)
        ]
        works += [(waste.fact, waste.fact.began, waste.seconds) for waste in self.wastes]
        found: dict[WorkerId, Worked] = {}
        for fact, start, seconds in works:
            team = self.team(fact)
            for worker in team:
                its = found.get(worker)
                if its is None:
                    found[worker] = Worked(start, fact.at, seconds / len(team))
                    continue
                if start < its.first:
                    its.first = start
                if fact.at > its.last:
                    its.last = fact.at
                its.seconds += seconds / len(team)
        return found

    def team(self, fact: StateReached | ChainLost) -> tuple[WorkerId, ...]:
        """The workers that did the work of a fact. Slots of one worker count once."""
        chain, worker = self.account.chains.get(fact.chain), host_of(fact.worker)
        return (worker,) if chain is None or fact.workers <= 1 else (worker, *map(host_of, chain.gang))

    @cached_property
    def answered(self) -> dict[TrialId, list[int]]:
        """The targets that have a result, in order, for all trials of the plan."""
        return {id: answered_steps(trial) for id, trial in self.account.plan.trials.items()}

    @cached_property
    def alone(self) -> dict[TrialId, float]:
        """Worker seconds of each trial without sharing (:func:`hpstage.accounting.savings.seconds_alone`)."""
        plan, answered = self.account.plan, self.answered
        return {id: rounded(seconds_alone(plan, trial, answered[id])) for id, trial in self.trials.items()}

    @cached_property
    def branches(self) -> dict[NodeId, TreeBranch]:
        """The branches of the trials' tree up to the steps requested, parents before children."""
        return branches_of(self.trials)

    @cached_property
    def reach(self) -> dict[NodeId, int]:
        """The farthest step requested by the trials on each node they pass."""
        return {id: branch.reach for id, branch in self.branches.items()}

    @cached_property
    def measured(self) -> dict[NodeId, Measured]:
        """The first objective on each of the branches."""
        return measured(self.branches, self.metric, maximize=self.maximize)

    @cached_property
    def ranking(self) -> list[TreeBranch]:
        """The branches in the order in which they are to be shown: see :func:`hpstage.accounting.branches.ranking`."""
        maximize = self.maximize
        merits = {id: merit(its.value, maximize=maximize) for id, its in self.measured.items()}
        return ranking(self.branches.values(), lambda branch: merits[branch.node.id])

    @property
    def sums(self) -> Sums:
        """Steps and seconds of its trials."""
        return self.account.whole() if self.study is None else self.account.tallies[self.study].sums

    @cached_property
    def savings(self) -> Savings:
        """The cost of its trials, with and without sharing."""
        return savings_of(self.account, self.study)

    @property
    def started(self) -> SearchStarted | None:
        """The study's last search, or the latest of all studies; ``None`` if the plan was driven without a study."""
        searches = self.account.plan.searches
        found = (searches[study].started for study in self.studies if study in searches)
        return max(found, key=lambda started: started.at, default=None)

    @property
    def metric(self) -> str | None:
        """The name of the first objective."""
        return self.started.metric[0] if self.started is not None and self.started.metric else None

    @property
    def maximize(self) -> bool:
        return self.started is not None and self.started.maximize

    @cached_property
    def studies(self) -> list[str]:
        """The studies in the book, in the order in which they were added to the plan. Studies that ended without a
        trial (their first call was refused) are listed only if there are no others."""
        if self.study is not None:
            return [self.study]
        plan = self.account.plan
        with_trials = dict.fromkeys([*map(plan.study_of, plan.trials), *(one.study for one in self.rejected.values())])
        begun = (name for name, record in plan.searches.items() if not record.ended)
        return list(with_trials | dict.fromkeys(begun)) or [*plan.searches]

    @cached_property
    def values(self) -> dict[TrialId, tuple[float, ...]]:
        """The objective values of the completed trials, without trials that reported a NaN."""
        ended = self.account.plan.ended
        return {id: values for id in self.trials if id in ended and (values := ended[id].objectives) is not None}

    @cached_property
    def feasible(self) -> dict[TrialId, tuple[float, ...]]:
        """The :attr:`values` of the trials that satisfy the study's constraints."""
        ended = self.account.plan.ended
        return {id: values for id, values in self.values.items() if ended[id].feasible}

    def value_of(self, id: TrialId) -> float | None:
        """The first objective of a trial; if the trial was not completed, at its last step with a result."""
        if id in self.values:
            return self.values[id][0]
        state = self.account.plan.result_of(self.trials[id])
        value = None if state is None or state.metrics is None else state.metrics.get(self.metric or "")
        return None if value is None or not math.isfinite(value) else value

    @cached_property
    def best_first(self) -> list[TrialId]:
        """The completed trials, the feasible ones first (:func:`hpstage.plan.winners.best_first`). Empty if several
        studies or several objectives would have to be compared, or if the journal does not record the direction."""
        started = self.started
        if started is None or len(started.metric) != 1 or len(started.directions) != 1 or len(self.studies) != 1:
            return []
        return sorted(best_first(self.values, started), key=lambda id: id not in self.feasible)

    @property
    def best(self) -> TrialId | None:
        """The completed, feasible trial with the best value; of equal trials, the one with the lowest number. ``None``
        if there is none, or trials cannot be compared (see :attr:`best_first`)."""
        return next((id for id in self.best_first[:1] if id in self.feasible), None)

    @cached_property
    def front(self) -> list[TrialId]:
        """The completed, feasible trials on the Pareto front; empty if the directions are unknown, or several studies
        would have to be compared (see :attr:`best_first`)."""
        started = self.started
        if started is None or len(started.directions) != len(started.metric) or len(self.studies) != 1:
            return []
        known = {id: costs_of(started, values) for id, values in self.feasible.items()}
        costs = {id: found for id, found in known.items() if found is not None}
        kept = set(undominated(costs.values()))
        return [id for id, found in costs.items() if found in kept]

    def number(self, trial: TrialId) -> int | None:
        """Return the trial's number in its study."""
        proposed = self.account.plan.searches.proposed.get(trial)
        return None if proposed is None else proposed.number


def undominated(points: Iterable[Costs]) -> list[Costs]:
    """Return the distinct points that no other dominates, ascending.

    O(n log n) in two dimensions, else O(n * size of the result).
    """
    found: list[Costs] = []
    for point in sorted(set(points)):  # a point is preceded by all points that dominate it
        # In two dimensions, the last point found is the lowest in the second one.
        if not any(dominates(other, point) for other in (found[-1:] if len(point) == 2 else found)):
            found.append(point)
    return found


@runtime_checkable
class Searched(Protocol):
    """The outcome of a search: its facts, its name in the plan and the store's address (:class:`hpstage.Result`)."""

    @property
    def journal(self) -> Sequence[Fact]: ...

    @property
    def name(self) -> str: ...

    @property
    def checkpoints(self) -> CheckpointStore | None: ...

    @property
    def address(self) -> str: ...


def open_book(
    source: Journal | str | os.PathLike[str] | Searched,
    study: str | None = None,
    *,
    seen: Callable[[Fact], object] = lambda fact: None,
) -> Book:
    """Return the book of a plan from the current state of its journal.

    Args:
        source: an open journal; a store as for ``optimize(store=...)``, which is read and never changed, even while
            searches are running; or the result of a search.
        study: a study of the plan. Defaults to all studies, or to the study of a result.
        seen: called with each fact of the journal, in order.

    Raises:
        UsageError: the plan has no such study, or the URL names no plan.
        StoreError: the plan does not exist or cannot be read.
    """
    if isinstance(source, Searched):
        return _book_of(source, study or source.name, seen)
    with ExitStack() as closing:
        journal = source if isinstance(source, Journal) else open_journal(source, closing=closing, read_only=True)
        account = new_account(journal)
        account.catch_up(journal, seen)
        store = address_of(journal)
    checkpoints = None if isinstance(source, Journal) else _checkpoints(source, account.plan)
    return _checked(Book(account, study, checkpoints, store))


def _checkpoints(store: str | os.PathLike[str], plan: SearchPlan) -> CheckpointStore | None:
    """Return the checkpoints in the folder of a store, if they are there."""
    folder = Path(store) / "checkpoints"
    return open_checkpoints(folder, plan.workload, sweep=False) if folder.is_dir() else None


def _book_of(source: Searched, study: str, seen: Callable[[Fact], object]) -> Book:
    """Return the book of a complete journal in memory."""
    facts = source.journal
    header = facts[0]
    assert isinstance(header, PlanCreated)
    account = Account(SearchPlan(header.workload, sharing=shares(header)))
    with uncollected():
        for fact in facts:
            account.fold(fact)
            seen(fact)
    return _checked(Book(account, study, source.checkpoints, source.address))


def _checked(book: Book) -> Book:
    there = Book(book.account).studies
    if book.study is not None and book.study not in there:
        named = ", ".join(map(repr, there[:_NAMED])) or "none"
        more = f" and {len(there) - _NAMED:,} more" if len(there) > _NAMED else ""
        raise UsageError(f"the plan has no study {book.study!r}; there are: {named}{more}")
    return book
