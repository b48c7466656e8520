"""Estimates of the requested work that is not yet done. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.stage_tree import StageTree


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """Estimated seconds of the requested work that is not yet done, at the measured seconds per step.

    Loading and saving are included in proportion to training, as measured so far.
    """

    path_seconds: float
    """Seconds of the longest path, which more workers cannot shorten."""
    work_seconds: float
    """Seconds of all the work on one worker."""
    steps_left: int
    """Steps still to train, including those that running chains have not reported yet."""
    steps_since: int
    """Of these, steps that running chains are estimated to have trained since their last reports."""
    stages_left: int
    """Nodes with steps left to train or states left to evaluate."""


def remaining_work(plan: SearchPlan, tree: StageTree, running: Iterable[Orders], now: float) -> RemainingWork:
    """Estimate the work left at ``now`` on the chains' clock. O(running chains x their spans)."""
    path = max((seconds for seconds, _, _ in tree.ready_stages(1)), default=0.0)
    work = tree.left.seconds + tree.left.evaluations * tree.evaluate_seconds
    since = 0
    for orders in running:
        chain = orders.chain
        ahead = tree.seconds_between(chain, chain.at, orders.marks[0]) if orders.marks else 0.0
        spent = min(orders.spent(now), ahead)
        if spent and plan.totals.steps_trained:  # else the time of a step is not known
            since += min(tree.step_after(chain, chain.at, spent), orders.marks[0]) - 1 - chain.at
        work -= spent
        path = max(path, _path_seconds(tree, chain) - spent)
    totals = plan.totals
    besides = (totals.load_seconds + totals.save_seconds) / totals.train_seconds if totals.train_seconds else 0.0
    return RemainingWork(
        path_seconds=path * (1 + besides),
        work_seconds=max(0.0, work) * (1 + besides),
        steps_left=tree.left.steps,
        steps_since=since,
        stages_left=tree.left.stages_left,
    )


def _path_seconds(tree: StageTree, chain: OpenChain) -> float:
    """Return the seconds from the chain's last reported position to the end of the longest path that starts on it."""
    at, tail = chain.at, chain.spans[-1]
    beyond = tree.remaining(tree.branch_of(tail), tail.stop)
    best = tree.seconds_between(chain, at, tail.stop) + beyond + tree.evaluate_seconds
    passed = 0.0
    for span in chain.spans[chain.index_at(at) :]:
        branch, start = tree.branch_of(span), max(at, span.start)
        best = max(best, passed + branch.length - (start - branch.node.start) * branch.cost)
        passed += (span.stop - start) * branch.cost
    return best
