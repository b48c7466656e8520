"""Which checkpoints of a plan may be evicted: all whose states are not *needed* by the rules below. Pure.

Of those that may be evicted, ``eviction_policy.py`` chooses, and ``eviction.py`` removes the chosen ones. A state is
*needed*, and its checkpoint must be kept, if

- it is the nearest saved one at or before a state that a driver waits for: training will start from there;
- it is the nearest saved one at or before the farthest state requested of an unfinished trial that may be continued (a
  trial that has its last result, or has failed, and only waits for trials of lower numbers to end, will not be);
- a chain starts from it that has not reported anything yet, and so may not have loaded it;
- a running chain will reach it, and would immediately keep it again;
- it is one of the best of a study (:mod:`hpstage.plan.winners`), or will be when the trials that have their last
  results end: its model is the purpose of the search;
- a trial of the plan names its step as one at which further trials will be forked (``keep_at``): no search evicts it,
  regardless of its budget; ``hpstage gc --budget`` may evict it while no search runs, since its caller decides what
  is still to come.

Evicting any other state only costs retraining if it is requested later, by another study or by ``extend=True``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from hpstage.checkpoints.eviction_policy import KeptState
from hpstage.plan.facts import NodeId, StateKey, TrialId
from hpstage.plan.nodes import Node, State
from hpstage.plan.plan import SearchPlan


def kept_states(plan: SearchPlan, *, for_forks: bool = True) -> list[KeptState]:
    """Return every saved state with its nearest saved ancestor, the seconds from there, and whether it is needed; with
    ``for_forks``, also for future trials.

    O(saved states, wants, unfinished trials and running chains, and the nodes above them).
    """
    return _Needs(plan).states(for_forks)


def needed_states(plan: SearchPlan) -> set[StateKey]:
    """Return the keys of the saved states that are needed, as :func:`kept_states` has them."""
    return _Needs(plan).needed(for_forks=True)


class _Needs:
    """Decides which saved states are needed, and finds the nearest saved ancestor of each. Visits each node above a
    saved or needed state once."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        by_node: dict[NodeId, list[int]] = defaultdict(list)
        for state in plan.kept.values():
            by_node[state.node.id].append(state.step)
        self._steps = {id: sorted(steps) for id, steps in by_node.items()}
        self._costs: dict[NodeId, float] = {}
        self._above: dict[NodeId, tuple[State | None, float]] = {}

    def states(self, for_forks: bool) -> list[KeptState]:
        needed = self.needed(for_forks)
        found: list[KeptState] = []
        for state in self._plan.kept.values():
            kept, node = state.kept, state.node
            assert kept is not None
            at = bisect_right(self._steps[node.id], state.step) - 1
            if at > 0:
                before = self._steps[node.id][at - 1]
                parent: State | None = node.states[before]
                seconds = (state.step - before) * self._cost(node)
            else:
                parent, seconds = self._before(node)
                seconds += (state.step - node.start) * self._cost(node)
            found.append(
                KeptState(
                    key=kept.key,
                    parent=None if parent is None else _key(parent),
                    bytes=kept.own,
                    seconds=seconds,
                    needed=kept.key in needed,
                    parts=kept.parts,
                    last_used=state.used,
                )
            )
        return found

    def needed(self, for_forks: bool) -> set[StateKey]:
        plan = self._plan
        # What drivers wait for.
        needed: set[State | None] = {self._nearest(state.node, state.step) for state in plan.open_targets.wanted()}
        # Unfinished trials that may be continued; and the best of those that have their last results.
        trained: list[tuple[str, TrialId, State]] = []
        for trial in plan.open_trials():
            if not trial.requested or plan.failure_on(trial.id, trial.requested) is not None:
                continue
            result = plan.result_of(trial)
            if result is not None and plan.is_trained(trial):
                trained.append((trial.study, trial.id, result))
            else:
                needed.add(self._nearest(trial.node_at(trial.requested), trial.requested))
        needed.update(plan.winners.to_come(trained))
        # Running chains: the states that they start from, and those that they would keep again.
        for chain in plan.chains.values():
            if chain.reached is None:
                needed.add(plan.source_of(chain))
            for span in chain.ahead():
                node = plan.nodes[span.node]
                steps = self._steps.get(span.node, [])
                for step in steps[bisect_right(steps, span.start) : bisect_right(steps, span.stop)]:
                    needed.add(node.states[step])
        needed.update(plan.winners)
        keys = {state.kept.key for state in needed if state is not None and state.kept is not None}
        if for_forks:
            keys.update(
                key for key, state in plan.kept.items() if state.node.keep_at and state.step in state.node.keep_at
            )
        return keys

    def _nearest(self, node: Node, step: int) -> State | None:
        """Return the last saved state at or before ``step`` on the path to the node."""
        steps = self._steps.get(node.id)
        at = bisect_right(steps, step) if steps else 0
        return node.states[steps[at - 1]] if steps and at else self._before(node)[0]

    def _before(self, node: Node) -> tuple[State | None, float]:
        """Return the last saved state at or before the start of ``node``, and the seconds from there."""
        way = [node]  # no recursion: a path may have as many nodes as a trial has steps
        while (last := way[-1]).id not in self._above:
            above = last.parent
            if above is None:
                self._above[last.id] = None, 0.0
                break
            steps = self._steps.get(above.id)
            at = bisect_right(steps, last.start) if steps else 0
            if steps and at:
                self._above[last.id] = above.states[steps[at - 1]], (last.start - steps[at - 1]) * self._cost(above)
                break
            way.append(above)
        way.pop()
        while way:
            below = way.pop()
            above = below.parent
            assert above is not None
            found, seconds = self._above[above.id]
            self._above[below.id] = found, seconds + (below.start - above.start) * self._cost(above)
        return self._above[node.id]

    def _cost(self, node: Node) -> float:
        """Return ``plan.step_seconds``, cached."""
        if node.id not in self._costs:
            self._costs[node.id] = self._plan.step_seconds(node)
        return self._costs[node.id]


def _key(state: State) -> StateKey:
    assert state.kept is not None
    return state.kept.key
