"""The account of a plan: what its journal tells beyond the plan itself, and which trial paid for what.

Every second of a worker is paid for by one trial: the one that asked first for the last of the steps that were trained.
Seconds are rounded (:func:`rounded`), so that they add up exactly however they are grouped.
"""

from __future__ import annotations

import ctypes
import gc
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from hpstage.plan.facts import (
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
    TargetAsked,
    TrialAdded,
    TrialId,
    TrialProposed,
    WorkerId,
)
from hpstage.plan.log import fold_on, read_header, shares
from hpstage.plan.nodes import Node
from hpstage.plan.plan import SearchPlan
from hpstage.store import Journal

# 2**-20 s is about a microsecond.
_PARTS = 2.0**20
# New objects that Python looks through for garbage in no time.
_MANY = 100_000
# Records that are read at a time.
_PIECE = 10_000


def rounded(seconds: float) -> float:
    """``seconds`` to the nearest multiple of 2**-20. Sums and differences of such are exact, in any order, as long as
    they stay below 2**33 s."""
    return round(seconds * _PARTS) / _PARTS


def rounded_sum(seconds: Iterable[float]) -> float:
    """The sum of :func:`rounded` seconds."""
    return sum([round(part * _PARTS) for part in seconds if part]) / _PARTS


def began(fact: StateReached) -> float:
    """When a worker began with what ``fact`` reports: ``fact.at`` is the time when all of it was done."""
    return fact.at - fact.save_seconds - fact.evaluate_seconds - fact.train_seconds - fact.load_seconds


class ChainRecord(msgspec.Struct):
    """A chain on its worker. ``ended``: when it was closed, or its driver was struck off; ``None``: it is running.

    ``outcome``: why what it trained after its last boundary was thrown away; ``None``: nothing was.
    """

    worker: WorkerId
    driver: DriverId
    began: float
    ended: float | None = None
    outcome: str | None = None


class Charge(msgspec.Struct, frozen=True):
    """What a worker reported, the trial that paid for it, and what that is in rounded seconds."""

    fact: StateReached
    trial: TrialId
    seconds: float


def charged(fact: StateReached, trial: TrialId) -> Charge:
    parts = round(fact.train_seconds * _PARTS) + round(fact.evaluate_seconds * _PARTS)
    if fact.load_seconds or fact.save_seconds:  # often neither took any time
        parts += round(fact.load_seconds * _PARTS) + round(fact.save_seconds * _PARTS)
    return Charge(fact, trial, parts / _PARTS)


class Waste(msgspec.Struct, frozen=True):
    """What a worker threw away, and the trial that paid for it."""

    fact: ChainLost
    trial: TrialId

    @property
    def seconds(self) -> float:
        return rounded(self.fact.seconds)


class Ask(msgspec.Struct, frozen=True):
    """``trial`` was asked for ``step``, farther than ever before. ``at``: the latest time on the workers' clock that
    was told of before; ``None``: there was none. The sums are the plan's, up to this."""

    trial: TrialId
    step: int
    at: float | None
    steps_asked: int
    steps_unique: int


class Account:
    """The fold of a journal for those who look on. ``apply`` takes facts in the order of the journal."""

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.used: dict[TrialId, float] = {}  # seconds of workers that each trial paid
        self.charges: list[Charge] = []
        self.wastes: list[Waste] = []
        self.asks: list[Ask] = []
        self.targeted: dict[tuple[NodeId, int], TrialId] = {}  # who asked first for a node's state at a step
        self.chains: dict[ChainId, ChainRecord] = {}
        self.proposed: dict[TrialId, TrialProposed] = {}
        self.lost: dict[StateRef, StateLost] = {}  # the latest of each state
        self.trained: dict[NodeId, int] = {}  # up to which step each node ever was
        self._now: float | None = None
        self._makers: list[TrialId] = []  # of each node, the trial that made it
        self._asked: dict[
            NodeId, tuple[list[int], list[TrialId]]
        ] = {}  # up to which step it was asked for first, by whom

    def apply(self, fact: Fact) -> None:
        _HANDLERS.get(fact.__class__, _pass_on)(self, fact)

    def _add(self, fact: TrialAdded) -> None:
        self.plan.apply(fact)
        self._makers += [fact.trial] * (len(self.plan.nodes) - len(self._makers))

    def _propose(self, fact: TrialProposed) -> None:
        self.plan.apply(fact)
        if fact.trial is not None:
            self.proposed[fact.trial] = fact

    def _start(self, fact: ChainStarted) -> None:
        self.plan.apply(fact)
        self._now = fact.at
        self.chains[fact.chain] = ChainRecord(fact.worker, fact.driver, fact.at)

    def _close(self, fact: ChainClosed) -> None:
        self.plan.apply(fact)
        self._now = fact.at
        if fact.chain in self.chains:
            self.chains[fact.chain].ended = fact.at

    def _leave(self, fact: DriverLeft) -> None:
        for id, chain in self.plan.chains.items():
            if chain.driver == fact.driver and id in self.chains:
                self.chains[id].ended = fact.at
        self.plan.apply(fact)

    def _lose(self, fact: StateLost) -> None:
        self.plan.apply(fact)
        self.lost[StateRef(fact.node, fact.step)] = fact

    def _ask(self, fact: TargetAsked) -> None:
        id, step = fact.trial, fact.step
        planned = self.plan.trials.get(id)
        before = step if planned is None else planned.asked
        gains = self.plan.ask(fact)
        if step > before:
            totals = self.plan.totals
            self.asks.append(Ask(id, step, self._now, totals.steps_asked, totals.steps_unique))
        self.targeted.setdefault((self.plan.trials[id].node_at(step).id, step), id)
        for node, stop in gains:
            asked = self._asked.get(node.id)
            if asked is None:
                self._asked[node.id] = [stop], [id]
            else:
                asked[0].append(stop)
                asked[1].append(id)

    def _payer(self, node: NodeId, step: int) -> TrialId:
        """Who asked first for the step that leads to ``step``; if nobody did, who made the node."""
        stops, trials = self._asked.get(node, ([], []))
        at = bisect_left(stops, step)
        return trials[at] if at < len(stops) else self._makers[node]

    def askers(self, node: Node, start: int, stop: int) -> Sequence[tuple[int, int, TrialId]]:
        """Who asked first for which of the steps ``[start, stop)`` of a node; those that nobody asked for are left out.
        In the order of the steps."""
        asked = self._asked.get(node.id)
        if asked is None or start >= stop:
            return ()
        stops, trials = asked
        if stop <= stops[0]:
            return ((start, stop, trials[0]),)
        found = []
        for index in range(bisect_right(stops, start), len(stops)):
            end = min(stop, stops[index])
            found.append((start, end, trials[index]))
            start = end
            if start >= stop:
                break
        return found

    def _reached(self, fact: StateReached) -> None:
        payer: TrialId | None = None
        if fact.start == fact.step and 0 <= fact.node < len(self.plan.nodes):
            # Nothing was trained: a kept state was evaluated, for the first that waits for it.
            state = self.plan.nodes[fact.node].states.get(fact.step)
            payer = next(iter(state.waiting), None) if state is not None else None
        self.plan.apply(fact)
        self._now = fact.at
        if payer is None:
            payer = self._payer(fact.node, fact.step)
        charge = charged(fact, payer)
        self.charges.append(charge)
        self._pay(payer, charge.seconds)
        if fact.step > self.trained.get(fact.node, 0):
            self.trained[fact.node] = fact.step

    def _waste(self, fact: ChainLost) -> None:
        self.plan.apply(fact)
        self._now = fact.at
        if fact.chain in self.chains:
            self.chains[fact.chain].outcome = fact.outcome
        waste = Waste(fact, self._payer(fact.node, fact.step + 1))
        self.wastes.append(waste)
        self._pay(waste.trial, waste.seconds)

    def _pay(self, trial: TrialId, seconds: float) -> None:
        self.used[trial] = self.used.get(trial, 0.0) + seconds

    def drivers(self) -> set[DriverId]:
        """Those that have started chains: one for each call of ``optimize``."""
        return {chain.driver for chain in self.chains.values()}

    def driver_of(self, chain: ChainId) -> DriverId | None:
        """``None``: the journal does not tell."""
        record = self.chains.get(chain)
        return None if record is None else record.driver

    def failures(self) -> list[StageFailed]:
        """What the user's code raised, once for each place, unless another search has come past it since."""
        latest = {(fact.node, fact.step, fact.evaluating): fact for fact in self.plan.failures}
        return [fact for fact in latest.values() if not self._is_overcome(fact)]

    def _is_overcome(self, failure: StageFailed) -> bool:
        if not failure.evaluating:
            return self.trained.get(failure.node, 0) > failure.step
        state = self.plan.nodes[failure.node].states.get(failure.step)
        return state is not None and state.metrics is not None

    def study_of(self, trial: TrialId) -> str:
        """The study that has the trial; in a plan that was driven without one, what the trial's id begins with."""
        proposed = self.proposed.get(trial)
        return proposed.study if proposed is not None else trial.rpartition("/")[0]

    def is_open(self, trial: TrialId) -> bool:
        """Is the trial of a search that goes on, and not over?"""
        record = self.plan.searches.get(self.study_of(trial))
        return record is not None and trial in record.open

    def catch_up(self, journal: Journal, seen: Callable[[Fact], object] | None = None) -> None:
        """Fold what the journal holds beyond what is folded.

        Args:
            seen: called with each fact after it was folded.

        Raises:
            HistoryChanged: the journal has lost what is folded: a new account is to be made.
            StoreError: at a record that is no fact, or contradicts those before it.
        """
        with uncollected():
            self._catch_up(journal, seen)

    def _catch_up(self, journal: Journal, seen: Callable[[Fact], object] | None) -> None:
        def fold(fact: Fact) -> None:
            self.apply(fact)
            if seen is not None:
                seen(fact)

        # In pieces: the records of a long journal need not be in memory at once.
        while fold_on(journal, self.plan, fold, _PIECE) == _PIECE:
            pass


def _pass_on(account: Account, fact: Fact) -> None:
    account.plan.apply(fact)


# By type, since a match over all of them would take as long as what is done.
_HANDLERS: dict[type, Callable[[Account, Any], None]] = {
    StateReached: Account._reached,
    TargetAsked: Account._ask,
    TrialAdded: Account._add,
    TrialProposed: Account._propose,
    ChainStarted: Account._start,
    ChainClosed: Account._close,
    ChainLost: Account._waste,
    DriverLeft: Account._leave,
    StateLost: Account._lose,
}


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it Python looks for no garbage. Nothing of an account is, and looking takes as long as all the rest."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            # What was made meanwhile is to be old: as young it would all be looked through at once. Not where somebody
            # has frozen something, which would thaw; to count that takes a while.
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def keep(held: object) -> None:
    """For a process that soon ends, and holds an account till then: neither look for garbage in it again, nor free it
    at the end. Both take seconds on a large plan.
    """
    gc.freeze()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def new_account(journal: Journal) -> Account:
    """The account of a journal's plan, with nothing folded yet. Raises :class:`StoreError` if it is none."""
    header = read_header(journal)
    return Account(SearchPlan(header.workload, sharing=shares(header)))
