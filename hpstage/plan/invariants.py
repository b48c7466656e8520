"""Invariants that hold for every plan after every fact. Pure."""

from __future__ import annotations

from hpstage.plan.nodes import distinct
from hpstage.plan.plan import SearchPlan


def validate(plan: SearchPlan) -> None:
    """Assert every invariant of the tree, for tests and debugging. O(plan)."""
    for index, node in enumerate(plan.nodes):
        assert node.id == index
        assert len(node.names) == len(node.forms) and list(node.names) == sorted(node.names)
        if node.parent is not None:
            assert node.parent.id < node.id and node.parent.start < node.start, "children come after, and later"
            assert node.parent.names == node.names
        for step, siblings in node.children.items():
            assert step > node.start
            own = tuple(distinct(value) for value in node.values(step))
            for values, child in siblings.items():
                assert child.parent is node and child.start == step
                assert tuple(distinct(v) for v in child.values(step)) == values != own, "a child parts at once"
                assert child.first == values
        for step, state in node.states.items():
            assert state.step == step > node.start and state.node is node
            if state.kept is not None:
                assert state.kept.key == plan.key(node, step)
                assert plan.kept[state.kept.key] is state
    assert all(state.kept is not None and state.kept.key == key for key, state in plan.kept.items())
    assert plan.kept_bytes == sum(state.kept.bytes for state in plan.kept.values() if state.kept is not None)
    unique: dict[int, int] = {}
    for trial in plan.trials.values():
        assert trial.stops[-1] == trial.steps and list(trial.stops) == sorted(set(trial.stops))
        for node, start, stop in trial.path_to(trial.asked):
            assert node.start == start < stop
            unique[node.id] = max(unique.get(node.id, 0), stop - start)
        fresh = trial.fresh.values()
        assert all(steps >= 0 for steps in fresh)
        ending = plan.ending_on(trial.id, trial.steps)
        if ending is None:
            assert trial.asked == max(trial.targets, default=0)
        else:
            assert max(trial.targets, default=0) <= trial.asked <= ending.last
    assert plan.steps_unique == sum(sum(trial.fresh.values()) for trial in plan.trials.values())
    assert plan.steps_asked == sum(trial.asked for trial in plan.trials.values())
    assert plan.steps_unique == sum(unique.values()) == sum(node.reach - node.start for node in plan.nodes)
