"""The current training of each worker of a cluster. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpstage.cluster.dashboard.board import Board, PlanView
from hpstage.cluster.dashboard.tree import values_text
from hpstage.plan.facts import WorkerId
from hpstage.plan.open_chain import OpenChain


@dataclass(frozen=True, slots=True)
class Work:
    """A running chain: its estimated ``step``, and the share ``done`` of its path to ``stop``."""

    study: str
    step: int
    stop: int
    done: float
    values: str


def work_of(board: Board, pool: str, now: float) -> dict[WorkerId, Work]:
    """Return the current training by worker, for the workers in ``pool``.

    A chain reports only at boundaries, which may be a minute apart. In between it is assumed to progress at its node's
    previous speed, at most up to the end of the current node.
    """
    found = {}
    for view in board.plans.values():
        for chain in view.plan.chains.values():
            driver = view.plan.drivers.get(chain.driver)
            if driver is not None and driver.pool == pool:
                found[chain.worker] = _work(view, chain, now)
    return found


def _work(view: PlanView, chain: OpenChain, now: float) -> Work:
    ahead = list(chain.ahead())[::-1]
    last = chain.spans[-1]
    whole = sum(span.stop - span.start for span in chain.spans)
    left = sum(span.stop - span.start for span in ahead)
    if not ahead:
        node = view.plan.nodes[last.node]
        return Work(view.driven_by(chain), last.stop, last.stop, 1.0, values_text(node, max(node.start, last.stop - 1)))
    span = ahead[0]
    node = view.plan.nodes[span.node]
    passed = 0
    if node.trained or node.parent is not None:
        pace = view.plan.step_seconds(node)
        passed = int((now - chain.since) / pace) if pace > 0 else 0
    passed = max(0, min(passed, span.stop - span.start - 1))
    step = span.start + passed
    return Work(
        view.driven_by(chain), step, last.stop, (whole - left + passed) / max(1, whole), values_text(node, step)
    )
