"""The driver: performs the scheduler's instructions, remembers facts, feeds reports back. It decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from hpstage.checkpoints.eviction import Eviction
from hpstage.driver.differences import difference, explain
from hpstage.driver.inquest import Inquest
from hpstage.driver.lease_keeper import Presence
from hpstage.errors import (
    CheckpointFull,
    CheckpointUnreachable,
    ClusterError,
    LeaseLost,
    StateError,
)
from hpstage.executor import Executor
from hpstage.plan.facts import ChainId, DriverLeft, Fact, ForkVerified, StateReached, TrialAdded, TrialId, WorkerId
from hpstage.plan.log import encode, fold_on, read_facts
from hpstage.plan.messages import AmendChain, ChainEnded, Report, StartChain, StopChain, WorkerJoined, WorkerLeft
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.remaining import Outlook
from hpstage.scheduler.scheduler import Answer, Scheduler
from hpstage.store.journal import Journal

logger = logging.getLogger("hpstage")

# Seconds between two looks at what other drivers have written, where there are others, and at what is being read.
_OTHERS = 0.02
# Seconds between two looks whether they are still there, and at most for which benched workers alone are waited for.
_WATCH = 1.0


class Driver:
    """One search on one plan and one executor.

    Args:
        plan: as folded from the journal.
        scheduler: made for this plan.
        executor: opened, with its checkpoint store in use.
        journal: where facts go before anyone acts on them.
        presence: this driver's, where others may work on the plan at the same time.
        workers: those that an earlier driver on the executor has left idle.
        eviction: what keeps the checkpoints within their budget, and makes room where the disk is full.
        exact: whether equal steps must give equal bits (not so where the user allows kernels that add in any order).
        strict: whether nothing is built on what anybody, earlier ones included, has found not to be exact.
        inquest: what looks for itself before a state is written off; without it workers are believed.
    """

    def __init__(
        self,
        plan: SearchPlan,
        scheduler: Scheduler,
        executor: Executor,
        journal: Journal,
        *,
        presence: Presence | None = None,
        workers: Iterable[WorkerId] = (),
        eviction: Eviction | None = None,
        exact: bool = True,
        strict: bool = True,
        inquest: Inquest | None = None,
    ) -> None:
        self.plan = plan
        self.scheduler = scheduler
        self._executor = executor
        self._journal = journal
        self._answers: list[Answer] = []
        self._unwritten: list[Fact] = []
        self._presence = presence
        self._eviction = eviction
        self._exact = exact
        self._strict = exact and strict
        self._inquest = inquest
        self._looked = 0.0
        self._alone_since: float | None = None
        self._cut_off_since: float | None = None
        for worker in workers:
            scheduler.handle(WorkerJoined(worker, executor.clock()))

    def leave(self) -> None:
        """Let the others have what this driver was about to train."""
        self.remember([DriverLeft(self.scheduler.driver, time.time(), "ended")])

    def bury(self) -> None:
        """Say of those drivers that are gone that they are, so that what they had begun is begun anew."""
        others = [other for other in self.plan.drivers.values() if other.driver != self.scheduler.driver]
        for other in others:
            if self._presence is not None and self._presence.is_gone(other, self.plan.studies()):
                self.remember([DriverLeft(other.driver, time.time(), "gone")])

    def abandon(self) -> list[WorkerId]:
        """Stop what runs and write nothing of it; returns the workers that are there, all idle."""
        held = set() if self._inquest is None else self._inquest.held
        # Those that are not claimed were never started: the claim is what failed.
        running = {
            chain: worker
            for chain, worker in self.scheduler.running_on().items()
            if chain in self.plan.chains and chain not in held
        }
        workers = dict.fromkeys(self.scheduler.workers)
        for chain in running:
            self._executor.stop(chain)
        while running:
            for report in self._executor.wait(1.0):
                match report:
                    case ChainEnded(chain):
                        running.pop(chain, None)
                    case WorkerJoined(worker):
                        workers[worker] = None
                    case WorkerLeft(worker):
                        workers.pop(worker, None)
                        running = {chain: on for chain, on in running.items() if on != worker}
        return list(workers)

    def add(self, trials: Sequence[TrialAdded], along: Sequence[Fact] = ()) -> None:
        """Add trials to the plan, and remember further facts with them; those that are there stay as they are."""
        for trial in trials:
            self.plan.check(trial)
        self.remember([*(trial for trial in trials if not self._knows(trial)), *along])

    def remember(self, facts: Sequence[Fact]) -> None:
        """Write facts to the journal and fold them."""
        self._record(facts)
        for fact in facts:
            self._answers += self.scheduler.learn(fact)

    def note(self, fact: Fact) -> None:
        """Fold a fact that is written with whatever comes next."""
        self._unwritten.append(fact)
        self._answers += self.scheduler.learn(fact)

    def commit(self, facts: Sequence[Fact]) -> bool:
        """Write facts and fold them, if all that was written before is folded; else fold that, and return False."""
        if not self._append(facts):
            self._catch_up()
            return False
        for fact in facts:
            self._answers += self.scheduler.learn(fact)
        return True

    def _knows(self, trial: TrialAdded) -> bool:
        known = self.plan.trials.get(trial.trial)
        return known is not None and known.steps >= trial.steps and dict(known.schedules) == dict(trial.schedules)

    def ask(self, trial: TrialId, step: int) -> None:
        """Have ``trial`` trained to ``step`` and evaluated; :meth:`wait` brings the answer."""
        decision = self.scheduler.ask(trial, step)
        # Written with whatever comes next: an ask that is lost before anything was trained for it is asked again.
        self._unwritten += decision.facts
        self._answers += decision.answers

    def knows(self, trial: TrialId, step: int) -> bool:
        """Are the metrics of this target known already?"""
        planned = self.plan.trials.get(trial)
        state = None if planned is None else planned.node_at(step).states.get(step)
        return state is not None and state.metrics is not None

    def outlook(self) -> Outlook:
        """What is left of what anybody asked for, now."""
        return self.scheduler.outlook(self._executor.clock())

    def drop(self, trial: TrialId) -> None:
        """Nobody waits for the trial any more."""
        self.scheduler.drop(trial)

    def wait(self, timeout: float | None = None) -> list[Answer]:
        """Set idle workers to work and return answers; blocks until something happens, or for ``timeout`` seconds.

        Raises:
            StateError: training changes something that no state holds.
            CheckpointError: there was no room for a checkpoint, and no other could go for it; or no worker could use
                the checkpoints for the executor's ``worker_timeout``. What was reached before is kept.
            ClusterError: there have been no workers for the executor's ``worker_timeout``, or the executor says so.
        """
        if self._strict and self.plan.differences:
            raise StateError(
                f"training was found not to be exact by an earlier call on this store, or by another process: "
                f"{explain(self.plan.differences[-1])}. What the store keeps is not to be built on: once that is "
                f'mended, choose another store; verify="off" goes on with this one'
            )
        self._perform()
        if len(self.plan.drivers) > 1:
            if time.monotonic() - self._looked > _WATCH:
                self._looked = time.monotonic()
                self.bury()
            timeout = _OTHERS if timeout is None else min(timeout, _OTHERS)
        if self._inquest is not None and self._inquest.held:
            timeout = _OTHERS if timeout is None else min(timeout, _OTHERS)
        back_at = self.scheduler.back_at()
        if back_at is not None:
            left = max(0.0, back_at - self._executor.clock())
            timeout = min(left, _WATCH if timeout is None else timeout)
        if self._answers:
            timeout = 0.0  # reports that are there come along, but nobody waits for more
        self._take(self._executor.wait(timeout))
        if self._eviction is not None:
            self._eviction.keep(self)
        self._perform()
        answers, self._answers = self._answers, []
        return answers

    def drain(self) -> None:
        """Start no chain from now on; those that run go on."""
        self.scheduler.draining = True

    def finish(self) -> None:
        """End what runs at its next step; what somebody waits for with its state kept there."""
        self.scheduler.draining = self.scheduler.leaving = True
        while self.scheduler.running:
            self.scheduler.tick(self._executor.clock())  # reports may be rare
            self._perform()
            self._take(self._executor.wait(1.0))
        self.scheduler.draining = self.scheduler.leaving = False

    def _take(self, reports: Iterable[Report]) -> None:
        facts: list[Fact] = []
        answers: list[Answer] = []
        full: dict[ChainId, str] = {}
        inexact: StateError | None = None
        for report in self._understood(reports):
            if isinstance(report, WorkerJoined):
                moved = self._moved()
                facts += moved
                for fact in moved:
                    answers += self.scheduler.learn(fact)
            decision = self.scheduler.handle(report)
            facts += decision.facts
            answers += decision.answers
            for reached in decision.different:
                differs = difference(read_facts(self._journal), reached, self._names(reached))
                facts.append(differs)
                answers += self.scheduler.learn(differs)
                if self._exact:
                    inexact = StateError(explain(differs))
            for notice in decision.notices:
                logger.warning("%s", notice)
            if isinstance(report, ChainEnded) and report.outcome == "full":
                full[report.chain] = report.message
            if isinstance(report, ForkVerified) and report.difference is not None:
                inexact = StateError(report.difference)
            if isinstance(report, WorkerJoined | WorkerLeft):
                self._alone_since = None if self.scheduler.workers else time.monotonic()
        self._record(facts)
        self._answers += answers
        if inexact is not None:
            raise inexact
        if full and not (self._eviction is not None and self._eviction.make_room(self, full)):
            raise CheckpointFull(next(iter(full.values())))
        patience = self._executor.worker_timeout
        trouble = self.scheduler.trouble()
        if trouble is None:
            self._cut_off_since = None
        elif self._cut_off_since is None:
            self._cut_off_since = time.monotonic()
        elif time.monotonic() - self._cut_off_since > patience and not self.scheduler.running:
            raise CheckpointUnreachable(
                f"no worker has been able to use the checkpoints for {patience:.0f} s ({trouble}); mend that and run "
                f"the same command again: nothing that was reached is lost"
            )
        if self._alone_since is not None and time.monotonic() - self._alone_since > patience:
            raise ClusterError(
                f"all workers have been gone for {patience:.0f} s; start workers and run the same command again: "
                f"nothing that was reached is lost"
            )

    def _understood(self, reports: Iterable[Report]) -> Iterator[Report]:
        """Reports as they are to be understood; of a state that a worker could not read, once it is clear whose fault
        that is."""
        for report in reports:
            if self._inquest is not None and isinstance(report, ChainEnded) and report.outcome == "unreadable":
                key = self.scheduler.source_of(report.chain)
                if key is not None:
                    self._inquest.hold(report, key)
                    continue
            yield report
        if self._inquest is not None:
            yield from self._inquest.decided()

    def _names(self, reached: StateReached) -> list[str]:
        """Names of the leaves of a state."""
        assert reached.kept is not None
        return [] if self._inquest is None else self._inquest.names(reached.kept.key)

    def _moved(self) -> list[Fact]:
        """What the others are to know when the workers belong to another cluster than before."""
        me = self.plan.drivers.get(self.scheduler.driver)
        if me is None or me.pool == self._executor.pool:
            return []
        return [msgspec.structs.replace(me, pool=self._executor.pool, at=time.time())]

    def _perform(self) -> None:
        self._catch_up()
        if self.scheduler.back_at() is not None:
            self.scheduler.tick(self._executor.clock())
        instructions = self.scheduler.schedule()
        # What is begun is claimed first, by a record that is written only if nothing is unknown here: of two drivers
        # that would begin the same, one finds the other's claim.
        while not self._append(claims := self.scheduler.claims(instructions)):
            self._catch_up()
            instructions = self.scheduler.without_clashes(instructions)
        for fact in claims:
            self._answers += self.scheduler.learn(fact)
        if self._eviction is not None:
            self._eviction.clear_the_way(self.plan)
        for instruction in instructions:
            match instruction:
                case StartChain():
                    self._executor.start(instruction.worker, instruction.chain)
                case AmendChain():
                    self._executor.amend(instruction.amendment)
                case StopChain():
                    self._executor.stop(instruction.chain, keep=instruction.keep)

    def _record(self, facts: Sequence[Fact]) -> None:
        """Write facts that hold whatever others have written meanwhile, which is folded first."""
        while not self._append(facts):
            self._catch_up()

    def _append(self, facts: Sequence[Fact]) -> bool:
        """Write facts, unless there is something in the journal that is not folded yet."""
        records = [encode(fact) for fact in (*self._unwritten, *facts)]
        if records:
            fences = {} if self._presence is None else self._presence.fences
            if self._journal.append(records, expect=self.plan.cursor, fences=fences) is None:
                return False
            self.plan.cursor = self.plan.cursor.after(records)
            self._unwritten.clear()
        return True

    def _catch_up(self) -> None:
        """Fold what other drivers have written."""
        fold_on(self._journal, self.plan, self._learn)

    def _learn(self, fact: Fact) -> None:
        if isinstance(fact, DriverLeft) and fact.driver == self.scheduler.driver:
            raise LeaseLost([f"driver/{fact.driver}"])  # what it wants, nobody trains any more
        self._answers += self.scheduler.learn(fact)
