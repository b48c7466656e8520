"""What each worker of a cluster trains now. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpstage.cluster.dashboard.board import Board, PlanView
from hpstage.cluster.dashboard.tree import values_text
from hpstage.plan.facts import WorkerId
from hpstage.plan.open_chain import OpenChain


@dataclass(frozen=True, slots=True)
class Work:
    """A chain that runs: it stands about at ``step``, which is part ``done`` of its way to ``stop``."""

    study: str
    step: int
    stop: int
    done: float
    values: str


def work_of(board: Board, pool: str, now: float) -> dict[WorkerId, Work]:
    """By worker, of those in ``pool``.

    A chain reports at boundaries only, which may be a minute apart. In between it is taken to have gone on as fast as
    its node did before, as far as to the next end of a node at most.
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
