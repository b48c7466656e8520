"""The states of the branches of a stage tree, and of the pieces that a branch is trained in. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Literal, get_args

from hpstage.accounting.accounting import Accounting
from hpstage.accounting.branches import TreeBranch
from hpstage.plan.facts import NodeId
from hpstage.plan.nodes import Node
from hpstage.plan.plan import SearchPlan

PieceState = Literal["waiting", "ready", "running", "done", "reused", "failed"]
"""The state of a piece of a branch; ``reused``: another study requested it first."""

PIECE_STATES: tuple[PieceState, ...] = get_args(PieceState)

Rest = Literal["waiting", "interrupted", "dropped"]
"""What becomes of the untrained rest of a branch. ``interrupted``: an unfinished trial needs it, but its search is not
running; ``dropped``: no trial needs it."""

BranchState = Literal["failed", "running", Rest, "done", "trained for another study"]


def running(plan: SearchPlan) -> dict[NodeId, int]:
    """Return the step up to which running chains will train each node. O(open chains)."""
    ahead: dict[NodeId, int] = {}
    for chain in plan.chains.values():
        for span in chain.ahead():
            ahead[span.node] = max(span.stop, ahead.get(span.node, 0))
    return ahead


def cut(
    account: Accounting, study: str | None, branch: TreeBranch, running: int | None
) -> Iterator[tuple[int, int, PieceState]]:
    """Yield ``(start, stop, state)`` of each piece of a branch of ``study``, from its node's start to its reach.

    Trained pieces are done, or reused if a trial of another study requested them first.

    Args:
        study: ``None``: the branch is one of all studies.
        running: the step up to which a chain will train the node, if one does (:func:`running`).
    """
    node, reach = branch.node, branch.reach
    front = account.trained_to(node)
    requesters = account.first_requests(node, node.start, min(front, reach))
    for mine, steps in groupby(requesters, lambda requester: study is None or requester[2].study == study):
        pieces = list(steps)
        yield pieces[0][0], pieces[-1][1], "done" if mine else "reused"
    if front < reach and running is not None and running > front:
        yield front, min(running, reach), "running"
        front = running
    if front < reach:
        fails_at = account.fails_at(node.id)
        if (fails_at is not None and fails_at < reach) or _is_out_of_reach(account, node):
            yield front, reach, "failed"
        else:
            ready = running is None and (
                front > node.start or node.parent is None or account.trained_to(node.parent) >= node.start
            )
            yield front, reach, "ready" if ready else "waiting"


def _is_out_of_reach(account: Accounting, node: Node) -> bool:
    """Whether training fails before it reaches the node. O(depth), if there are failures."""
    while account.has_failures and node.parent is not None:
        step = account.fails_at(node.parent.id)
        if step is not None and step < node.start:
            return True
        node = node.parent
    return False


def state_of(account: Accounting, branch: TreeBranch, pieces: Collection[PieceState], rest: Rest) -> BranchState:
    """Return the state of a branch.

    Args:
        pieces: the states of its pieces (:func:`cut`).
        rest: what becomes of the pieces that are not trained yet.
    """
    if "failed" in pieces or account.failed_on(branch.node.id, branch.reach):
        return "failed"
    if "running" in pieces:
        return "running"
    if "ready" in pieces or "waiting" in pieces:
        return rest
    return "trained for another study" if {*pieces} == {"reused"} else "done"


def states(account: Accounting, branches: Mapping[NodeId, TreeBranch], study: str | None) -> dict[NodeId, BranchState]:
    """Return the states of the branches of a study's trials, or of all trials."""
    plan = account.plan
    rests: dict[NodeId, Rest] = {}
    for wanted in plan.open_targets.wanted():
        node: Node | None = wanted.node
        while node is not None and node.id not in rests:
            rests[node.id] = "waiting"
            node = node.parent
    for name, trial in plan.trials.items():
        if name not in plan.ended:
            for passed, _, _ in trial.path_to(trial.requested):
                rests.setdefault(passed.id, "interrupted")
    ahead = running(plan)
    found: dict[NodeId, BranchState] = {}
    for id, branch in branches.items():
        pieces = [state for _, _, state in cut(account, study, branch, ahead.get(id))]
        found[id] = state_of(account, branch, pieces, rests.get(id, "dropped"))
    return found
