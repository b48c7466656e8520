"""Estimated seconds of training along a chain. Pure."""

from __future__ import annotations

from hpstage.plan.open_chain import OpenChain
from hpstage.scheduler.stage_tree import StageTree


def seconds_between(tree: StageTree, chain: OpenChain, a: int, b: int) -> float:
    """Estimate the seconds from step ``a`` to a later step ``b``."""
    total = 0.0
    index = chain.index_at(a)
    while a < b:
        span = chain.spans[index]
        stop = min(b, span.stop)
        total += (stop - a) * tree.branch_of(span).cost
        a, index = stop, index + 1
    return total


def step_after(tree: StageTree, chain: OpenChain, a: int, seconds: float) -> int:
    """Return the step that training from step ``a`` reaches in ``seconds``: at least the next, at most the last."""
    left, step = seconds, a
    for span in chain.spans[chain.index_at(a + 1) :]:
        cost = tree.branch_of(span).cost
        steps = int(left / cost)
        if steps < span.stop - step:
            return max(step + steps, a + 1)
        left -= (span.stop - step) * cost
        step = span.stop
    return step


def step_before_end(tree: StageTree, chain: OpenChain, seconds: float) -> int:
    """Return the first step with at most ``seconds`` of training left on the chain."""
    left = seconds
    for span in reversed(chain.spans):
        cost = tree.branch_of(span).cost
        steps = int(left / cost)
        if steps < span.stop - span.start:
            return span.stop - steps
        left -= (span.stop - span.start) * cost
    return chain.spans[0].start
