"""Invariants that hold after every fact, for a plan and what a scheduler derives from it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hpstage.plan.plan import SearchPlan
from hpstage.plan.regimes import Regimes
from hpstage.schedule.scalars import distinct
from hpstage.scheduler.branches import Branch, steps_left
from hpstage.scheduler.scheduler import Scheduler
from hpstage.scheduler.stage_tree import StageTree


def validate(plan: SearchPlan) -> None:
    """Assert every invariant of a plan. O(plan)."""
    for index, node in enumerate(plan.nodes):
        assert node.id == index
        assert len(node.names) == len(node.forms) and list(node.names) == sorted(node.names)
        if node.parent is not None:
            assert node.parent.id < node.id and node.parent.start < node.start, "children come after, and later"
            assert node.parent.names == node.names
        begun = [(child.start, child.first) for child in node.children]
        assert len(set(begun)) == len(begun) and list(node.children) == sorted(
            node.children, key=lambda child: child.start
        )
        for child in node.children:
            assert child.parent is node and child.start > node.start
            assert plan._tree.child_of(node, child.start, child.first) is child
            own = tuple(distinct(value) for value in node.values(child.start))
            assert tuple(distinct(v) for v in child.values(child.start)) == child.first != own, (
                "a child is not a branch"
            )
        for step, state in node.states.items():
            assert state.step == step > node.start and state.node is node
            if state.kept is not None:
                assert state.kept.key == plan.key(node, step)
                assert plan.kept[state.kept.key] is state
    assert all(state.kept is not None and state.kept.key == key for key, state in plan.kept.items())
    published = [state.kept for state in plan.kept.values() if state.kept is not None]
    counts = Counter(part.key for kept in published for part in kept.parts)
    assert counts == {key: count for key, (_, count) in plan.parts.items()}
    assert plan.kept_bytes == sum(kept.own for kept in published) + sum(part.bytes for part, _ in plan.parts.values())
    for trial in plan.trials.values():
        assert list(trial.targets) == sorted(set(trial.targets)) and trial.last.start < trial.steps
        for node, start, stop in trial.path_to(trial.requested):
            assert node.start == start < stop
        ending = plan.ending_on(trial.id, trial.steps)
        if ending is None:
            assert trial.requested == max(trial.targets, default=0)
        else:
            assert max(trial.targets, default=0) <= trial.requested <= ending.last


def validate_scheduler(scheduler: Scheduler) -> None:
    """Assert every cross-collection invariant, for tests. O(plan)."""
    validate(scheduler._plan)
    _validate_tree(scheduler._tree)
    verifying = (regime for orders in scheduler._running.values() for regime in orders.verifying)
    assert scheduler._builder.verifying == Regimes(verifying), "the forks to verify by running chains are not counted"
    for worker in scheduler.workers.values():
        assert worker.chain is None or worker.chain in scheduler._plan.chains
    for id, orders in scheduler._running.items():
        chain = orders.chain
        assert chain is scheduler._plan.chains[id]
        assert list(orders.marks) == sorted(set(orders.marks))
        assert all(chain.at <= mark <= chain.spans[-1].stop for mark in orders.marks)
    for chain in scheduler._plan.chains.values():
        assert chain.kept <= chain.at
        for a, b in pairwise(chain.spans):
            assert b.start == a.stop
            parent = scheduler._plan.nodes[b.node].parent
            assert parent is not None and parent.id == a.node
    for node in scheduler._plan.nodes:
        for id in scheduler._tree.branch(node).covers:
            assert id in scheduler._plan.chains, f"node {node.id} is covered by {id}, which is over"


def is_idle(scheduler: Scheduler) -> bool:
    """Whether nothing is running and nothing is wanted."""
    return not (scheduler.running or any(branch.wanted for branch in scheduler._tree._branches))


def _validate_tree(tree: StageTree) -> None:
    """Assert that the incremental structures equal a recomputation. O(tree)."""
    for branch in tree._branches:
        node = branch.node
        assert list(branch.sources) == sorted(s for s, state in node.states.items() if state.kept is not None)
        assert [wanted.step for wanted in branch.wanted] == sorted({wanted.step for wanted in branch.wanted})
        for wanted in branch.wanted:
            step = wanted.step
            assert step > node.start
            assert wanted.evaluate or wanted.children
            if wanted.evaluate:
                assert tree._plan.open_targets.waiting(node.states[step])
            for id, child in wanted.children.items():
                assert child.needy and child.node.id == id and child.node.start == step
                assert step not in branch.sources
            source = tree.source_of(branch, step)
            if source is not None:
                assert source in branch.ready, f"wanted step {step} of node {node.id} has no ready stage"
            elif branch.sources.last(step) is None and all(c.start >= step for c in branch.covers.values()):
                assert branch.needy and node.parent is not None
                assert _is_needed_above(branch)
        if branch.wanted and branch.needy and node.parent is not None and not tree._begins(branch):
            assert _is_needed_above(branch)
        assert all(tree._is_open(branch, step) for step in branch.ready), (
            f"node {node.id} has a ready stage that is closed"
        )
    assert tree.ready == sum(len(branch.ready) for branch in tree._branches)
    left = tree.left
    seconds = sum(steps_left(branch) * branch.cost for branch in tree._branches)
    assert abs(left.seconds - seconds) <= 1e-6 * (1.0 + seconds)
    assert left.steps == sum(map(steps_left, tree._branches))
    assert left.evaluations == sum(wanted.evaluate for branch in tree._branches for wanted in branch.wanted)
    assert left.stages_left == sum(bool(branch.wanted or steps_left(branch)) for branch in tree._branches)


def _is_needed_above(branch: Branch) -> bool:
    wanted = None if branch.above is None else branch.above.wanted.at(branch.node.start)
    return wanted is not None and branch.node.id in wanted.children
