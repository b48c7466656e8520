"""Gangs: which workers train a chain together, and when chains continue with more workers, or with fewer. Pure.

A chain's workers never change while it runs. To widen or narrow it, it is ended where its state is kept; its ready
stage is then open again, and :class:`~hpstage.scheduler.dispatch.Dispatch` starts it with the workers that are free by
then. Workers that did not meet are left out for a while, and if none meets, no more gangs are formed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpstage.plan.facts import ChainId, StateReached, StateRef, WorkerId
from hpstage.plan.messages import ChainEnded, Instruction, StopChain
from hpstage.plan.nodes import Node
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.branches import Branch
from hpstage.scheduler.chain_builder import ChainBuilder
from hpstage.scheduler.expectation import source_of
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.preemption import WORTH, Preemption
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.widths import Widths
from hpstage.scheduler.workers import Worker

# Initial and maximum seconds for which workers that did not meet are left out of gangs; doubled each time in a row.
_LEFT_OUT = (10.0, 600.0)
# After this many gangs in a row that did not meet, no more are formed: the cause is not one busy worker.
_VAIN = 6

Start = tuple[float, Worker, Branch, int]
"""Seconds of the remaining path, the worker that trains it, and the branch and step of the ready stage."""


@dataclass(eq=False, repr=False)
class Gangs:
    """Forms gangs where chains start, and ends chains that should have other widths."""

    plan: SearchPlan
    tree: StageTree
    builder: ChainBuilder
    preemption: Preemption
    widths: Widths  # how much gangs gain; its ``widest`` becomes 1 when no more gangs are formed
    _any_formed: bool = False
    _formed: dict[ChainId, tuple[WorkerId, ...]] = field(default_factory=dict)
    _missed: dict[WorkerId, tuple[int, float]] = field(default_factory=dict)  # how often in a row, left out until when
    _in_vain: int = 0  # gangs in a row that did not meet
    _logged: set[str] = field(default_factory=set)
    _unused: str = ""  # why idle workers did not join a chain, as last found

    def __post_init__(self) -> None:
        self._can_form = self.widths.widest > 1

    # --- meeting ------------------------------------------------------------------------------------------

    def started(self, orders: Orders) -> None:
        """Record that a chain starts, and set the expected speed of its workers."""
        orders.speed = self.widths.speedup(len(orders.chain.workers))
        if orders.chain.gang:
            self._any_formed = True
            self._formed[orders.chain.id] = orders.chain.workers

    def reached(self, orders: Orders, fact: StateReached) -> None:
        """Record the training of a chain's workers, and their speed if they train together."""
        self.widths.learn(fact)
        if fact.workers > 1:
            orders.speed = self.widths.speedup(int(fact.workers))
            self._in_vain = 0
            for worker in self._formed.get(fact.chain, ()):
                self._missed.pop(worker, None)

    def ended(self, report: ChainEnded, now: float) -> list[str]:
        """Record that a chain has ended. If its workers did not meet, leave them out for a while, and return messages
        for the user."""
        workers = self._formed.pop(report.chain, ())
        if report.outcome != "apart":
            return []
        first, longest = _LEFT_OUT
        seconds = 0.0
        for worker in workers:
            times = self._missed.get(worker, (0, 0.0))[0]
            left_out = min(first * 2.0 ** min(times, 30), longest)
            self._missed[worker] = times + 1, now + left_out
            seconds = max(seconds, left_out)
        if self.widths.widest == 1:
            return []
        self._in_vain += 1
        if self._in_vain == _VAIN:
            self.widths.widest = 1
            return [
                f"{report.message}. No workers have met in {_VAIN} attempts: from now on each chain is trained by one "
                f"worker, with the same results."
            ]
        cause = re.sub(r"\d+", "", report.message)  # without numbers of workers and ports
        if cause in self._logged:
            return []
        self._logged.add(cause)
        return [
            f"{report.message}. They train separately for {seconds:.0f} s, with the same results, and then try again."
        ]

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that has left, and the chains that it was to train."""
        self._formed = {chain: workers for chain, workers in self._formed.items() if worker not in workers}
        self._missed.pop(worker, None)

    def next_at(self, now: float) -> float | None:
        """Return when the first of the workers that are excluded from gangs for a time may join one again. ``None``: no
        worker is excluded, or no gangs are formed any more."""
        if self.widths.widest == 1:
            return None
        return min((until for _, until in self._missed.values() if until > now), default=None)

    def _is_open(self, worker: WorkerId, now: float) -> bool:
        """Whether a worker may join a gang."""
        return self._missed.get(worker, (0, 0.0))[1] <= now

    def none_formed(self, workers: int) -> str | None:
        """Return why no chain was trained by several workers; ``None`` if one was, or if none can be.

        Args:
            workers: the largest number of workers that were present at one time.
        """
        if not self._can_form or self._any_formed:
            return None
        why = "there was one worker" if workers < 2 else self._unused or "no worker was idle while a chain could use it"
        return f"No chain was trained by several workers (virtual_nodes): {why}."

    # --- forming ------------------------------------------------------------------------------------------

    def form(self, starts: Sequence[Start], idle: Iterable[Worker], now: float) -> list[tuple[WorkerId, ...]]:
        """Return the further workers of each chain that starts, chosen from workers that would be idle."""
        leading = {worker.id for _, worker, _, _ in starts}
        spare = [worker for worker in idle if worker.id not in leading] if self.widths.widest > 1 else []
        # Further slots belong to the same worker.
        spare = [worker for worker in spare if worker.id == worker.host and self._is_open(worker.id, now)]
        if not spare:
            return [()] * len(starts)
        paths = [
            0.0
            if self._needs_one(StateRef(branch.node.id, step), branch.node) or not self._is_open(worker.id, now)
            else left
            for left, worker, branch, step in starts
        ]
        gangs = []
        widths = self.widths.share(paths, [1] * len(paths), len(spare), WORTH * self.preemption.switch_seconds())
        for (_, _, branch, step), width in zip(starts, widths, strict=True):
            source = source_of(branch, step)
            spare.sort(key=lambda worker: source not in worker.live)
            gang, spare = spare[: width - 1], spare[width - 1 :]
            gangs.append(tuple(worker.id for worker in gang))
        return gangs

    def _needs_one(self, begins: StateRef | None, ahead: Node) -> bool:
        """Whether the next stage needs a single worker: to verify a fork, or because a worker has died there."""
        return begins in self.plan.losses or not self.builder.is_verified(ahead)

    def regroup(
        self, running: Sequence[Orders], waiting: int, idle: Sequence[Worker], workers: int, now: float
    ) -> list[Instruction]:
        """End the chains that should be trained by more workers, if some are idle, or by fewer, if paths wait.

        A chain whose next mark is near ends there, any other at its next step, with its state kept.

        Args:
            waiting: number of ready stages that wait for a worker.
            idle: the workers that can be given a chain.
            workers: number of all workers.
        """
        if self.widths.widest == 1 or not self.plan.totals.steps_trained:
            return []  # the time of a step is not known yet
        going = [
            orders
            for orders in running
            if orders.marks
            and not (orders.stopping or orders.regroup)
            and not self._needs_one(orders.chain.begins_again, self._ahead(orders))
        ]
        chosen = self._to_narrow(going, waiting, workers, now) if waiting else self._to_widen(going, idle, now)
        chosen += [orders for orders in going if orders not in chosen and self.widths.loses(len(orders.chain.workers))]
        instructions: list[Instruction] = []
        for orders in chosen:
            orders.regroup = True
            if self.preemption.to_next_mark(orders, now) > WORTH * self.preemption.switch_seconds():
                orders.stopping = True
                instructions.append(StopChain(orders.chain.id, keep=True))
        return instructions

    def _ahead(self, orders: Orders) -> Node:
        chain = orders.chain
        return self.plan.nodes[chain.span_at(min(chain.at + 1, chain.spans[-1].stop)).node]

    def _to_widen(self, going: Sequence[Orders], idle: Sequence[Worker], now: float) -> list[Orders]:
        spare = sum(self._is_open(worker.id, now) for worker in idle)
        going = [orders for orders in going if all(self._is_open(id, now) for id in orders.chain.workers)]
        if not spare or not going:
            return []
        paths = [self.preemption.left(orders, now) for orders in going]
        widths = [len(orders.chain.workers) for orders in going]
        worth = WORTH * self.preemption.switch_seconds()
        shared = self.widths.share(paths, widths, spare, worth)
        if shared == widths:
            self._unused = f"adding idle workers would save less than {worth:.1f} s"
        return [orders for orders, before, after in zip(going, widths, shared, strict=True) if after > before]

    def _to_narrow(self, going: Sequence[Orders], waiting: int, workers: int, now: float) -> list[Orders]:
        """Return gangs to dissolve for waiting paths, the widest first, except those whose own path takes longer than
        all remaining work divided among the workers."""
        together = self.tree.left.seconds / workers
        chosen = []
        for orders in sorted(going, key=lambda orders: -len(orders.chain.gang)):
            if waiting <= 0 or not orders.chain.gang:
                break
            if self.preemption.left(orders, now) / orders.speed <= together:
                chosen.append(orders)
                waiting -= len(orders.chain.gang)
        return chosen
