"""Dispatching work: ready stages go to idle workers as chains, newly wanted steps to the chains that pass them. Pure.

A claim is first proposed, which changes nothing; it is carried out once it is in the journal and folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpstage.errors import InternalError
from hpstage.plan.facts import ChainId, ChainProlonged, ChainStarted, DriverId, Span, StateRef
from hpstage.plan.messages import AmendChain, Amendment, Boundary, Instruction, Stage, StartChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.branches import Branch
from hpstage.scheduler.chain_builder import ChainBuilder
from hpstage.scheduler.expectation import source_of
from hpstage.scheduler.gangs import Gangs, Start
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.preemption import Preemption
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.workers import Worker, Workers

# Number of ready stages considered in search of one whose source the idle worker holds live.
_CONSIDERED = 8

Claim = ChainStarted | ChainProlonged
"""A fact that must be in the journal before it is carried out, so that other drivers know it."""


@dataclass(eq=False, repr=False)
class Dispatch:
    """Starts ready stages of the ``tree`` on idle ``workers``, as chains that the ``builder`` builds, and amends chains
    that are running."""

    plan: SearchPlan
    tree: StageTree
    builder: ChainBuilder
    preemption: Preemption  # estimates the cost of switching to another branch
    gangs: Gangs  # which workers train a chain together
    workers: Workers  # of the driver's executor
    running: Mapping[ChainId, Orders]  # the orders of the driver's chains
    driver: DriverId  # makes the ids of chains unique
    started: int = 0  # number of this driver's chains

    @property
    def _times_first(self) -> bool:
        """Whether chains report their first step: only if more than their order depends on the time of a step."""
        needed = self.builder.checkpoint_seconds is not None or self.gangs.widths.widest > 1
        return needed and not self.plan.totals.steps_trained

    # --- proposing: changes nothing -----------------------------------------------------------------------

    def propose(self, due: Iterable[Orders], now: float) -> list[Claim]:
        """Propose prolongations of running chains, and ready stages for idle workers, the longest remaining path first.

        Claims proposed together do not overlap: training to a state begins at the last source before it, and work
        beyond the end of a chain waits for that chain.

        Args:
            due: the running chains that may have to be prolonged.
        """
        claims: list[Claim] = []
        for orders in due:
            if not orders.stopping and (spans := self.builder.prolongation(orders)):
                claims.append(ChainProlonged(orders.chain.id, spans))
        idle = self.workers.idle(now) if self.tree.ready else []
        ready = self.tree.ready_stages(_CONSIDERED + len(idle) - 1) if idle else []
        starts = list(self._assign(idle, ready))
        gangs = self.gangs.form(starts, idle, now)
        for number, (start, gang) in enumerate(zip(starts, gangs, strict=True), self.started + 1):
            _, worker, branch, step = start
            spans = self.builder.path(branch, step)
            if not spans:
                raise InternalError(f"a ready stage without a path: step {step} of node {branch.node.id}")
            if gang:
                spans = self.builder.for_gang(spans)
            id = ChainId(f"{self.driver or 'chain'}-{number}")
            claims.append(ChainStarted(id, self.driver, worker.id, spans, now, gang))
        return claims

    def _assign(self, idle: Iterable[Worker], ready: list[tuple[float, Branch, int]]) -> Iterable[Start]:
        idle = [worker for worker in idle if not self._is_suspect(self.workers.last_chain(worker.host))]
        while idle and ready:
            chosen = 0
            seconds, branch, step = ready[0]
            if StateRef(branch.node.id, step) in self.plan.losses:
                # A worker has died in training from this state, and no worker has trained beyond it since. The stage
                # needs a worker without other chains, so that none of these is blamed if the worker dies. If there is
                # no such worker, the one with the fewest chains gets no more until its chains have ended.
                alone = idle[0]
                ready.pop(0)
                idle = [worker for worker in idle if worker.host != alone.host]
                if not alone.others:
                    yield seconds, alone, branch, step
                continue
            # Prefer a worker that holds the source live, but only among those with as few other chains.
            worker, source = idle[0], source_of(branch, step)
            if source is not None:
                worker = next((one for one in idle if source in one.live and one.others == worker.others), worker)
            if len(idle) == 1:
                enough = seconds - self.preemption.switch_seconds()
                for index, (other, its_branch, its_step) in enumerate(ready[:_CONSIDERED]):
                    if other < enough:
                        break
                    if source_of(its_branch, its_step) in worker.live:
                        chosen = index
                        break
            idle.remove(worker)
            seconds, branch, step = ready.pop(chosen)
            yield seconds, worker, branch, step

    def _is_suspect(self, chain: ChainId | None) -> bool:
        running = None if chain is None else self.plan.chains.get(chain)
        return running is not None and running.begins_again in self.plan.losses

    # --- carrying out -------------------------------------------------------------------------------------

    def carry_out(self, claims: Iterable[Claim]) -> list[Instruction]:
        """Start and prolong chains as claimed, and add newly wanted steps to the running chains that pass them."""
        prolonged = {claim.chain: claim.spans for claim in claims if isinstance(claim, ChainProlonged)}
        started = [claim for claim in claims if isinstance(claim, ChainStarted)]
        # New chains already include the wanted steps on their path.
        starts = [
            StartChain(claim.worker, self.builder.begin(self.running[claim.chain], time_first=self._times_first))
            for claim in started
        ]
        return [*starts, *self._amend(prolonged)]

    def _amend(self, prolonged: Mapping[ChainId, tuple[Span, ...]]) -> list[Instruction]:
        fresh, self.tree.fresh = self.tree.fresh, []
        touched: dict[ChainId, tuple[list[Stage], list[Boundary]]] = {}
        for branch, step in fresh:
            wanted = branch.wanted.at(step)
            passing = next((id for id, span in branch.covers.items() if span.start < step <= span.stop), None)
            if passing is None or (wanted is None and step not in branch.node.keep_at):
                continue
            orders = self.running.get(passing)
            if orders is None or orders.stopping:
                # The chain is another driver's, which sees the wanted step too; or the step is open again once it ends.
                continue
            if step not in orders.marks:
                orders.marks.add(step)
            elif wanted is None or not wanted.evaluate or step in orders.evaluated:
                continue  # the state is kept there anyway
            boundary = self.builder.boundary_at(branch, step)
            if boundary.evaluate:
                orders.evaluated.add(step)
            touched.setdefault(passing, ([], []))[1].append(boundary)
        for id, spans in prolonged.items():
            stages, boundaries = self.builder.build(self.running[id], spans)
            entry = touched.setdefault(id, ([], []))
            entry[0].extend(stages)
            entry[1].extend(boundaries)
        return [
            AmendChain(Amendment(id, tuple(stages), tuple(boundaries), self.running[id].end_ref))
            for id, (stages, boundaries) in touched.items()
        ]
