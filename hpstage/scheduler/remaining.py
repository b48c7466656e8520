"""What is still to train, as far as anybody has asked. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.chains import RunningChain
from hpstage.scheduler.stage_tree import StageTree


@dataclass(frozen=True, slots=True)
class Outlook:
    """Estimated seconds of what is asked for and not yet trained, at the measured seconds per step.

    Loading and saving are counted in at the share of training that they have taken so far.
    """

    path_seconds: float
    """Of the longest way, which no number of workers shortens."""
    work_seconds: float
    """Of all of it together, on one worker."""
    stages_done: int
    """Nodes of the plan that were trained and have nothing left to train."""
    stages_left: int
    """Nodes with something left to train or to evaluate."""


def look_out(plan: SearchPlan, tree: StageTree, running: Iterable[RunningChain], now: float) -> Outlook:
    """What is left at ``now`` on the clock of the chains. O(running chains x the legs of their ways)."""
    with closing(tree.heads()) as heads:
        longest = next(heads, None)
    path = 0.0 if longest is None else longest[0]
    work = tree.left.seconds + tree.left.evaluations * tree.evaluate_seconds
    for chain in running:
        ahead = chain.seconds_between(chain.at, chain.marks[0]) if chain.marks else 0.0
        spent = min(max(0.0, now - chain.since), ahead)
        work -= spent
        path = max(path, _way(tree, chain) - spent)
    totals = plan.totals
    besides = (totals.load_seconds + totals.save_seconds) / totals.train_seconds if totals.train_seconds else 0.0
    return Outlook(
        path_seconds=path * (1 + besides),
        work_seconds=max(0.0, work) * (1 + besides),
        stages_done=tree.left.stages_done,
        stages_left=tree.left.stages_left,
    )


def _way(tree: StageTree, chain: RunningChain) -> float:
    """Seconds from where the chain was last to the end of the longest way that begins on its own."""
    at, tail = chain.at, chain.legs[-1]
    best = chain.seconds_between(at, tail.stop) + tree.remaining(tail.line, tail.stop) + tree.evaluate_seconds
    passed = 0.0
    for leg in chain.legs[chain.leg_at(at) :]:
        start = max(at, leg.start)
        best = max(best, passed + leg.line.length - (start - leg.line.node.start) * leg.line.cost)
        passed += (leg.stop - start) * leg.line.cost
    return best
