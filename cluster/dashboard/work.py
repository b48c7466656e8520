"""The current training of each worker of a cluster. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpstage.cluster.dashboard.board import Board, PlanView
from hpstage.errors.text import clean, shortened
from hpstage.plan.facts import WorkerId
from hpstage.plan.nodes import Node
from hpstage.plan.open_chain import OpenChain

_MOST_TEXT = 160


@dataclass(frozen=True, slots=True)
class Place:
    """The estimated position of a running chain: ``step`` of ``node``, and the share ``done`` of its steps."""

    node: Node
    step: int
    done: float


@dataclass(frozen=True, slots=True)
class Work:
    """A running chain: its estimated ``step``, its last step ``stop``, and the share ``done`` of its steps."""

    study: str
    step: int
    stop: int
    done: float
    values: str


def work_of(board: Board, pool: str, now: float) -> dict[WorkerId, Work]:
    """Return the current training by worker, for the workers in ``pool``."""
    found = {}
    for view in board.plans.values():
        for chain in view.plan.chains.values():
            driver = view.plan.drivers.get(chain.driver)
            if driver is not None and driver.pool == pool:
                for worker in chain.workers:
                    found[worker] = _work(view, chain, now)
    return found


def _work(view: PlanView, chain: OpenChain, now: float) -> Work:
    stop, study, place = chain.spans[-1].stop, view.driven_by(chain), place_of(view, chain, now)
    if place is None:
        node = view.plan.nodes[chain.spans[-1].node]
        return Work(study, stop, stop, 1.0, values_text(node, max(node.start, stop - 1)))
    return Work(study, place.step, stop, place.done, values_text(place.node, place.step))


def place_of(view: PlanView, chain: OpenChain, now: float) -> Place | None:
    """Return the estimated position of a chain; ``None`` if it has trained all its spans.

    A chain reports only at boundaries, which may be a minute apart. Between them, it is assumed to progress at the
    node's measured speed, at most to the end of its current span.
    """
    ahead = list(chain.ahead())[::-1]
    if not ahead:
        return None
    whole = sum(span.stop - span.start for span in chain.spans)
    left = sum(span.stop - span.start for span in ahead)
    span = ahead[0]
    node = view.plan.nodes[span.node]
    passed = 0
    if node.trained or node.parent is not None:
        pace = view.plan.step_seconds(node)
        passed = int((now - chain.since) / pace) if pace > 0 else 0
    passed = max(0, min(passed, span.stop - span.start - 1))
    return Place(node, span.start + passed, (whole - left + passed) / max(1, whole))


def values_text(node: Node, step: int) -> str:
    """Return the hyperparameters at ``step`` as text. Those that differ from the parent's come first."""
    values = node.hyperparameters(step)
    before = {} if node.parent is None or not node.start else node.parent.hyperparameters(node.start - 1)
    names = sorted(values, key=lambda name: (name in before and before[name] == values[name], name))
    text = ", ".join(f"{clean(name)} {shortened(values[name])}" for name in names)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"
