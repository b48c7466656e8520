"""The scheduler: which chain next, on which worker, and where to keep states. Pure.

``ask`` and ``handle`` take what happened and return what follows (:class:`Decision`); ``schedule`` then hands ready
chains to idle workers. The rule is the critical path's: a free worker gets the head with the longest remaining
way and runs on through boundaries along it (Hippo, arXiv 2006.11972, section 4.2). A chain yields at a boundary
when a longer way waits elsewhere and no worker is idle, as a list scheduler would (Kunde 1981 bounds that rule by
2 - 2/(m+1) times the optimum on trees).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from hpstage.errors import ClusterError, InternalError
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainLost,
    ChainOutcome,
    ChainProlonged,
    ChainStarted,
    Departure,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    ForkVerified,
    Span,
    StageFailed,
    StateKey,
    StateLost,
    StateReached,
    StateRef,
    TargetAsked,
    TrialId,
    UserFailure,
    WorkerId,
    to_numbers,
)
from hpstage.plan.invariants import validate
from hpstage.plan.messages import (
    AmendChain,
    BoundaryMissed,
    BoundaryReached,
    ChainEnded,
    Instruction,
    Report,
    Stage,
    StartChain,
    Verify,
    WorkerJoined,
    WorkerLeft,
)
from hpstage.plan.nodes import Node, State
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.chains import Layer, RunningChain
from hpstage.scheduler.dispatch import Dispatch
from hpstage.scheduler.foreign_chains import Others
from hpstage.scheduler.poison import poisoned
from hpstage.scheduler.preemption import Yielding
from hpstage.scheduler.remaining import Outlook, look_out
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.workers import Worker

# The driver of a plan that no other works on.
_ALONE = DriverId("")


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a target: its metrics, or the failure that keeps it from being reached."""

    trial: TrialId
    step: int
    metrics: dict[str, float] | None
    failure: UserFailure | None = None


@dataclass(slots=True)
class Decision:
    """What follows from an event: facts to remember first, then answers to give. ``notices``: what people are told.
    ``different``: states that had been kept before, as others than they are now."""

    facts: list[Fact] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    different: list[StateReached] = field(default_factory=list)


class Scheduler:
    """Decides what runs where, for one plan and the workers of one executor.

    Args:
        plan: the plan, as folded so far.
        driver: this driver among those of the plan; makes the ids of its chains unique.
        pool: the workers' cluster; workers of the same id in another pool are others.
        checkpoint_seconds: bounds the work that the loss of a worker can cost, in seconds of training.
        checkpoint_every: in place of that, the multiple of steps at which states are kept.
        verify: which forks are verified (see :mod:`hpstage.execution.verification`).
        max_losses: workers that may die at the same place before its trials fail.
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
        max_losses: int = 3,
    ) -> None:
        self._plan = plan
        self._tree = StageTree(plan)
        self.driver = driver
        self._max_losses = max_losses
        self._now = 0.0  # the latest time that was told
        self._workers: dict[WorkerId, Worker] = {}
        self._running: dict[ChainId, RunningChain] = {}
        layer = Layer(
            plan,
            self._tree,
            checkpoint_seconds=checkpoint_seconds,
            checkpoint_every=checkpoint_every,
            verify=verify,
            running=self._running,
        )
        self._yielding = Yielding(plan, self._tree, layer)
        self._others = Others(plan, self._tree, self._workers, self._running, pool)
        self._dispatch = Dispatch(
            plan, self._tree, layer, self._yielding, driver, self._workers, self._running, verify != "off"
        )
        self.most_workers = 0
        self.draining = False  # no chain is started or prolonged any more
        self.leaving = False  # and those that run end as soon as can be
        plan.forget(driver)  # what an earlier life of this driver left
        if not plan.drivers:
            plan.failed.clear()  # nor does anybody know of it any more
        for id, chain in plan.chains.items():
            if chain.driver in plan.drivers:
                self._others.occupy(id)
        for other in plan.drivers:
            for state in plan.wanted_by(other):
                self._tree.want(state.node, state.step)

    # --- what users of the plan want ----------------------------------------------------------------------

    def ask(self, trial: TrialId, step: int) -> Decision:
        """``trial`` is to be trained to ``step`` and evaluated. Answers at once what is known already."""
        state = self._plan.target(trial, step)
        decision = Decision()
        failure = self._plan.failure_on(trial, step)
        known = state.metrics is not None or failure is not None
        if step not in self._plan.trials[trial].targets or not (known or state.waiting.get(trial) == self.driver):
            self._learn(TargetAsked(trial, step, self.driver), decision)
        if state.metrics is not None:
            decision.answers.append(Answer(trial, step, state.metrics))
        elif failure is not None:
            decision.answers.append(Answer(trial, step, None, failure))
        return decision

    def drop(self, trial: TrialId) -> None:
        """This driver does not wait for the trial any more; what nobody else wants is not trained."""
        planned = self._plan.trials[trial]
        for node in planned.path:
            for state in node.states.values():
                if state.waiting.get(trial) == self.driver:
                    del state.waiting[trial]
                    if not state.waiting:
                        self._tree.unwant(node, state.step)

    # --- what happened ------------------------------------------------------------------------------------

    def handle(self, report: Report) -> Decision:
        """Take a report in. Reports of chains that are not running any more (zombies) change nothing."""
        decision = Decision()
        match report:
            case BoundaryReached(reached):
                self.tick(reached.at)
            case ForkVerified() | ChainEnded() | WorkerJoined() | WorkerLeft():
                self.tick(report.at)
        match report:
            case BoundaryReached(reached, failure):
                self._boundary(reached, failure, decision)
            case BoundaryMissed():
                self._missed(report)
            case ForkVerified():
                if report.chain in self._running:
                    self._learn(report, decision)
            case ChainEnded():
                self._ended(report, decision)
            case WorkerJoined():
                if report.worker in self._workers:
                    raise InternalError(f"worker {report.worker} joined twice")
                worker = self._workers[report.worker] = Worker(report.worker)
                self._others.find_on(worker)
                self.most_workers = max(self.most_workers, len(self._workers))
            case WorkerLeft():
                gone = self._workers.pop(report.worker, None)
                if gone is not None and gone.chain is not None:
                    self._lose(gone.chain, report.at, decision, report.reason, report.message)
        return decision

    def tick(self, now: float) -> None:
        """It is ``now``, on the clock of reports."""
        self._now = max(self._now, now)

    def _boundary(self, reached: StateReached, failure: UserFailure | None, decision: Decision) -> None:
        if reached.chain not in self._running:
            return
        node = self._plan.nodes[reached.node]
        if reached.kept is not None:
            if reached.kept.key != self._plan.key(node, reached.step):
                raise ClusterError(other_values(reached.worker, node, reached.step))
            self._unbench(reached.worker, decision)
        known = self._plan.touch(node, reached.step).digest
        self._learn(reached, decision)
        if reached.kept is not None and known not in (None, reached.kept.digest):
            decision.different.append(reached)
        if reached.metrics is None and failure is not None:
            self._learn(StageFailed(node=node.id, step=reached.step, evaluating=True, failure=failure), decision)

    def _learn(self, fact: Fact, decision: Decision) -> None:
        decision.facts.append(fact)
        decision.answers += self.learn(fact)

    # --- what is known ------------------------------------------------------------------------------------

    def learn(self, fact: Fact) -> list[Answer]:
        """Fold a fact, this driver's or another's, into the plan and all that is derived from it."""
        match fact:
            case StateReached():
                return self._reached(fact)
            case StageFailed():
                return self._fail(fact)
            case TargetAsked():
                self._plan.apply(fact)
                state = self._plan.target(fact.trial, fact.step)
                if fact.trial in state.waiting:
                    self._tree.want(state.node, fact.step)
            case StateLost():
                self._plan.apply(fact)
                self._tree.lost(self._plan.nodes[fact.node], fact.step)
            case ChainStarted():
                self._plan.apply(fact)
                if fact.chain not in self._running:
                    self._others.occupy(fact.chain)
            case ChainProlonged():
                self._plan.apply(fact)
                if fact.chain not in self._running and fact.chain in self._plan.chains:
                    self._others.cover(fact.chain, fact.spans)
            case ChainClosed():
                if fact.chain not in self._running:
                    self._others.vacate(fact.chain)
                self._plan.apply(fact)
            case DriverLeft():
                self._part(fact)
            case DriverJoined(driver=self.driver):
                self._others.pool = fact.pool
                self._plan.apply(fact)
            case _:
                self._plan.apply(fact)
        return []

    def _reached(self, fact: StateReached) -> list[Answer]:
        node = self._plan.nodes[fact.node]
        state = self._plan.touch(node, fact.step)
        waiting = dict(state.waiting)
        self._plan.apply(fact)
        chain = self._running.get(fact.chain)
        if chain is not None:
            self._advance(chain, fact)
        elif fact.chain in self._plan.chains:
            self._others.advance(fact.chain, fact)
        if fact.kept is not None:
            self._tree.kept(node, fact.step)
        answers: list[Answer] = []
        if fact.metrics is not None:
            answers = self._answer(state, waiting, to_numbers(fact.metrics), None)
        totals = self._plan.totals
        if totals.evaluations:
            self._tree.evaluate_seconds = totals.evaluate_seconds / totals.evaluations
        self._tree.measured(node)
        return answers

    def _advance(self, chain: RunningChain, fact: StateReached) -> None:
        before, now = chain.leg_at(chain.at), chain.leg_at(fact.step)
        chain.at, chain.since = fact.step, fact.at
        if fact.kept is not None:
            chain.kept = fact.step
            self._workers[chain.worker].remember(StateRef(fact.node, fact.step))
            self._tree.kept(self._plan.nodes[fact.node], fact.step)
        while chain.marks and chain.marks[0] <= fact.step:
            chain.marks.pop(0)
        for leg in chain.legs[before:now]:
            self._tree.uncover(leg.line.node, chain.id)
        node, stop = chain.legs[now].line.node, chain.legs[now].stop
        if fact.step < stop:
            self._tree.cover(node, chain.id, fact.step, stop)
        else:
            self._tree.uncover(node, chain.id)

    def _answer(
        self,
        state: State,
        waiting: Mapping[TrialId, DriverId],
        metrics: dict[str, float] | None,
        failure: UserFailure | None,
    ) -> list[Answer]:
        """What this driver's trials, among those that waited for the state, are told."""
        self._tree.unwant(state.node, state.step)
        mine = (trial for trial, driver in waiting.items() if driver == self.driver)
        return [Answer(trial, state.step, metrics, failure) for trial in mine]

    def _fail(self, fact: StageFailed) -> list[Answer]:
        """The user's code raised. In training: every state beyond is out of reach."""
        out_of_reach = [(state, dict(state.waiting)) for state in self._plan.beyond(fact) if state.waiting]
        self._plan.apply(fact)
        return [
            answer for state, waiting in out_of_reach for answer in self._answer(state, waiting, None, fact.failure)
        ]

    def _part(self, fact: DriverLeft) -> None:
        """A driver is gone: its chains are over, and what only it wanted is not."""
        for id in [id for id, chain in self._plan.chains.items() if chain.driver == fact.driver]:
            if id not in self._running:
                self._others.vacate(id)
        wanted = self._plan.wanted_by(fact.driver)
        self._plan.apply(fact)
        for state in wanted:
            if not state.waiting:
                self._tree.unwant(state.node, state.step)

    # --- ends ---------------------------------------------------------------------------------------------

    def _missed(self, report: BoundaryMissed) -> None:
        chain = self._running.get(report.chain)
        if chain is None:
            return
        chain.marks.discard(report.step)
        chain.passed = max(chain.passed, report.position)
        if chain.end == report.step:
            chain.end = None
        line = self._tree.line(self._plan.nodes[report.node])
        cover = self._tree.cover_of(line, report.step)
        if cover is not None and cover.chain == chain.id and report.position < cover.stop:
            self._tree.cover(line.node, chain.id, report.position, cover.stop)

    def _ended(self, report: ChainEnded, decision: Decision) -> None:
        chain = self._running.get(report.chain)
        if chain is None:
            return
        if report.outcome == "lost":
            self._lose(chain, report.at, decision, "lost", report.message)
            return
        node = self._plan.nodes[report.node] if report.node is not None else chain.line_at(chain.at).node
        if report.wasted_steps or report.wasted_seconds:
            self._learn(
                ChainLost(
                    chain=chain.id,
                    worker=report.worker,
                    node=node.id,
                    step=chain.at if report.step is None else report.step,
                    at=report.at,
                    outcome=report.outcome,
                    seconds=report.wasted_seconds,
                    steps=report.wasted_steps,
                ),
                decision,
            )
        if report.outcome == "cut_off":
            self._bench(report, decision)
        elif report.outcome in ("done", "stopped", "failed"):
            self._unbench(report.worker, decision)
        if report.outcome == "unreadable" and chain.source is not None:
            source = self._plan.nodes[chain.source.node]
            state = source.states.get(chain.source.step)
            if state is not None and state.kept is not None:
                lost = StateLost(chain.source.node, chain.source.step, "unreadable", report.message)
                self._learn(lost, decision)
                self._close(chain, report.at, decision)
                return
        self._close(chain, report.at, decision)
        if report.outcome == "failed":
            assert report.failure is not None and report.step is not None
            failed = StageFailed(node=node.id, step=report.step, evaluating=False, failure=report.failure)
            self._learn(failed, decision)

    def _bench(self, report: ChainEnded, decision: Decision) -> None:
        worker = self._workers[report.worker]
        known = worker.trouble
        seconds = worker.bench(report.message, self._now)
        if known != report.message:
            decision.notices.append(
                f"Worker {worker.id} cannot use the checkpoints: {report.message}. It is given no work for "
                f"{seconds:.0f} s, then tried again and again; nothing is lost by it."
            )

    def _unbench(self, id: WorkerId, decision: Decision) -> None:
        worker = self._workers[id]
        if worker.benched:
            worker.unbench()
            decision.notices.append(f"Worker {id} can use the checkpoints again.")

    def _close(self, chain: RunningChain, at: float, decision: Decision) -> None:
        self._retire(chain)
        self._learn(ChainClosed(chain.id, at), decision)

    def _lose(
        self, chain: RunningChain, at: float, decision: Decision, how: ChainOutcome | Departure, message: str
    ) -> None:
        """The worker vanished under the chain. What lies behind the last boundary is trained again."""
        step = chain.kept
        node = chain.line_at(min(step + 1, chain.legs[-1].stop)).node  # that is to be trained from there
        self._close(chain, at, decision)
        seconds = max(0.0, at - chain.since)
        lost = ChainLost(
            chain=chain.id,
            worker=chain.worker,
            node=node.id,
            step=step,
            at=at,
            outcome=how,
            seconds=seconds,
            steps=0,
            message=message,
        )
        self._learn(lost, decision)
        losses = self._plan.losses.get(StateRef(node.id, step), [])
        if len(losses) >= self._max_losses:
            failure = poisoned(node, step, losses)
            self._learn(StageFailed(node=node.id, step=step, evaluating=False, failure=failure), decision)

    def _retire(self, chain: RunningChain) -> None:
        """The chain is over: its worker is free and what it covered is open again."""
        del self._running[chain.id]
        worker = self._workers.get(chain.worker)  # none: it left
        if worker is not None:
            worker.chain = None
        for leg in reversed(chain.legs):
            self._tree.uncover(leg.line.node, chain.id)

    # --- what to do ---------------------------------------------------------------------------------------

    def schedule(self) -> list[Instruction]:
        """Amend running chains by what is new, hand ready heads to idle workers, and set where chains yield."""
        instructions = self._dispatch.amend_running(prolong=not self.draining)
        if not self.draining:
            instructions += self._dispatch.assign(self._now)
        running = list(self._running.values())
        if self.leaving:
            instructions += self._yielding.part(running)
        else:
            able = sum(worker.back_at <= self._now for worker in self._workers.values())
            instructions += self._yielding.settle(running, able, self._now)
        return instructions

    @property
    def workers(self) -> list[WorkerId]:
        return list(self._workers)

    def back_at(self) -> float | None:
        """When the next benched worker is tried again; ``None`` if none is benched."""
        return min((worker.back_at for worker in self._workers.values() if worker.back_at > self._now), default=None)

    def trouble(self) -> str | None:
        """Why no worker can use the checkpoints, if none can."""
        troubles = [worker.trouble for worker in self._workers.values() if worker.benched]
        return troubles[0] if troubles and len(troubles) == len(self._workers) else None

    def source_of(self, chain: ChainId) -> StateKey | None:
        """The key of the state that one of this driver's chains starts from."""
        running = self._running.get(chain)
        if running is None or running.source is None:
            return None
        return self._plan.key(self._plan.nodes[running.source.node], running.source.step)

    @property
    def running(self) -> int:
        return len(self._running)

    def running_on(self) -> dict[ChainId, WorkerId]:
        """The workers of this driver's chains."""
        return {chain.id: chain.worker for chain in self._running.values()}

    def outlook(self, now: float) -> Outlook:
        """What is left of what anybody asked for, ``now`` on the executor's clock."""
        return look_out(self._plan, self._tree, self._running.values(), now)

    def idle(self) -> bool:
        """Is nothing running and nothing wanted?"""
        return not self._running and self._tree.is_done()

    def claims(self, instructions: Iterable[Instruction]) -> list[Fact]:
        """What other drivers must know before these are performed."""
        facts: list[Fact] = []
        for instruction in instructions:
            match instruction:
                case StartChain(worker, chain):
                    spans = _spans(chain.stages)
                    facts.append(ChainStarted(chain.id, self.driver, worker, spans, self._now))
                case AmendChain(amendment) if amendment.stages:
                    facts.append(ChainProlonged(amendment.chain, _spans(amendment.stages)))
        return facts

    def without_clashes(self, instructions: Iterable[Instruction]) -> list[Instruction]:
        """Take back starts, not yet claimed, of what another driver has begun, or from what it evicted, meanwhile."""
        left: list[Instruction] = []
        for instruction in instructions:
            if isinstance(instruction, StartChain):
                chain = self._running[instruction.chain.id]
                worker = self._workers[chain.worker]
                if (
                    worker.other is not None
                    or self._has_lost(chain)
                    or any(self._others.have(leg) for leg in chain.legs)
                ):
                    self._retire(chain)
                    continue
            left.append(instruction)
        return left

    def _has_lost(self, chain: RunningChain) -> bool:
        """Is what the chain was to start from kept no more?"""
        if chain.source is None:
            return False
        return self._plan.nodes[chain.source.node].states[chain.source.step].kept is None

    def validate(self) -> None:
        """Assert every cross-collection invariant. For tests: O(plan)."""
        validate(self._plan)
        self._tree.validate()
        for worker in self._workers.values():
            assert worker.chain is None or self._running[worker.chain.id] is worker.chain
        for chain in self._running.values():
            assert list(chain.marks) == sorted(set(chain.marks))
            assert all(chain.at <= mark <= chain.legs[-1].stop for mark in chain.marks)
            assert chain.kept <= chain.at
            for a, b in pairwise(chain.legs):
                assert b.line.node.parent is a.line.node and b.start == a.stop
        covers: dict[tuple[int, str], int] = {}
        for node in self._plan.nodes:
            for cover in self._tree.line(node).covers:
                known = cover.chain in self._running or cover.chain in self._plan.chains
                assert known, f"node {node.id} is covered by {cover.chain}, which is over"
                covers.setdefault((node.id, cover.chain), 0)
                covers[node.id, cover.chain] += 1
        assert all(count == 1 for count in covers.values())


def other_values(worker: WorkerId, node: Node, step: int) -> str:
    names = ", ".join(node.names[index] for index in node.varying) or ", ".join(node.names)
    return (
        f"worker {worker} names the state at step {step} otherwise than this process: the values that the two compute "
        f"for {names} differ, as they may where their C libraries do; run the search where the workers run, from the "
        f"same image. Nothing that was reached is lost"
    )


def _spans(stages: Iterable[Stage]) -> tuple[Span, ...]:
    return tuple(Span(stage.node, stage.start, stage.stop) for stage in stages)
