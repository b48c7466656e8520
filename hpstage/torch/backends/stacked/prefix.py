"""The prefix of a step: what depends on its batch and on frozen tensors alone, divided from the rest of the step.

A member's prefix is computed by itself, by the operations of its own step: whatever others have in common with it, its
bits are the same. So what it gives on a batch can be computed once, for members, steps and trials that share it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from hpstage.torch.backends.stacked.cleaning import is_random
from hpstage.torch.backends.stacked.planning import is_heavy
from hpstage.torch.backends.stacked.program import origin
from hpstage.torch.backends.stacked.samples import Rows, rows_of
from hpstage.torch.backends.stacked.tracing import Trace


class Samples(NamedTuple):
    """Where the results of a prefix have the samples of a batch, each of which depends on that sample alone."""

    number: int
    rows: tuple[Rows, ...]


@dataclass(frozen=True, eq=False)
class Prefix:
    """A function of frozen tensors and a batch, whose results are further inputs of the rest of a step."""

    frozen: tuple[str, ...]
    """Names of the tensors that it reads, none of which a step changes."""
    batch: tuple[int, ...]
    """Places of the tensors of the batch that it reads."""
    run: Callable[..., tuple[Tensor, ...]]
    """The function, which takes these tensors in this order."""
    samples: Samples | None = None
    """None if its operations may mix samples."""


@dataclass(frozen=True, eq=False)
class Divided:
    """A step as its prefix, if it has one that takes long, and the rest: a step whose batch has the results of the
    prefix as further tensors at its end."""

    prefix: Prefix | None
    rest: Trace


def divide(trace: Trace) -> Divided:
    """Divide a step. The two together are the same operations on the same values."""
    inputs = trace.inputs
    first = len(trace.trained)
    end = len(inputs) - len(trace.constants)
    frozen = {node: name for name, node in zip(trace.kept, inputs[first:], strict=False) if name in trace.unchanged}
    of_batch = set(inputs[end - trace.batch : end])
    known = {*frozen, *of_batch, *inputs[end:]}
    outputs: Any = trace.graph.output_node().args[0]
    ahead: set[Node] = set()
    for node in trace.graph.nodes:
        # Random numbers are others in the next step; a result may be kept, or be changed in place. Of an operation with
        # several, each is handed over by itself.
        if node.op != "call_function" or is_random(node) or not known.issuperset(node.all_input_nodes):
            continue
        if node in outputs or any(user in outputs for user in node.users if user.target is operator.getitem):
            continue
        known.add(node)
        if not of_batch.isdisjoint(node.all_input_nodes):
            of_batch.add(node)
            if origin(node) is None:
                ahead.add(node)
    if not any(map(is_heavy, ahead)):
        return Divided(None, trace)
    for node in reversed(list(trace.graph.nodes)):
        # Of several views of a value, the value is handed over.
        if node in ahead and _is_whole_view(node) and any(user not in ahead for user in node.users):
            ahead.remove(node)
    handed = [node for node in trace.graph.nodes if node in ahead and any(user not in ahead for user in node.users)]
    return Divided(_prefix(trace, _needed(handed), frozen, handed), _rest(trace, ahead, handed, end))


def _is_whole_view(node: Node) -> bool:
    value, source = node.meta["val"], node.args[0]
    if not getattr(node.target, "is_view", False) or not isinstance(value, Tensor) or not isinstance(source, Node):
        return False
    whole: Tensor = source.meta["val"]
    return value.numel() == whole.numel()


def _needed(handed: Sequence[Node]) -> set[Node]:
    needed, open = set(handed), list(handed)
    while open:
        more = set(open.pop().all_input_nodes) - needed
        needed |= more
        open += more
    return needed


def _prefix(trace: Trace, needed: set[Node], frozen: dict[Node, str], handed: Sequence[Node]) -> Prefix:
    inputs, end = trace.inputs, len(trace.inputs) - len(trace.constants)
    batch = inputs[end - trace.batch : end]
    values = [value for node, value in zip(inputs[end:], trace.constants, strict=True) if node in needed]
    graph, copies = Graph(), dict[Node, Node]()
    for node in (*inputs, *trace.graph.nodes):
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in handed))
    made = GraphModule({}, graph)
    read = [node for node in batch if node in needed]
    return Prefix(
        tuple(frozen[node] for node in inputs if node in needed and node in frozen),
        tuple(index for index, node in enumerate(batch) if node in needed),
        lambda *tensors: made.forward(*tensors, *values),
        _samples(read, [node for node in trace.graph.nodes if node in needed], handed),
    )


def _samples(batch: Sequence[Node], needed: Sequence[Node], handed: Sequence[Node]) -> Samples | None:
    shapes = [node.meta["val"].shape for node in batch]
    counts = {shape[0] if shape else 1 for shape in shapes}
    if len(counts) != 1 or (count := counts.pop()) < 2:
        return None  # what there is of one sample is kept with the batch
    rows = rows_of(needed, batch, count)
    if rows is None or any(node.meta["val"].shape[rows[node].dim] != count * rows[node].of_sample for node in handed):
        return None
    return Samples(count, tuple(rows[node] for node in handed))


def _rest(trace: Trace, ahead: set[Node], handed: Sequence[Node], end: int) -> Trace:
    graph, copies = Graph(), dict[Node, Node]()
    inputs = trace.inputs
    for node in inputs[:end]:
        copies[node] = graph.node_copy(node)
    for node in handed:
        copies[node] = graph.placeholder(f"ahead_{node.name}")
        copies[node].meta = dict(node.meta)
    for node in inputs[end:]:
        copies[node] = graph.node_copy(node)
    for node in trace.graph.nodes:
        if node.op == "call_function" and node not in ahead:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs: Any = trace.graph.output_node().args[0]
    graph.output([copies.get(node, node) if isinstance(node, Node) else node for node in outputs])
    for node in reversed(list(graph.nodes)):  # what only the prefix needed
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)
    return replace(trace, graph=graph)
