"""The layout of a step's values, by cost: one stacked tensor, or one tensor for each member."""

from __future__ import annotations

import math
import operator

from torch.fx import Node

from hpstage.torch.backends.stacked.planning import ALIGNMENT, Plan
from hpstage.torch.backends.stacked.tracing import Trace

_CALL = 3e-6  # seconds of a call of any operation
_BANDWIDTH = 4e9  # bytes copied in a second
_ROUNDS = 4


class Layout:
    """The choice for each node. It decides how long a step takes, and none of its bits."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self._plan = plan
        inputs = trace.inputs
        first, last = len(trace.trained), len(trace.trained) + len(trace.kept)
        self._given: dict[Node, bool] = {}
        """Inputs whose form is settled: parameters and hyperparameters are stacked, batches are not."""
        for index, node in enumerate(inputs[: len(inputs) - len(trace.constants)]):
            if not first <= index < last and node not in plan.once:
                self._given[node] = index < first or last <= index < last + len(trace.values)
        outputs = list(trace.graph.output_node().args[0])  # type: ignore[arg-type]
        self._wanted = {node for node in outputs[: 1 + first] if isinstance(node, Node)}
        self._kept = dict(zip(inputs[first:last], outputs[1 + first : 1 + last], strict=True))
        self._new = {new: old for old, new in self._kept.items() if isinstance(new, Node)}
        self._leader = {node: _leader(node) for node in trace.graph.nodes}
        self.stacked: dict[Node, bool] = {}
        if plan.width > 1:
            self._choose(trace)

    def is_stacked(self, node: Node) -> bool:
        """Return whether a node's value is kept as one stacked tensor."""
        return self.stacked.get(self._leader[node], self._given.get(node, False))

    def _choose(self, trace: Trace) -> None:
        plan = self._plan
        free = [node for node in trace.graph.nodes if node in plan.stacked and self._leader[node] is node]
        free += [node for node in self._kept if node not in plan.once]
        for node in free:
            self.stacked[node] = plan.together.get(node, 0.0) <= plan.alone.get(node, 0.0) and node not in self._kept
        for _ in range(_ROUNDS):
            changed = False
            for node in free:
                now = self._cost_around(node)
                self.stacked[node] = not self.stacked[node]
                if self._cost_around(node) < now:
                    changed = True
                else:
                    self.stacked[node] = not self.stacked[node]
            if not changed:
                return

    def _cost_around(self, node: Node) -> float:
        """Return the seconds that depend on the choice for a node: its own, and those of changes of form around it."""
        plan = self._plan
        own = (plan.together if self.stacked[node] else plan.alone).get(node, 0.0)
        inputs = {arg for arg in node.all_input_nodes if arg not in plan.constants and arg not in plan.once}
        values = inputs | {node} | {user for user in node.users if self._leader.get(user) is node}
        if node in self._kept:
            values |= {self._kept[node]} & self._leader.keys()
        return own + sum(self._change(value) for value in values)

    def _change(self, value: Node) -> float:
        """Return the seconds to bring a value into the forms in which it is used."""
        plan = self._plan
        if value not in plan.sizes or value in plan.once:
            return 0.0
        needed = {self.is_stacked(user) for user in value.users if user.op == "call_function"}
        if value in self._wanted:
            needed.add(True)
        if value in self._new:
            needed.add(self.is_stacked(self._new[value]))
        bytes = plan.width * plan.sizes[value]
        if not self.is_stacked(value):
            if True not in needed:
                return 0.0
            only_wanted = all(not self.is_stacked(user) for user in value.users if user.op == "call_function")
            return _CALL + bytes / _BANDWIDTH if plan.contiguous[value] or only_wanted else math.inf
        if False not in needed:
            return 0.0
        if is_aligned(plan, value):
            return _CALL
        return plan.width * _CALL + bytes / _BANDWIDTH


def is_aligned(plan: Plan, node: Node) -> bool:
    """Return whether members begin, in a stacked value, where new tensors may begin."""
    return plan.strides.get(node, plan.sizes[node]) % ALIGNMENT == 0


def _leader(node: Node) -> Node:
    """Return the node that a value's form is chosen for: of one of several results, the operation's."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]
