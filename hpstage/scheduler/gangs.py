"""Gangs: when running chains are to go on with more workers, or with fewer. Pure.

A chain's workers never change while it runs. To widen or narrow it, it is ended where its state is kept; its head is
then open again, and :class:`~hpstage.scheduler.dispatch.Dispatch` starts it with the workers that are free by then.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpstage.plan.messages import Instruction, StopChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.chain_builder import ChainBuilder
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.preemption import WORTH, Preemption
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.widths import Widths
from hpstage.scheduler.workers import Worker


class Gangs:
    """Ends chains that should have other widths."""

    def __init__(
        self, plan: SearchPlan, tree: StageTree, builder: ChainBuilder, preemption: Preemption, widths: Widths
    ) -> None:
        self._plan = plan
        self._tree = tree
        self._builder = builder
        self._preemption = preemption
        self._widths = widths
        self._unused = ""  # why workers that had nothing to do last trained with no other

    def none_formed(self, workers: int) -> str | None:
        """Return why no chain was trained by several of so many workers; ``None`` if any was, or none can be.

        Args:
            workers: the largest number present at one time.
        """
        if not self._widths.is_elastic or self._widths.meetings.any_asked:
            return None
        why = (
            "there was one worker"
            if workers < 2
            else self._unused or "no worker was idle beside a chain that it could join"
        )
        return f"No chain was trained by several workers (virtual_nodes): {why}."

    def regroup(
        self, running: Sequence[Orders], waiting: int, idle: Sequence[Worker], workers: int, now: float
    ) -> list[Instruction]:
        """End the chains that should be trained by more workers, if some are idle, or by fewer, if paths wait.

        A chain whose next mark is near ends there, any other at its next step, with its state kept.

        Args:
            waiting: number of heads that wait for a worker.
            idle: the workers that can be given a chain.
            workers: number of all workers.
        """
        if self._widths.widest == 1 or not self._plan.totals.steps_trained:
            return []  # what a step takes is not known yet
        going = [
            orders
            for orders in running
            if orders.marks and not (orders.stopping or orders.regroup or self._is_alone(orders))
        ]
        chosen = self._to_narrow(going, waiting, workers, now) if waiting else self._to_widen(going, idle, now)
        chosen += [orders for orders in going if orders not in chosen and self._widths.loses(len(orders.chain.workers))]
        instructions: list[Instruction] = []
        for orders in chosen:
            orders.regroup = True
            if self._preemption.to_next_mark(orders, now) > WORTH * self._preemption.switch_seconds():
                orders.stopping = True
                instructions.append(StopChain(orders.chain.id, keep=True))
        return instructions

    def _is_alone(self, orders: Orders) -> bool:
        """Whether one worker has to train what comes next: to verify a fork, or because it has killed a worker."""
        chain = orders.chain
        ahead = chain.span_at(min(chain.at + 1, chain.spans[-1].stop))
        return chain.begins_again in self._plan.losses or not self._builder.is_verified(self._plan.nodes[ahead.node])

    def _to_widen(self, going: Sequence[Orders], idle: Sequence[Worker], now: float) -> list[Orders]:
        meetings = self._widths.meetings
        spare = sum(meetings.open_to(worker.id, now) for worker in idle)
        going = [orders for orders in going if all(meetings.open_to(id, now) for id in orders.chain.workers)]
        if not spare or not going:
            return []
        paths = [self._preemption.left(orders, now) for orders in going]
        widths = [len(orders.chain.workers) for orders in going]
        worth = WORTH * self._preemption.switch_seconds()
        shared = self._widths.share(paths, widths, spare, worth)
        if shared == widths:
            self._unused = (
                f"those that were idle would not have saved enough: twice as many workers have to save {worth:.1f} s "
                f"of what is left of a path"
            )
        return [orders for orders, before, after in zip(going, widths, shared, strict=True) if after > before]

    def _to_narrow(self, going: Sequence[Orders], waiting: int, workers: int, now: float) -> list[Orders]:
        """Return gangs to dissolve for paths that wait, the widest first; none whose own path is what all wait for."""
        together = self._tree.left.seconds / workers
        chosen = []
        for orders in sorted(going, key=lambda orders: -len(orders.chain.gang)):
            if waiting <= 0 or not orders.chain.gang:
                break
            if self._preemption.left(orders, now) / orders.speed <= together:
                chosen.append(orders)
                waiting -= len(orders.chain.gang)
        return chosen
