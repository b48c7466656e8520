"""The scheduler: which chain next, on which worker, and where to keep states. Pure.

In each turn, the facts that follow from reports (``decide``) are written to the journal and folded (``fold``); then the
next claims (``propose``) are written, folded, and carried out (``carry_out``). Deciding and proposing change nothing.
Information that no other driver needs, such as which workers exist, is read directly from the reports (``note``).

Scheduling is by critical path: a free worker gets the ready stage with the longest remaining path and continues through
boundaries along it (Hippo, arXiv 2006.11972, section 4.2). A chain yields at a boundary when a longer path waits
elsewhere and no worker is idle, as in list scheduling (Kunde 1981 bounds that rule by 2 - 2/(m+1) times the optimum
on trees).
"""

from __future__ import annotations

from collections.abc import Iterable

from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainProlonged,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    ForkVerified,
    InputsRead,
    Span,
    StageFailed,
    StateKey,
    StateLost,
    StateReached,
    StateRef,
    StepsTimed,
    TargetAsked,
    TrainingEnded,
    TrialAdded,
    TrialEnded,
    WorkerId,
    to_numbers,
)
from hpstage.plan.messages import (
    AuditEnded,
    BoundaryMissed,
    BoundaryReached,
    ChainEnded,
    Instruction,
    Report,
    StartAudit,
    StartChain,
    StopAudit,
    Verify,
    WorkerJoined,
    WorkerLeft,
)
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.plan.step_times import ALONE
from hpstage.scheduler.answers import Answer, Answers
from hpstage.scheduler.audit_draw import AuditDraw
from hpstage.scheduler.audits import Audits
from hpstage.scheduler.chain_builder import ChainBuilder
from hpstage.scheduler.covers import Covers
from hpstage.scheduler.demand import Demands
from hpstage.scheduler.dispatch import Claim, Dispatch
from hpstage.scheduler.expectation import EXPECTING, Expectation
from hpstage.scheduler.gangs import Gangs
from hpstage.scheduler.orders import Due, Orders
from hpstage.scheduler.preemption import Preemption
from hpstage.scheduler.remaining import RemainingWork, remaining_work
from hpstage.scheduler.reports import Reports
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.widths import Widths
from hpstage.scheduler.workers import Workers

# The id of a plan's only driver.
_ALONE = DriverId("")


class Scheduler:
    """Schedules the chains of one plan on the workers of one executor.

    Args:
        plan: the plan folded so far.
        driver: the id of this driver on the plan; makes the ids of its chains unique.
        pool: the workers' cluster. Workers with the same id in another pool are different workers.
        checkpoint_seconds: the maximum work lost with a worker, in seconds of training.
        checkpoint_every: instead of that, the multiple of steps at which states are kept.
        verify: which forks are verified (see :mod:`hpstage.execution.verification`).
        numerics: the step backend, where the trainable leaves the choice to the search.
        widest: maximum number of workers that train a chain together.
        slots: maximum number of chains that a worker may train side by side; by default as many as it has slots.
        max_losses: number of consecutive worker deaths at the same place after which its trials fail.
        audit: whether idle workers audit, if the executor can.
        audit_seed: seed of the order of audits; by default the plan's id.
    """

    def __init__(
        self,
        plan: SearchPlan,
        *,
        driver: DriverId = _ALONE,
        pool: str = "",
        checkpoint_seconds: float = 60.0,
        checkpoint_every: int | None = None,
        verify: Verify = "off",
        numerics: str = "",
        widest: int = 1,
        slots: int | None = None,
        max_losses: int = 3,
        audit: bool = False,
        audit_seed: str | None = None,
    ) -> None:
        self._plan = plan
        self._tree = StageTree(plan)
        self.driver = driver
        self._now = 0.0  # the latest known time
        self.workers = Workers(slots)
        self.workers.set_step_times(plan.step_times or ALONE)
        self._running: dict[ChainId, Orders] = {}  # orders of this driver's chains
        self.answers = Answers(plan, self._tree, driver)
        self._builder = ChainBuilder(
            plan,
            self._tree,
            checkpoint_seconds=checkpoint_seconds if checkpoint_every is None else None,
            checkpoint_every=checkpoint_every,
            verify=verify,
            numerics=numerics,
        )
        self._preemption = Preemption(plan, self._tree, self._builder)
        self._expectation = Expectation(plan, self._tree, self._running)
        self._due = Due(self._tree, self._running)
        self.demands = Demands(plan, self._tree, self.workers, self._running, driver)
        self._covers = Covers(plan, self._tree, self.workers, driver, pool)
        self.reports = Reports(plan, self._running, self.workers, max_losses)
        self.gangs = Gangs(plan, self._tree, self._builder, self._preemption, Widths(widest))
        self._dispatch = Dispatch(
            plan, self._tree, self._builder, self._preemption, self.gangs, self.workers, self._running, driver
        )
        self.draining = False  # start and prolong no more chains
        self.leaving = False  # also end the running chains as soon as possible
        self.settled = False  # nothing has happened since the last turn
        self._narrows = False  # workers may train more chains side by side than pays, by new step times
        plan.forget(driver)  # leftovers of an earlier process with this driver id
        if not plan.drivers:
            plan.endings.forget_failures()  # failures are shared only among concurrent drivers
        self.audits: Audits | None = None
        if audit:
            draw = AuditDraw(plan, plan.id if audit_seed is None else audit_seed, numerics)
            self.audits = Audits(driver, draw)
        for other in plan.drivers:
            for state in plan.open_targets.wanted_by(other):
                self._tree.want(state.node, state.step)
        for id, chain in plan.chains.items():
            if chain.driver in plan.drivers:
                self._covers.begin(id)

    # --- deciding: changes nothing ------------------------------------------------------------------------

    def is_over(self, report: Report) -> bool:
        """Whether the report is from a chain or an audit that is no longer running, and must be ignored."""
        if isinstance(report, AuditEnded):
            return self.audits is None or self.audits.is_over(report)
        return not isinstance(report, WorkerJoined | WorkerLeft) and report.chain not in self._running

    def decide(self, report: Report) -> list[Fact]:
        """Return the facts that follow from a report, which must not be from a chain that is over. All earlier facts
        must be folded before the loss of a chain or worker is decided on."""
        if isinstance(report, AuditEnded):
            assert self.audits is not None, "audits that are not over were begun"
            return [self.audits.fact(report)]
        return self.reports.facts(report)

    def propose(self) -> list[Claim]:
        """Return claims on the next work, to be written to the journal before they are carried out."""
        if self.draining:
            return []
        if self.gangs.widths.widest > 1:
            self._due.mark_all()  # prolongations depend on gangs and on verified forks, which change at any time
        return self._dispatch.propose(self._due.chains(), self._now)

    # --- reports ------------------------------------------------------------------------------------------

    def note(self, report: Report) -> list[str]:
        """Process the part of a report that only this driver needs, after folding its facts. Return messages for the
        user."""
        self.settled = False
        match report:
            case BoundaryReached(reached):
                self.tick(reached.at)
                if reached.kept is not None:
                    return self.workers.unbench(reached.worker)
            case BoundaryMissed():
                self._missed(report)
            case ForkVerified() | InputsRead() | TrainingEnded():
                self.tick(report.at)
            case ChainEnded():
                self.tick(report.at)
                if messages := self.gangs.ended(report, self._now):
                    return messages
                if report.outcome == "cut_off":
                    return self.workers.bench(report.worker, report.message, self._now)
                if report.outcome in ("done", "stopped", "failed"):
                    return self.workers.unbench(report.worker)
            case AuditEnded():
                assert self.audits is not None, "audits that are not over were begun"
                return self.audits.note(report)
            case WorkerJoined():
                self.tick(report.at)
                self._covers.find_on(self.workers.join(report.worker))
            case WorkerLeft():
                self.tick(report.at)
                self.workers.leave(report.worker)
                self._expectation.forget(report.worker)
                self.gangs.forget(report.worker)
                if self.audits is not None:
                    self.audits.forget(report.worker)
        return []

    def tick(self, now: float) -> None:
        """Advance the time to ``now`` on the clock of the reports."""
        if now > self._now:
            self._now, self.settled = now, False

    def _missed(self, report: BoundaryMissed) -> None:
        orders = self._running.get(report.chain)
        if orders is None:
            return
        self._due.mark(orders)
        orders.marks.discard(report.step)
        orders.passed = max(orders.passed, report.position)
        if orders.end == report.step:
            orders.end = None
        cover = self._tree.branch(self._plan.nodes[report.node]).covers.get(report.chain)
        if cover is not None and cover.start < report.step <= cover.stop and report.position < cover.stop:
            self._tree.cover(report.chain, Span(report.node, report.position, cover.stop))

    # --- folding ------------------------------------------------------------------------------------------

    def fold(self, fact: Fact) -> list[Answer]:
        """Fold a fact, this driver's or another's, into the plan and all structures derived from it."""
        self.settled = False
        match fact:
            case StateReached():
                return self._reached(fact)
            case StageFailed():
                return self.answers.fail(fact)
            case TrainingEnded():
                return self.answers.end(fact)
            case TargetAsked():
                return self.answers.request(fact)
            case TrialAdded():
                self._plan.apply(fact)
                self._tree.keep(self._plan.trials[fact.trial])
            case StateLost():
                self._plan.apply(fact)
                self._tree.lost(self._plan.nodes[fact.node], fact.step)
            case ChainStarted():
                self._start(fact)
            case ChainProlonged():
                self._plan.apply(fact)
                if fact.chain in self._plan.chains:
                    self._covers.extend(fact.chain, fact.spans)
            case ChainClosed():
                if fact.chain in self._plan.chains:
                    self._covers.end(fact.chain)
                self._over(fact.chain)
                self._plan.apply(fact)
            case DriverLeft():
                self._part(fact)
            case StepsTimed():
                self._plan.apply(fact)
                self.workers.set_step_times(self._plan.step_times or ALONE)
                self._narrows = True
            case DriverJoined(driver=self.driver):
                self._covers.pool = fact.pool
                self._plan.apply(fact)
            case TrialEnded():
                self._plan.apply(fact)
                if self.audits is not None:
                    self.audits.draw.add_trial(fact.trial)
            case _:
                self._plan.apply(fact)
        return []

    def _reached(self, fact: StateReached) -> list[Answer]:
        node = self._plan.nodes[fact.node]
        state = node.ensure_state(fact.step)
        waiting = self._plan.open_targets.waiting(state)
        is_new = state.digest is None
        self._plan.apply(fact)
        if fact.kept is not None:
            self._tree.kept(node, fact.step)
            if is_new and self.audits is not None:
                self.audits.draw.add(state)
                self.audits.changed()
        if fact.chain in self._plan.chains:
            self._covers.advance(fact.chain, fact.step)
        if fact.chain in self._running:
            self._advance(self._running[fact.chain], fact)
        answers: list[Answer] = []
        if fact.metrics is not None:
            answers = self.answers.reach(state, waiting, to_numbers(fact.metrics), None)
        self._tree.evaluated(self._plan.totals.average_evaluate_seconds)
        self._tree.measured(node)
        return answers

    def _advance(self, orders: Orders, fact: StateReached) -> None:
        self._due.mark(orders)
        self.gangs.reached(orders, fact)
        if fact.kept is not None:
            self.workers[orders.chain.worker].remember(StateRef(fact.node, fact.step))
        while orders.marks and orders.marks[0] <= fact.step:
            orders.marks.pop(0)

    def _start(self, fact: ChainStarted) -> None:
        self._plan.apply(fact)
        self._covers.begin(fact.chain)
        if fact.driver != self.driver:
            return
        self._dispatch.started += 1
        orders = Orders(self._plan.chains[fact.chain], self._dispatch.started)
        self._running[fact.chain] = orders
        self.gangs.started(orders)
        self._due.mark(orders)

    def _over(self, chain: ChainId) -> None:
        orders = self._running.pop(chain, None)
        if orders is not None:
            self._expectation.ended(chain)
            self._builder.ended(orders)

    def _part(self, fact: DriverLeft) -> None:
        """End the chains of a driver that is gone, and drop states that only it wanted."""
        for id in [id for id, chain in self._plan.chains.items() if chain.driver == fact.driver]:
            self._covers.end(id)
            self._over(id)
        wanted = self._plan.open_targets.wanted_by(fact.driver)
        self._plan.apply(fact)
        for state in wanted:
            if not self._plan.open_targets.waiting(state):
                self._tree.unwant(state.node, state.step)

    # --- carrying out -------------------------------------------------------------------------------------

    def carry_out(self, claims: Iterable[Claim]) -> list[Instruction]:
        """Start and amend chains as claimed, add newly wanted steps, and set where chains yield."""
        self.settled = True
        instructions = self._dispatch.carry_out(claims)
        if self.audits is not None and self.audits.running:
            starts = [one for one in instructions if isinstance(one, StartChain)]
            taken = [worker for start in starts for worker in (start.worker, *start.chain.gang)]
            instructions = [*self.audits.make_way(taken), *instructions]
        if len(self.workers) > self.workers.hosts:
            self.workers.set_speeds(self._running.values())
        if self.leaving:
            return instructions + self._preemption.stop_all(self._running.values())
        if self._narrows:
            self._narrows = False
            surplus = [self._running[chain] for chain in self.workers.surplus() if chain in self._running]
            instructions += self._preemption.interrupt(surplus)
        able = self.workers.able(self._now)
        if self.gangs.widths.widest > 1 and self._plan.sharing and not self.draining:
            idle, waiting = self.workers.idle(self._now), min(self._tree.ready, able)
            instructions += self.gangs.regroup(list(self._running.values()), waiting, idle, able, self._now)
            self._due.mark_all()
        first = self._tree.ready_stages(EXPECTING)
        changed, amendments = self._preemption.update_ends(self._due.chains(), self._running, able, self._now)
        self._due.clear()
        instructions += amendments
        return instructions + self._expectation.update(changed, first)

    def audit(self, now: float, seconds: float | None = None) -> list[StartAudit]:
        """Start audits on workers for which there is nothing to train.

        Args:
            seconds: the maximum time that workers wait for audits, once the search has nothing left to train.
        """
        if self.audits is None:
            return []
        spare = self.audits.wanted and not (self.draining or self._tree.ready)
        return self.audits.look(self.workers.idle(now) if spare else [], now, seconds)

    def end_audits(self) -> list[StopAudit]:
        """End all audits at once."""
        return [] if self.audits is None else self.audits.stop_all()

    # --- reading ------------------------------------------------------------------------------------------

    def audit_due_at(self) -> float | None:
        """Return when :meth:`audit` should be called next; ``None`` if there is no need to."""
        return None if self.audits is None or self.draining else self.audits.due_at()

    def back_at(self) -> float | None:
        """Return when the next worker is tried again, of those benched or left out of gangs; ``None`` without any."""
        benched, left_out = self.workers.back_at(self._now), self.gangs.next_at(self._now)
        return benched if left_out is None else left_out if benched is None else min(benched, left_out)

    def source_of(self, chain: ChainId) -> StateKey | None:
        """Return the key of the state that one of this driver's chains starts from, if any."""
        orders = self._running.get(chain)
        source = None if orders is None else self._plan.source_of(orders.chain)
        return None if source is None else self._plan.key(source.node, source.step)

    @property
    def running(self) -> int:
        return len(self._running)

    def running_on(self) -> dict[ChainId, WorkerId]:
        """Return the workers of this driver's chains."""
        return {id: orders.chain.worker for id, orders in self._running.items()}

    def remaining_work(self, now: float) -> RemainingWork:
        """Estimate the remaining work of all drivers at ``now`` on the executor's clock."""
        return remaining_work(self._plan, self._tree, self._running.values(), now)

    def progress(self, now: float) -> list[tuple[OpenChain, float]]:
        """Return this driver's chains, each with the seconds of training since its last report."""
        return [(orders.chain, orders.spent(now)) for orders in self._running.values()]
