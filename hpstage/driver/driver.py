"""The driver: performs the scheduler's instructions, records facts, feeds reports back. It makes no decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass

import msgspec

from hpstage.accounting.accounting import Accounting, accounted
from hpstage.checkpoints.eviction import Eviction
from hpstage.driver.differences import audited_difference, difference, explain
from hpstage.driver.driver_leases import DriverLeases
from hpstage.driver.inputs import notices
from hpstage.driver.notices import Notices
from hpstage.driver.snapshots import SnapshotWriter
from hpstage.driver.state_probe import StateProbe
from hpstage.driver.worker_timeout import WorkerTimeout
from hpstage.errors import CheckpointFull, LeaseLost, StateError
from hpstage.executor import Executor
from hpstage.plan.facts import (
    ChainId,
    DriverLeft,
    Fact,
    ForkVerified,
    StateLost,
    TargetAsked,
    TrialAdded,
    TrialId,
    WorkerId,
    WorkersChanged,
)
from hpstage.plan.log import Log, read_facts
from hpstage.plan.messages import (
    AmendChain,
    AuditEnded,
    BoundaryReached,
    ChainEnded,
    ExpectStates,
    Instruction,
    Report,
    StartAudit,
    StartChain,
    StopAudit,
    StopChain,
    WorkerJoined,
    WorkerLeft,
    host_of,
)
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.answers import Answer
from hpstage.scheduler.remaining import RemainingWork
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store.journal import NO_FENCES, Journal

logger = logging.getLogger("hpstage")

# Seconds between checks for records of other drivers, if there are any, and for finished probes.
_OTHERS = 0.02
# Seconds between checks whether other drivers are alive, and the maximum wait while something else is due.
_WATCH = 1.0
# Seconds between checks whether the caller still waits for audits.
_REST = 0.2
# Maximum number of facts that figures lag behind.
_UNACCOUNTED = 10_000
# Number of damaged or missing checkpoints that are logged.
_LOST_LOGGED = 3


@dataclass(eq=False, repr=False)
class Driver:
    """One search on one plan and one executor."""

    plan: SearchPlan
    """The plan folded from the journal."""
    scheduler: Scheduler
    """The scheduler of this plan."""
    executor: Executor
    """Opened, with its checkpoint store in use."""
    journal: InitVar[Journal]
    """Where facts are written before they are acted on."""
    _: KW_ONLY
    leases: DriverLeases | None = None
    """This driver's leases, if others may work on the plan at the same time."""
    workers: InitVar[Iterable[WorkerId]] = ()
    """Workers that an earlier driver on the executor has left idle."""
    eviction: Eviction | None = None
    """Keeps the checkpoints within their budget, and makes room if the disk is full."""
    exact: bool = True
    """Whether equal steps must give equal bits (not if the user allows kernels with unordered sums)."""
    strict: bool = True
    """Whether to refuse to build on training that any driver, earlier ones included, has found inexact."""
    probe: StateProbe | None = None
    """Reads a state that a worker could not read before the state counts as lost; if ``None``, workers are believed."""
    snapshots: SnapshotWriter | None = None
    """Writes snapshots of the plan."""

    def __post_init__(self, journal: Journal, workers: Iterable[WorkerId]) -> None:
        self.log = Log(self.plan, journal, self._fold, lambda: NO_FENCES if self.leases is None else self.leases.fences)
        self._answers: list[Answer] = []
        self._taken: list[Report] = []  # reports from the executor, not yet processed
        self._left = False
        self._lost = 0  # states whose checkpoints turned out to be damaged or missing
        self.strict &= self.exact
        self._looked = 0.0
        self._patience = WorkerTimeout(self.scheduler)
        self._notices = Notices(self.plan)
        self._accounting: Accounting | None = None  # ``None`` until figures are needed
        self._unaccounted: list[Fact] = []  # facts since figures were last needed
        self.executor.adapt(self.scheduler.demands.at)
        self._pool = self.executor.pool  # a closed executor has none
        joined = [WorkerJoined(worker, self.executor.clock()) for worker in workers]
        for fact in self._changed(joined):
            self.log.note(fact)
        for report in joined:
            self.scheduler.note(report)

    def leave(self) -> None:
        """Leave the plan, so that other drivers can train this driver's remaining work."""
        self._left = True
        self._act(self.scheduler.end_audits())
        if (notice := self.scheduler.gangs.none_formed(self.scheduler.workers.most)) is not None:
            logger.info("%s", notice)
        left = [WorkerLeft(worker, self.executor.clock(), "closed") for worker in self.scheduler.workers]
        self.log.write([*self._changed(left), DriverLeft(self.scheduler.driver, time.time(), "ended")])

    def write_snapshot(self) -> None:
        """Write a snapshot of the plan if one is due and the driver has one to write to."""
        if self.snapshots is not None:
            self.snapshots.write_if_due()

    def remove_dead_drivers(self) -> None:
        """Record drivers that are gone, so that their unfinished chains are started again."""
        others = [other for other in self.plan.drivers.values() if other.driver != self.scheduler.driver]
        for other in others:
            if self.leases is not None and self.leases.is_gone(other, self.plan.searches.identities()):
                self.log.write([DriverLeft(other.driver, time.time(), "gone")])

    def abandon(self) -> list[WorkerId]:
        """Stop running chains without writing any facts, and return the present workers, all idle."""
        self._act(self.scheduler.end_audits())
        held = set() if self.probe is None else self.probe.held
        running = {chain: worker for chain, worker in self.scheduler.running_on().items() if chain not in held}
        workers = dict.fromkeys(self.scheduler.workers)
        for chain in running:
            self.executor.stop(chain)
        reports: Iterable[Report] = self._taken
        while True:
            for report in reports:
                match report:
                    case ChainEnded(chain):
                        running.pop(chain, None)
                    case WorkerJoined(worker):
                        workers[worker] = None
                    case WorkerLeft(worker):
                        workers.pop(worker, None)
                        running = {chain: on for chain, on in running.items() if on != worker}
            if not running:
                return list(workers)
            reports = self.executor.wait(1.0)

    def add(self, trials: Sequence[TrialAdded], along: Sequence[Fact] = ()) -> None:
        """Add trials to the plan and write further facts with them. Trials already in the plan are unchanged."""
        if not self.log.requested.isdisjoint(trial.trial for trial in trials):
            self.log.write()  # earlier targets of a trial restrict how it may change
        self.log.write([*(trial for trial in trials if not self._knows(trial)), *along])

    def _knows(self, trial: TrialAdded) -> bool:
        known = self.plan.trials.get(trial.trial)
        return (
            known is not None
            and known.steps >= trial.steps
            and known.keep_at == trial.keep_at
            and known.has(trial.schedules, trial.steps)
        )

    def ask(self, trial: TrialId, step: int) -> None:
        """Request ``trial`` trained to ``step`` and evaluated; :meth:`wait` returns the answer."""
        requested_before = step in self.plan.trials[trial].targets
        if requested_before and (known := self.scheduler.answers.known(trial, step)) is not None:
            self._answers.append(known)
        else:
            # Written with the next facts: a target lost before anything was trained for it is requested again.
            self.log.note(TargetAsked(trial, step, self.scheduler.driver))

    def knows(self, trial: TrialId, step: int) -> bool:
        """Whether the result of this target is already known."""
        known = self.scheduler.answers.known(trial, step) if trial in self.plan.trials else None
        return known is not None and known.failure is None

    def remaining_work(self) -> RemainingWork:
        """Estimate the remaining work of all drivers."""
        return self.scheduler.remaining_work(self.executor.clock())

    def running(self) -> list[tuple[OpenChain, float]]:
        """Return this driver's running chains, each with the seconds of training since its last report."""
        return self.scheduler.progress(self.executor.clock())

    def idle(self) -> int:
        """Dispatch work to idle workers, and return how many have none."""
        if not self.scheduler.workers.idle(self.executor.clock()):
            return 0
        self._dispatch()
        return len(self.scheduler.workers.idle(self.executor.clock()))

    def wait(self, timeout: float | None = None) -> list[Answer]:
        """Dispatch work to idle workers and return answers. Blocks until there is a report, or for ``timeout`` seconds.

        Raises:
            StateError: training changes something that no state holds.
            CheckpointError: there was no room for a checkpoint and no other could be evicted, or no worker could use
                the checkpoints for the executor's ``worker_timeout``. All progress is kept.
            ClusterError: there were no workers for the executor's ``worker_timeout``, or the executor raised it.
        """
        if self.strict and self.plan.differences:
            raise StateError(
                f"an earlier call on this store, or another process, found that training is not exact: "
                f"{explain(self.plan.differences[-1])}. Checkpoints in this store may be wrong. Fix the cause, then "
                f'use a new store; verify="off" continues with this one anyway'
            )
        self._dispatch()
        self._act(self.scheduler.audit(self.executor.clock()))
        if len(self.plan.drivers) > 1:
            if time.monotonic() - self._looked > _WATCH:
                self._looked = time.monotonic()
                self.remove_dead_drivers()
            timeout = _OTHERS if timeout is None else min(timeout, _OTHERS)
        if self.log.noted:  # they must be written soon, even without a report
            timeout = _WATCH if timeout is None else min(timeout, _WATCH)
        if self.probe is not None and self.probe.held:
            timeout = _OTHERS if timeout is None else min(timeout, _OTHERS)
        for due_at in (self.scheduler.back_at(), self.scheduler.audit_due_at()):
            if due_at is not None:
                left = max(0.0, due_at - self.executor.clock())
                timeout = min(left, _WATCH if timeout is None else timeout)
        if self._answers:
            timeout = 0.0  # take available reports, but do not wait for more
        elif next(iter(self.plan.drivers), self.scheduler.driver) == self.scheduler.driver:  # one driver is enough
            self.write_snapshot()  # now that all workers have something to do
        self._take(self.executor.wait(timeout))
        self._dispatch()
        answers, self._answers = self._answers, []
        return answers

    def finish(self) -> None:
        """End all chains at their next steps, keeping the states of wanted chains."""
        self.scheduler.draining = self.scheduler.leaving = True
        self.scheduler.settled = False
        while self.scheduler.running:
            self.scheduler.tick(self.executor.clock())  # reports may be rare
            self._perform()
            self._take(self.executor.wait(1.0))
        self.scheduler.draining = self.scheduler.leaving = False

    def audit_rest(self, seconds: float, waiting: Callable[[], bool]) -> None:
        """Audit a segment of each regime that was not audited in idle time, now that everything is trained.

        Args:
            seconds: maximum duration. Audits that still run afterwards are stopped.
            waiting: returns whether the caller still waits; called from time to time.

        Raises:
            StateError: an audit has found a difference.
        """
        audits, clock = self.scheduler.audits, self.executor.clock
        if audits is None:
            return
        deadline = clock() + seconds
        self._act(audits.rest(clock(), seconds))
        while waiting() and (left := deadline - clock()) > 0:
            begun = self.scheduler.audit(clock(), left)
            if begun:
                logger.info("Idle workers audit what was trained, for at most %.0f s", left)
            self._act(begun)
            if not audits.running:
                break
            self._take(self.executor.wait(min(left, _REST)))
        self._act(audits.stop_all())

    def _take(self, reports: Iterable[Report]) -> None:
        full: dict[ChainId, str] = {}
        inexact: StateError | None = None
        self._taken += self._understood(reports)
        for taken in list(_batches(self._taken)):
            batch = [report for report in taken if not self.scheduler.is_over(report)]
            warnings = notices(self.plan, batch)
            facts = self._moved() if any(isinstance(report, WorkerJoined) for report in batch) else []
            for report in batch:
                facts += self.scheduler.decide(report)
                if isinstance(report, BoundaryReached) and self.scheduler.reports.differs(report.reached):
                    assert report.reached.kept is not None
                    names = [] if self.probe is None else self.probe.names(report.reached.kept.key)
                    facts.append(differs := difference(read_facts(self.log.journal), report.reached, names))
                    if self.exact:
                        inexact = StateError(explain(differs))
                if isinstance(report, AuditEnded) and report.outcome == "differs":
                    assert self.scheduler.audits is not None, "audits that are not over were begun"
                    audit = self.scheduler.audits.running[report.audit].audit
                    facts.append(differs := audited_difference(read_facts(self.log.journal), audit, report))
                    inexact = StateError(explain(differs))
                if isinstance(report, ChainEnded) and report.outcome == "full":
                    full[report.chain] = report.message
                if isinstance(report, ForkVerified) and report.difference is not None:
                    inexact = StateError(report.difference)
            self.log.write([*facts, *self._changed(batch)])
            for warning in warnings:
                logger.warning("%s", warning)
            self._warn_of_lost(facts)
            for report in batch:
                for notice in (*self.scheduler.note(report), *self._notices.of(report)):
                    logger.warning("%s", notice)
                if isinstance(report, WorkerJoined | WorkerLeft):
                    self._patience.workers_changed()
            del self._taken[: len(taken)]
        if inexact is not None:
            raise inexact
        if full and not (self.eviction is not None and self.eviction.make_room(self.log, full)):
            raise CheckpointFull(next(iter(full.values())))
        self._patience.check(self.executor.worker_timeout)

    def _warn_of_lost(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            if isinstance(fact, StateLost):
                self._lost += 1
                if self._lost <= _LOST_LOGGED:
                    rest = " Further ones are not logged." if self._lost == _LOST_LOGGED else ""
                    logger.warning(
                        "The checkpoint of a state cannot be used: %s. Its steps are trained again.%s",
                        fact.message.rstrip("."),
                        rest,
                    )

    def _understood(self, reports: Iterable[Report]) -> Iterator[Report]:
        """Yield reports, holding back that of an unreadable state until the probe has found the cause."""
        for report in reports:
            if self.probe is not None and isinstance(report, ChainEnded) and report.outcome == "unreadable":
                key = self.scheduler.source_of(report.chain)
                if key is not None:
                    self.probe.hold(report, key)
                    continue
            yield report
        if self.probe is not None:
            yield from self.probe.decided()

    def _moved(self) -> list[Fact]:
        """Return the fact for other drivers if the workers now belong to another cluster than before."""
        self._pool = self.executor.pool
        me = self.plan.drivers.get(self.scheduler.driver)
        if me is None or me.pool == self._pool:
            return []
        return [msgspec.structs.replace(me, pool=self._pool, at=time.time())]

    def _changed(self, reports: Iterable[Report]) -> Iterator[Fact]:
        """Yield the facts of workers that joined and left. The slots of a worker count as one worker."""
        times: dict[float, tuple[list[WorkerId], list[WorkerId]]] = {}
        for report in reports:
            if isinstance(report, WorkerJoined | WorkerLeft) and report.worker == host_of(report.worker):
                times.setdefault(report.at, ([], []))[isinstance(report, WorkerLeft)].append(report.worker)
        for at, (joined, left) in times.items():
            yield WorkersChanged(self.scheduler.driver, at, self._pool, tuple(joined), tuple(left))

    def _dispatch(self) -> None:
        """Start and stop training as the scheduler proposes, and free the space for the states that it will publish."""
        self._perform()
        if self.eviction is not None:
            self.eviction.enforce(self.log)

    def _perform(self) -> None:
        if self.log.requested:
            self.log.write()
        else:  # other noted facts affect no claim, and are written with the next facts
            self.log.catch_up()
        if self.scheduler.back_at() is not None:
            self.scheduler.tick(self.executor.clock())
        if self.scheduler.settled:
            return
        # If two drivers claim the same work, the second one finds the other's claim and proposes again.
        while not self.log.commit(claims := self.scheduler.propose()):
            pass
        if self.eviction is not None:
            self.eviction.wait_for_conflicts(self.plan)
        self._act(self.scheduler.carry_out(claims))

    def _act(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartChain():
                    self.executor.start(instruction.worker, instruction.chain)
                case AmendChain():
                    self.executor.amend(instruction.amendment)
                case StopChain():
                    self.executor.stop(instruction.chain, keep=instruction.keep)
                case ExpectStates():
                    self.executor.expect(instruction.worker, instruction.keys)
                case StartAudit():
                    self.executor.audit(instruction.worker, instruction.audit)
                case StopAudit():
                    self.executor.stop_audit(instruction.audit)

    def _fold(self, fact: Fact) -> None:
        if isinstance(fact, DriverLeft) and fact.driver == self.scheduler.driver and not self._left:
            raise LeaseLost([f"driver/{fact.driver}"])  # its targets are no longer trained
        self._answers += self.scheduler.fold(fact)
        if self._accounting is not None:
            self._unaccounted.append(fact)
            if len(self._unaccounted) > _UNACCOUNTED:
                _ = self.accounting

    @property
    def accounting(self) -> Accounting:
        """The tables of the plan's figures. Facts that they lag behind are applied first."""
        if self._accounting is None:
            self._accounting = accounted(self.plan, self.log.journal)
        for fact in self._unaccounted:
            self._accounting.apply(fact)
        self._unaccounted.clear()
        return self._accounting


def _batches(reports: Iterable[Report]) -> Iterator[list[Report]]:
    """Yield batches of reports to decide on together.

    A report that loses a chain or a state is a batch of its own: the decision depends on the reports before it.
    """
    batch: list[Report] = []
    for report in reports:
        loses = isinstance(report, WorkerLeft) or (
            isinstance(report, ChainEnded) and report.outcome in ("lost", "unreadable")
        )
        if loses:
            yield batch
            batch = []
        batch.append(report)
        if loses:
            yield batch
            batch = []
    yield batch
