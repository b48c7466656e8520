"""A step of several members up to their gradients, as one function of straight-line code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hpstage.torch.backends.stacked.cleaning import is_random, last_uses
from hpstage.torch.backends.stacked.planning import ALIGNMENT, Plan
from hpstage.torch.backends.stacked.rules import Call
from hpstage.torch.backends.stacked.tracing import Trace

Value = Tensor | list[Tensor]
"""The form of a value for all members: stacked along a new first dimension, or one by one."""


@dataclass(frozen=True)
class Program:
    """A function ``run(inputs, streams) -> (loss, gradients, kept, logged)`` for a number of members.

    ``inputs`` are the inputs of the trace without its constants. Those at the indices ``shared`` are one tensor for all
    members; if :data:`STREAM` is in ``shared``, all streams are in one state. Of the other inputs, parameters and
    hyperparameters are stacked, and ``kept`` and tensors of the batch are lists. The losses and logged values, of shape
    (members,), and the gradients are stacked.
    """

    width: int
    run: Callable[..., tuple[Tensor | None, list[Tensor], list[list[Tensor]], list[Tensor]]]
    shared: frozenset[int]
    source: str


def program(trace: Trace, plan: Plan) -> Program:
    return _Writer(trace, plan).program()


class _Writer:
    def __init__(self, trace: Trace, plan: Plan) -> None:
        self._trace = trace
        self._plan = plan
        self._names: dict[str, Any] = {"stack": torch.stack}
        self._known: dict[Any, str] = {}
        self._numbers: dict[Node, int] = {node: index for index, node in enumerate(trace.graph.nodes)}
        self._lines: list[str] = []
        self._there: set[str] = set()
        self._inputs = trace.inputs[: len(trace.inputs) - len(trace.constants)]
        first, last = len(trace.trained), len(trace.trained) + len(trace.kept)
        parameters, values = self._inputs[:first], self._inputs[last : last + len(trace.values)]
        self._stacked = {*parameters, *values, *plan.stacked} - plan.once - plan.slow

    def program(self) -> Program:
        trace, plan, inputs = self._trace, self._plan, self._inputs
        outputs: Any = trace.graph.output_node()
        for index, node in enumerate(inputs):
            name = self._once(node) if node in plan.once else self._name(node, node in self._stacked)
            self._there.add(name)
            self._lines.append(f"{name} = inputs[{index}]")
        self._write_all()
        results = outputs.args[0]
        first = 1 + len(trace.trained)
        loss, *gradients = [self._value(node, True) for node in results[:first]]
        last = first + len(trace.kept)
        kept = [self._kept(node) for node in results[first:last]]
        logged = [f"{self._value(node, True)}.clone()" for node in results[last:]]  # perhaps a parameter's memory
        self._lines.append(f"return {loss}, [{', '.join(gradients)}], [{', '.join(kept)}], [{', '.join(logged)}]")
        source = "\n    ".join(["def run(inputs, streams):", *self._lines]) + "\n"
        exec(compile(source, f"<step of {plan.width}>", "exec"), self._names)
        return Program(plan.width, self._names.pop("run"), plan.shared, source)

    def _write_all(self) -> None:
        """Write all operations. Each value is deleted after its last use."""
        uses = last_uses(self._trace.graph)
        for node in self._trace.graph.nodes:
            if node.op != "call_function" or node in self._plan.constants:
                continue
            self._write(node)
            names = [(self._name(n, True), self._name(n, False), self._once(n)) for n in uses.get(node, ())]
            gone = [name for forms in names for name in forms if name in self._there]
            if gone:
                self._lines.append(f"del {', '.join(gone)}")
                self._there.difference_update(gone)

    def _kept(self, node: Any) -> str:
        """Return an expression for a value that is kept until the next step. It is copied if it is in the memory of a
        parameter or of a batch."""
        name = self._value(node, False)
        source = origin(node)
        first = len(self._trace.trained)
        safe = self._trace.inputs[first : first + len(self._trace.kept)]  # never changed in place
        if source is None or source in safe:
            return name
        return f"[x.clone() for x in {name}]"

    def _write(self, node: Node) -> None:
        if node in self._plan.once:
            name = self._once(node)
            text = self._expression(Call(node.target, node.args, dict(node.kwargs)), self._operand)  # type: ignore[arg-type]
            if is_random(node):
                text = f"streams.once(lambda: {text})"
        elif node in self._stacked:
            name = self._name(node, True)
            text = self._expression(self._plan.stacked[node], self._operand)
        else:
            name = self._name(node, False)
            text = self._each(node)
        self._lines.append(f"{name} = {text}")
        self._there.add(name)

    def _operand(self, node: Node) -> str:
        constants = self._plan.constants
        if node in self._plan.once:
            return self._once(node)
        return self._constant(constants[node]) if node in constants else self._value(node, True)

    def _each(self, node: Node) -> str:
        """Return an expression that does an operation member by member."""
        variables: dict[Node, str] = {}
        equal = self._plan.constants.keys() | self._plan.once
        lists = {arg: self._value(arg, False) for arg in node.all_input_nodes if arg not in equal}
        random = is_random(node)
        alone = self._plan.width == 1

        def value(arg: Node) -> str:
            if arg in equal:
                return self._operand(arg)
            if random:
                return f"{lists[arg]}[i]"
            return f"{lists[arg]}[0]" if alone else variables.setdefault(arg, f"x{len(variables)}")

        text = self._expression(Call(node.target, node.args, dict(node.kwargs)), value)  # type: ignore[arg-type]
        if random:
            return f"streams.each(lambda i: {text})"
        if alone:
            return f"[{text}]"
        if len(variables) == 1:
            ((arg, variable),) = variables.items()
            return f"[{text} for {variable} in {lists[arg]}]"
        names = ", ".join(variables.values())
        return f"[{text} for {names} in zip({', '.join(lists[arg] for arg in variables)})]"

    def _expression(self, part: Any, value: Callable[[Node], str]) -> str:
        if isinstance(part, Call):
            args = [self._expression(arg, value) for arg in part.args]
            args += [f"{name}={self._expression(arg, value)}" for name, arg in part.kwargs.items()]
            return f"{self._constant(part.function)}({', '.join(args)})"
        if isinstance(part, Node):
            return value(part)
        if isinstance(part, list | tuple) and any(isinstance(item, Node | Call) for item in part):
            return f"[{', '.join(self._expression(item, value) for item in part)}]"
        return self._constant(part)

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        key = id(value)
        if key not in self._known:
            self._known[key] = f"c{len(self._known)}"
            self._names[self._known[key]] = value
        return self._known[key]

    def _value(self, node: Any, stacked: bool) -> str:
        """Return the name of a value in stacked or listed form. Lines that convert it are written first, if needed."""
        if not isinstance(node, Node):
            return repr(node)
        if node in self._plan.constants:
            constant: Tensor = self._plan.constants[node]
            width = self._plan.width
            return self._constant(torch.stack([constant] * width) if stacked else [constant] * width)
        name, other = self._name(node, stacked), self._name(node, not stacked)
        if name not in self._there and node in self._plan.once:
            copies = f"[{self._once(node)}] * {self._plan.width}"
            self._lines.append(f"{name} = stack({copies})" if stacked else f"{name} = {copies}")
            self._there.add(name)
        elif name not in self._there:
            assert other in self._there
            if stacked:
                self._lines.append(
                    f"{name} = {other}[0].unsqueeze(0)" if self._plan.width == 1 else f"{name} = stack({other})"
                )
            elif self._plan.width == 1 or node not in self._plan.sizes or self._is_aligned(node):
                self._lines.append(f"{name} = {other}.unbind()")
            else:
                self._lines.append(f"{name} = [x.clone() for x in {other}.unbind()]")
            self._there.add(name)
        return name

    def _is_aligned(self, node: Node) -> bool:
        """Return whether each member of a stacked value is aligned like a new tensor."""
        return self._plan.strides.get(node, self._plan.sizes[node]) % ALIGNMENT == 0

    def _name(self, node: Node, stacked: bool) -> str:
        return f"{'s' if stacked else 'l'}{self._numbers[node]}"

    def _once(self, node: Node) -> str:
        return f"o{self._numbers[node]}"


def origin(node: Any) -> Node | None:
    """Return the input that a value is a view of, if any."""
    while isinstance(node, Node) and node.op == "call_function":
        if node.target is not operator.getitem and not getattr(node.target, "is_view", False):
            return None
        node = node.args[0]
    return node if isinstance(node, Node) and node.op == "placeholder" else None
