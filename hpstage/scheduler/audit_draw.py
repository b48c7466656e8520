"""Draws the states to audit in random order; late states and those of unaudited regimes are more likely. Pure.

States are drawn by weight and without replacement: each gets a random time from the exponential distribution with its
weight as rate, and the smallest time is drawn first (Efraimidis and Spirakis, Information Processing Letters 97(5),
2006). The times depend only on a seed, the states' keys and the number of states drawn before.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from dataclasses import dataclass

from hpstage.plan.facts import NodeId, StateRef, TrialId
from hpstage.plan.messages import Audit, AuditId
from hpstage.plan.nodes import Node, State
from hpstage.plan.plan import SearchPlan
from hpstage.plan.regimes import Regime
from hpstage.plan.segments import segment_of

UNSEEN = 4.0
"""Factor by which states of a regime without an audit are more likely to be drawn."""
_STOPPED = 4.0
"""Factor by which states whose audit was stopped are less likely to be drawn: their audits may take longer than idle
times."""
WHOLE = 8
"""One in this many audits is of a whole trial."""


@dataclass(order=True, slots=True)
class Drawn:
    """A saved state, and the time that orders the draws.

    ``seen``: whether the time accounts for an earlier audit of the state's regime. ``whole``: whether to audit the
    whole trial that ends with the state.
    """

    time: float
    node: NodeId
    step: int
    whole: bool
    seen: bool = False

    @property
    def ref(self) -> StateRef:
        return StateRef(self.node, self.step)


class AuditDraw:
    """The states of a plan in the order in which they are audited.

    Args:
        seed: seed of the order.
        numerics: the step backend, where the trainable leaves the choice to the search.
    """

    def __init__(self, plan: SearchPlan, seed: str, numerics: str = "") -> None:
        self._plan = plan
        self._seed = hashlib.blake2b(seed.encode(), digest_size=16).digest()
        self._numerics = numerics
        self._segments: list[Drawn] = []
        self._trials: list[Drawn] = []
        self._time = 0.0  # when the last segment was drawn
        self._seen: dict[Regime, float] = {plan.nodes[ref.node].regime: 0.0 for ref in plan.audited}
        self._count = 0
        for state in plan.kept.values():
            self.add(state)
        for trial in plan.ended:
            self.add_trial(trial)

    def __len__(self) -> int:
        return len(self._segments) + len(self._trials)

    def add(self, state: State) -> None:
        """Add a state that is kept for the first time: the segment that ends with it can be audited."""
        wait = self._wait(state) / (state.step * UNSEEN)
        heapq.heappush(self._segments, Drawn(self._time + wait, state.node.id, state.step, whole=False))

    def add_trial(self, trial: TrialId) -> None:
        """Add a trial that has ended."""
        planned = self._plan.trials.get(trial)
        state = None if planned is None else self._plan.result_of(planned)
        if state is not None:
            wait = self._wait(state)
            heapq.heappush(self._trials, Drawn(wait, state.node.id, state.step, whole=True))

    def next(self, *, only_unseen: bool = False) -> Drawn | None:
        """Draw the next state; with ``only_unseen``, from the regimes without an audit. Amortised O(log states)."""
        self._count += 1
        if not only_unseen and self._count % WHOLE == 0:
            while self._trials:
                drawn = heapq.heappop(self._trials)
                if self._is_comparable(drawn):
                    return drawn
        passed = []
        found = None
        while self._segments and found is None:
            drawn = heapq.heappop(self._segments)
            if not self._is_comparable(drawn) or drawn.ref in self._plan.audited:
                continue
            regime = self._plan.nodes[drawn.node].regime
            since = self._seen.get(regime)
            if since is not None and not drawn.seen:  # from then on, it waits longer
                drawn.time, drawn.seen = since + (drawn.time - since) * UNSEEN, True
                heapq.heappush(self._segments, drawn)
            elif since is not None and only_unseen:
                passed.append(drawn)
            else:
                found = drawn
                self._time = drawn.time
                self._seen.setdefault(regime, self._time)
        for drawn in passed:
            heapq.heappush(self._segments, drawn)
        return found

    def put_back(self, drawn: Drawn) -> None:
        """Put back a state whose audit had to be stopped; others come first now."""
        if not (drawn.seen or drawn.whole):
            self._seen.pop(self._plan.nodes[drawn.node].regime, None)
        wait = self._wait(self._plan.nodes[drawn.node].states[drawn.step]) * _STOPPED
        if drawn.whole:
            drawn.time += wait
        else:
            drawn.time = self._time + wait / (drawn.step if drawn.seen else drawn.step * UNSEEN)
        heapq.heappush(self._trials if drawn.whole else self._segments, drawn)

    def audit(self, drawn: Drawn, id: AuditId) -> Audit:
        """Return the audit of a drawn state: training from the nearest checkpoint before it, or its whole trial."""
        node = self._plan.nodes[drawn.node]
        segment = segment_of(
            node,
            drawn.step,
            source=None if drawn.whole else _kept_before(node, drawn.step),
            # Only the objectives: other metrics may be a time or the memory in use, which differ between runs.
            objectives={name for record in self._plan.searches.values() for name in record.started.metric},
            numerics=self._numerics,
            captured=not drawn.whole,
        )
        return Audit(id, segment)

    def seconds(self, audit: Audit) -> float:
        """Estimate the seconds of an audit's steps."""
        nodes, stages = self._plan.nodes, audit.segment.stages
        return sum((stage.stop - stage.start) * self._plan.step_seconds(nodes[stage.node]) for stage in stages)

    def _is_comparable(self, drawn: Drawn) -> bool:
        """Whether the state's content is known and training did not end before it."""
        state, ended = self._plan.nodes[drawn.node].state(drawn.step), self._plan.endings.ended.get(drawn.node)
        return state is not None and state.digest is not None and (ended is None or ended.step > drawn.step)

    def _wait(self, state: State) -> float:
        """Return a random waiting time for a state of weight 1."""
        key = self._plan.key(state.node, state.step) if state.kept is None else state.kept.key
        drawn = hashlib.blake2b(f"{key}/{self._count}".encode(), digest_size=8, key=self._seed).digest()
        return -math.log((int.from_bytes(drawn, "big") + 1) / (1 << 64))


def _kept_before(node: Node, step: int) -> State | None:
    """Return the nearest checkpoint before a step on a node's branch; ``None``: training starts from scratch."""
    for branch in reversed(node.ancestry()):
        kept = [at for at, state in branch.states.items() if at < step and state.kept is not None]
        if kept:
            return branch.states[max(kept)]
        step = branch.start + 1  # of its parent's branch
    return None
