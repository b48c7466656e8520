"""Invariants that hold for every plan after every fact. Pure."""

from __future__ import annotations

from collections import Counter

from hpstage.plan.plan import SearchPlan
from hpstage.schedule.scalars import distinct


def validate(plan: SearchPlan) -> None:
    """Assert every invariant of the tree, for tests and debugging. O(plan)."""
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
            assert tuple(distinct(v) for v in child.values(child.start)) == child.first != own, "a child is no branch"
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
