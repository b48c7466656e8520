"""Accounting: folds a journal into the tables from which all figures are computed (:mod:`hpstage.accounting`). Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hpstage.accounting.audits import AuditFigures
from hpstage.accounting.payments import Charge, Waste
from hpstage.accounting.presence import Presence
from hpstage.accounting.sums import Sums, summed
from hpstage.accounting.tally import NodeRow, Tally
from hpstage.plan.endings import Endings
from hpstage.plan.facts import (
    Audited,
    ChainClosed,
    ChainId,
    ChainLost,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    NodeId,
    SearchStarted,
    StageFailed,
    StateReached,
    TargetAsked,
    TrainingEnded,
    TrialEnded,
    TrialId,
    TrialProposed,
    WorkerId,
    WorkersChanged,
)
from hpstage.plan.log import PIECE, facts_of
from hpstage.plan.messages import host_of
from hpstage.plan.nodes import Node, PlannedTrial, branches_beyond
from hpstage.plan.plan import SearchPlan
from hpstage.plan.uncollected import uncollected
from hpstage.scheduler.widths import Widths
from hpstage.store import Journal


@dataclass(slots=True)
class TrialRow:
    """The steps requested of a trial, those with results, and the cost charged to it."""

    study: str
    tally: Tally = field(repr=False)
    """The sums of its study."""
    targets: tuple[int, ...] = ()
    """Steps requested, in ascending order."""
    requested: int = 0
    """The farthest of them, or the earlier step at which its training ended."""
    answered: int = 0
    """The farthest target with a result."""
    fresh: int = 0
    """Number of steps that no trial had requested before."""
    charged_seconds: float = 0.0
    """Worker seconds charged to it, rounded."""

    @property
    def shared(self) -> int:
        """Number of the trial's steps that another trial had requested before."""
        return self.requested - self.fresh


@dataclass(slots=True)
class Request:
    """A state that trials have requested, or that was evaluated.

    ``first``: the first trial that requested it. ``waiting``: the trials still without a result, in order.
    """

    first: TrialId | None = None
    waiting: list[TrialId] | None = None
    evaluated: bool = False


@dataclass(slots=True)
class Call:
    """A driver's workers and its period of work, from the start of its first stage to its last report. Each call of
    ``optimize`` has its own driver."""

    first: float
    last: float
    workers: set[WorkerId] = field(default_factory=set)


class Accounting:
    """The tables of a plan's figures.

    Facts must be passed to ``apply`` in the order of the journal, each after it was folded into the plan.
    """

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.position = 0
        """Number of the journal's records that are folded."""
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)  # by study
        self.trials: dict[TrialId, TrialRow] = {}  # those with requested steps or charged seconds
        self.nodes: dict[NodeId, NodeRow] = {}
        self.requests: defaultdict[tuple[NodeId, int], Request] = defaultdict(Request)
        self.presence = Presence()
        self.calls: dict[DriverId, Call] = {}
        self.audits = AuditFigures()
        self.widths = Widths()  # as measured by gangs
        self.widest = 1  # number of workers that have trained a chain together
        self._endings = Endings()
        self._pools: dict[DriverId, str] = {}
        self._open: dict[ChainId, tuple[DriverId, tuple[WorkerId, ...]]] = {}  # drivers and workers of running chains
        self._closed: tuple[ChainId, DriverId, tuple[WorkerId, ...]] | None = None  # the last one: its loss may follow
        # The latest exceptions of the user's code, by node, step and whether it was evaluating, until a later search
        # gets past them.
        self._failures: dict[NodeId, dict[tuple[int, bool], StageFailed]] = {}

    # --- folding ------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> Charge | Waste | None:
        """Fold a fact and return the payment that results from it, if any."""
        handler = self.HANDLERS.get(fact.__class__)
        return None if handler is None else handler(self, fact)

    def follow(self, journal: Journal, seen: Callable[[Fact], object] = lambda fact: None) -> None:
        """Fold the records of the journal that are folded into the plan, calling ``seen`` with each fact."""
        with uncollected():
            while self.position < self.plan.position:  # in pieces: a long journal need not be in memory at once
                records = journal.read(self.position, min(PIECE, self.plan.position - self.position))
                for fact in facts_of(records, self.position):
                    self.apply(fact)
                    seen(fact)
                self.position += len(records)

    def _ask(self, fact: TargetAsked) -> None:
        """Account for a target. The first trial to request a step of a node is charged for it. O(segments)."""
        planned, row = self.plan.trials[fact.trial], self.trial(fact.trial)
        self.presence.serve(fact.driver, row.study)
        ending = self._endings.ending(planned, fact.step)
        step = fact.step if ending is None else ending.last
        if step > row.requested:
            self._ask_first(planned, row, step)
        if ending is not None and ending.outcome == "pruned":
            return  # a pruned trial has no value there
        if step in row.targets:
            return  # a resumed call requests again
        row.targets = tuple(sorted((*row.targets, step)))
        request = self.requests[planned.node_at(step).id, step]
        if request.first is None:
            request.first = planned.id
        if request.evaluated:
            self._answer(planned, row, step)
        elif request.waiting is None:
            request.waiting = [planned.id]
        else:
            request.waiting.append(planned.id)

    def _ask_first(self, planned: PlannedTrial, row: TrialRow, step: int) -> None:
        """Account for steps that were not requested of the trial before."""
        tally = row.tally
        tally.sums.steps_asked += step - row.requested
        row.requested = step
        fresh = unique = 0
        stop = step
        node: Node | None = planned.node_at(step)
        while node is not None:
            start, its = node.start, self.node(node)
            known = tally.reach.get(node.id, start)
            if known >= stop:
                break  # and so were all steps above it
            tally.reach[node.id] = stop
            unique += stop - known
            if stop > its.reach:
                fresh += stop - its.reach
                its.ask(planned, stop)
            stop, node = start, node.parent
        tally.sums.steps_unique += unique
        tally.sums.steps_first += fresh
        row.fresh += fresh

    def _answer(self, planned: PlannedTrial, row: TrialRow, step: int) -> None:
        """Count an answered target, once per target. O(segments)."""
        tally, before = row.tally, row.answered
        tally.sums.answers += 1
        if step <= before:
            return
        row.answered = step
        for node, start, stop in planned.path_to(step):
            if stop > before:
                its = self.node(node)
                pace = its.seconds / its.trained if its.trained else self._pace(node)
                tally.answer(its, stop - max(start, before), pace)

    def _reached(self, fact: StateReached) -> Charge:
        self.presence.advance(fact.at)
        row = self.nodes.get(fact.node) or self.node(self.plan.nodes[fact.node])
        request = self.requests.get((fact.node, fact.step))
        waiting = None if request is None else request.waiting
        if waiting and (fact.start == fact.step or fact.step <= row.front):  # only evaluated, or trained again for that
            payer = self.plan.trials[waiting[0]]
        else:
            payer = row.payer(fact.step)
        if row.trained:
            for tally in self.tallies.values():
                tally.repace(row, fact)
        row.trained += fact.step - fact.start
        row.seconds += fact.own_seconds
        own = self.trial(payer.id)
        if fact.step > row.front:
            row.front = fact.step
            own.tally.sums.stages_done += row.complete()
        seconds = own.tally.sums.reach(fact)
        own.charged_seconds += seconds
        if fact.metrics is not None:
            if request is None:
                request = self.requests[fact.node, fact.step]
            request.evaluated, request.waiting = True, None
            for trial in waiting or ():
                self._answer(self.plan.trials[trial], self.trials[trial], fact.step)
        if fact.workers > 1:
            self.widths.learn(fact)
            self.widest = max(self.widest, int(fact.workers))
        if fact.node in self._failures:
            self._overcome(fact.node)
        self._work(fact)
        return Charge(fact, payer.id, seconds)

    def _waste(self, fact: ChainLost) -> Waste:
        self.presence.advance(fact.at)
        payer = self.node(self.plan.nodes[fact.node]).payer(fact.step + 1)
        own = self.trial(payer.id)
        seconds = own.tally.sums.waste(fact)
        own.charged_seconds += seconds
        self._work(fact)
        return Waste(fact, payer.id, seconds)

    def _work(self, fact: StateReached | ChainLost) -> None:
        """Extend the period of work of a chain's driver."""
        found = self._open.get(fact.chain)
        if found is not None:
            driver, team = found
        elif self._closed is not None and self._closed[0] == fact.chain:
            _, driver, team = self._closed
        else:  # the journal does not record its start
            driver, team = DriverId(""), (host_of(fact.worker),)
            self.presence.work(driver, "", team, fact.began)
        call = self.calls.get(driver)
        if call is None:
            call = self.calls[driver] = Call(fact.began, fact.at)
        elif (began := fact.began) < call.first:
            call.first = began
        if fact.at > call.last:
            call.last = fact.at
        if fact.workers > 1:
            call.workers.update(team)
        else:
            call.workers.add(team[0])

    def _end(self, fact: TrainingEnded) -> None:
        """Withdraw the steps requested beyond the end of training, as would happen without sharing."""
        ended_on = self.plan.nodes[fact.node]
        self._endings.end(fact, ended_on.state(fact.last))
        ended: dict[TrialId, None] = {}
        beyond = list(branches_beyond(ended_on, fact.step, fact.last))
        for node, last in beyond:
            for step in sorted(step for step in node.states if step > last):
                request = self.requests.get((node.id, step))
                if request is not None and request.waiting:
                    ended |= dict.fromkeys(request.waiting)
                    request.waiting = None
        for node, last in beyond:
            row = self.nodes.get(node.id)
            if row is None:
                continue
            for start, stop, requester in row.first_requests(last, row.reach):
                its = self.trial(requester.id)
                its.fresh -= stop - start
                its.tally.sums.steps_first -= stop - start
            for tally in self.tallies.values():
                tally.retract(node.id, last)
            row.reach = min(row.reach, last)
            if row.complete():
                self.trial(row.payer(row.reach).id).tally.sums.stages_done += 1
        for trial in ended:
            planned, own = self.plan.trials[trial], self.trials[trial]
            own.tally.sums.steps_asked += fact.last - own.requested
            own.requested = fact.last
            own.targets = tuple([step for step in own.targets if step <= fact.last])
            request = self.requests[fact.node, fact.last]
            if request.first is None:
                request.first = trial
            if fact.outcome == "complete" and fact.last not in own.targets:
                own.targets += (fact.last,)
                self._answer(planned, own, fact.last)

    def _start(self, fact: ChainStarted) -> None:
        workers = (fact.worker, *fact.gang)
        self.presence.work(fact.driver, self._pools.get(fact.driver, ""), workers, fact.at)
        self._open[fact.chain] = fact.driver, tuple(map(host_of, workers))

    def _close(self, fact: ChainClosed) -> None:
        self.presence.advance(fact.at)
        if fact.chain in self._open:
            self._closed = (fact.chain, *self._open.pop(fact.chain))

    def _join(self, fact: DriverJoined) -> None:
        self._pools[fact.driver] = fact.pool

    def _leave(self, fact: DriverLeft) -> None:
        self.presence.end(fact.driver)
        self._pools.pop(fact.driver, None)
        self._open = {id: chain for id, chain in self._open.items() if chain[0] != fact.driver}

    def _begin(self, fact: SearchStarted) -> None:
        tally = self.tallies[fact.study]
        tally.before = tally.sums.since(Sums())
        tally.allocated_before = self.presence.seconds(fact.study)
        tally.drivers_before = frozenset(self.presence.drivers_of(fact.study))

    def _propose(self, fact: TrialProposed) -> None:
        if fact.trial is not None:
            self.tallies[fact.study].end(fact.trial, None if fact.rejected is None else "REJECTED")

    def _finish(self, fact: TrialEnded) -> None:
        tally = self.tallies[fact.study]
        if tally.ends.get(fact.trial) != "REJECTED":
            tally.end(fact.trial, fact.state)

    def _audit(self, fact: Audited) -> None:
        self.presence.advance(fact.at)
        self.audits.add(fact, self.plan)

    def _fail(self, fact: StageFailed) -> None:
        self._failures.setdefault(fact.node, {})[fact.step, fact.evaluating] = fact
        self._overcome(fact.node)

    def _overcome(self, node: NodeId) -> None:
        """Drop the failures of a node that a search has got past."""
        left = {place: failed for place, failed in self._failures[node].items() if not self._is_overcome(failed)}
        if left:
            self._failures[node] = left
        else:
            del self._failures[node]

    def _is_overcome(self, failure: StageFailed) -> bool:
        if not failure.evaluating:
            return self.front(failure.node) > failure.step
        request = self.requests.get((failure.node, failure.step))
        return request is not None and request.evaluated

    # Dispatched by type, since a match statement would take as long as the handlers.
    HANDLERS: ClassVar[Mapping[type, Callable[[Any, Any], Charge | Waste | None]]] = {
        TargetAsked: _ask,
        StateReached: _reached,
        ChainStarted: _start,
        ChainClosed: _close,
        ChainLost: _waste,
        TrainingEnded: _end,
        DriverJoined: _join,
        DriverLeft: _leave,
        WorkersChanged: lambda self, fact: self.presence.change(fact),
        SearchStarted: _begin,
        TrialProposed: _propose,
        TrialEnded: _finish,
        StageFailed: _fail,
        Audited: _audit,
    }

    # --- rows ---------------------------------------------------------------------------------------------

    def trial(self, id: TrialId) -> TrialRow:
        """Return the row of a trial, creating it if needed."""
        row = self.trials.get(id)
        if row is None:
            study = self.plan.study_of(id)
            row = self.trials[id] = TrialRow(study, self.tallies[study])
        return row

    def node(self, node: Node) -> NodeRow:
        row = self.nodes.get(node.id)
        if row is None:
            row = self.nodes[node.id] = NodeRow(node)
        return row

    # --- figures ------------------------------------------------------------------------------------------

    def whole(self) -> Sums:
        """Return the sums of all studies. O(studies)."""
        return summed(tally.sums for tally in self.tallies.values())

    def alone_seconds(self, study: str | None = None) -> float:
        """Estimate the worker seconds for the results of a study, or of all studies, without sharing. O(studies)."""
        tallies = self.tallies.values() if study is None else (self.tallies[study],)
        evaluate_seconds = self.plan.totals.average_evaluate_seconds
        return sum([tally.sums.alone_seconds(evaluate_seconds) for tally in tallies])

    def saved_seconds(self, study: str | None = None) -> float:
        """Estimate the worker seconds that a study, or the plan, has saved. Negative where loading and losses outweigh
        sharing."""
        used = self.whole() if study is None else self.tallies[study].sums
        return self.alone_seconds(study) - used.worker_seconds

    def requested_nodes(self) -> int:
        """Return the number of nodes with requested steps."""
        return sum([row.reach > row.node.start for row in self.nodes.values()])

    def front(self, node: NodeId) -> int:
        """Return the farthest step that a node has ever reached; 0: none."""
        row = self.nodes.get(node)
        return 0 if row is None else row.front

    def trained_to(self, node: Node) -> int:
        """Return the step up to which a node is trained; training covers a node from its start, without gaps."""
        return self.front(node.id) or node.start

    def first_requests(self, node: Node, start: int, stop: int) -> Iterator[tuple[int, int, PlannedTrial]]:
        """Yield ``(start, stop, trial)`` for steps of a node, in order: ``trial`` was the first to request them."""
        row = self.nodes.get(node.id)
        if row is not None:
            yield from row.first_requests(start, stop)

    def shared_until(self, trial: PlannedTrial, step: int) -> tuple[int, float]:
        """Return the number of a trial's steps up to ``step`` that another trial had requested first, and their
        estimated worker seconds."""
        steps, seconds = 0, 0.0
        for node, start, stop in trial.path_to(min(step, trial.requested)):
            requesters = self.first_requests(node, start, stop)
            count = sum([end - begin for begin, end, requester in requesters if requester is not trial])
            steps += count
            seconds += count * self.plan.step_seconds(node)
        return steps, seconds

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

    def failed_on(self, node: NodeId, reach: int) -> list[StageFailed]:
        """Return the exceptions on the path of a trial that requests a node up to step ``reach``."""
        places = self._failures.get(node, {}).items()
        return [failed for (step, evaluating), failed in places if step < reach or (evaluating and step == reach)]

    def _pace(self, node: Node) -> float:
        """Return a node's seconds per step: measured, or its nearest measured ancestor's, or else the average."""
        at: Node | None = node
        while at is not None:
            row = self.nodes.get(at.id)
            if row is not None and row.trained:
                return row.seconds / row.trained
            at = at.parent
        return self.plan.totals.average_step_seconds


def accounted(plan: SearchPlan, journal: Journal) -> Accounting:
    """Return the tables of a plan, from the records of its journal that are folded into it."""
    found = Accounting(plan)
    found.follow(journal)
    return found
