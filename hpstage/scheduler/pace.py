"""Estimated seconds of training along a chain. Pure."""

from __future__ import annotations

from hpstage.plan.open_chain import OpenChain
from hpstage.scheduler.stage_tree import StageTree


def seconds_between(tree: StageTree, chain: OpenChain, a: int, b: int) -> float:
    """From one step to a later one."""
    total = 0.0
    index = chain.index_at(a)
    while a < b:
        span = chain.spans[index]
        stop = min(b, span.stop)
        total += (stop - a) * tree.line_of(span).cost
        a, index = stop, index + 1
    return total


def step_after(tree: StageTree, chain: OpenChain, a: int, seconds: float) -> int:
    """The step to which training gets from step ``a`` in so many seconds: the next at least, the last at most."""
    left, step = seconds, a
    for span in chain.spans[chain.index_at(a + 1) :]:
        cost = tree.line_of(span).cost
        steps = int(left / cost)
        if steps < span.stop - step:
            return max(step + steps, a + 1)
        left -= (span.stop - step) * cost
        step = span.stop
    return step


def step_before_end(tree: StageTree, chain: OpenChain, seconds: float) -> int:
    """The first step with at most so many seconds of training to go on the chain."""
    left = seconds
    for span in reversed(chain.spans):
        cost = tree.line_of(span).cost
        steps = int(left / cost)
        if steps < span.stop - span.start:
            return span.stop - steps
        left -= (span.stop - span.start) * cost
    return chain.spans[0].start
