"""Which facts follow from a worker's report; they are folded once written. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from hpstage.errors import ClusterError, InternalError
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainLost,
    ChainOutcome,
    Departure,
    Fact,
    ForkVerified,
    InputsRead,
    StageFailed,
    StateLost,
    StateReached,
    StepsTimed,
    TrainingEnded,
    WorkerId,
)
from hpstage.plan.messages import (
    BoundaryMissed,
    BoundaryReached,
    ChainEnded,
    ChainReport,
    StepsMeasured,
    WorkerJoined,
    WorkerLeft,
)
from hpstage.plan.nodes import Node
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.lost_workers import facts_of_loss
from hpstage.scheduler.workers import Worker

# Wasted seconds up to which no record is written: a chain that was trained to its end wastes only the time of reading
# clocks, which counts as idle.
_NOTHING = 1e-3


@dataclass(eq=False, repr=False)
class Reports:
    """Interprets reports against the current plan and its running chains."""

    plan: SearchPlan
    running: Container[ChainId]  # the ids of the driver's chains
    workers: Mapping[WorkerId, Worker]
    max_losses: int  # number of consecutive deaths on the path from one state after which its trials fail

    def facts(self, report: ChainReport | WorkerJoined | WorkerLeft) -> list[Fact]:
        """Return the facts that follow from a report, which must not be from a chain that is over."""
        match report:
            case BoundaryReached():
                return self._boundary(report)
            case ForkVerified() | InputsRead() | TrainingEnded():
                return [report]
            case StepsMeasured(_, _, seconds, at):
                known = self.plan.step_times  # another worker may have reported them first
                return [StepsTimed(seconds, at)] if known is None or seconds[-1][0] > known.widest else []
            case ChainEnded(chain, worker, outcome, at):
                if outcome == "lost":
                    return self._lost(chain, worker, at, outcome, report.message)
                return self._ended(self.plan.chains[chain], report)
            case WorkerLeft(id, at, reason, message):
                gone = self.workers.get(id)
                if gone is None or gone.chain is None or gone.chain not in self.running:
                    return []
                if self.plan.chains[gone.chain].worker != id:
                    return []  # a further worker of a gang: the loss of the chain is reported as well
                return self._lost(gone.chain, id, at, reason, message)
            case BoundaryMissed() | WorkerJoined():
                return []

    def differs(self, reached: StateReached) -> bool:
        """Whether the state was kept before with different content."""
        state = self.plan.nodes[reached.node].state(reached.step)
        known = None if state is None else state.digest
        return known is not None and reached.kept is not None and known != reached.kept.digest

    def _boundary(self, report: BoundaryReached) -> list[Fact]:
        reached = report.reached
        node = self.plan.nodes[reached.node]
        if reached.kept is not None and reached.kept.key != self.plan.key(node, reached.step):
            raise ClusterError(_other_values(reached.worker, node, reached.step))
        facts: list[Fact] = [reached] if report.ending is None else [reached, report.ending]
        if reached.metrics is None and report.failure is not None:
            facts.append(StageFailed(node=node.id, step=reached.step, evaluating=True, failure=report.failure))
        return facts

    def _ended(self, chain: OpenChain, report: ChainEnded) -> list[Fact]:
        facts: list[Fact] = []
        if report.wasted_steps or report.wasted_seconds > _NOTHING:
            if report.node is None or report.step is None:
                raise InternalError(f"chain {chain.id} reports wasted steps, but not where")
            facts.append(
                ChainLost(
                    chain=chain.id,
                    worker=report.worker,
                    node=report.node,
                    step=report.step,
                    at=report.at,
                    outcome=report.outcome,
                    seconds=report.wasted_seconds,
                    steps=report.wasted_steps,
                    workers=len(chain.workers),
                )
            )
        source = self.plan.source_of(chain)
        if report.outcome == "unreadable" and source is not None and source.kept is not None:
            facts.append(StateLost(source.node.id, source.step, "unreadable", report.message))
        facts.append(ChainClosed(chain.id, report.at))
        if report.outcome == "failed":
            if report.node is None or report.step is None or report.failure is None:
                raise InternalError(f"chain {chain.id} reports a failure, but not where")
            failed = StageFailed(node=report.node, step=report.step, evaluating=False, failure=report.failure)
            facts.append(failed)
        return facts

    def _lost(
        self, chain: ChainId, worker: WorkerId, at: float, how: ChainOutcome | Departure, message: str
    ) -> list[Fact]:
        return facts_of_loss(
            self.plan, self.plan.chains[chain], worker, at=at, how=how, message=message, max_losses=self.max_losses
        )


def _other_values(worker: WorkerId, node: Node, step: int) -> str:
    names = ", ".join(node.names[index] for index in node.varying) or ", ".join(node.names)
    return (
        f"worker {worker} computes another key for the state at step {step} than this process: their values of {names} "
        f"differ, which happens if their C libraries differ. Run the search where the workers run, from the same "
        f"image; all progress is kept"
    )
