"""The prefix of a step: the operations that depend only on the batch and on frozen tensors, divided from the rest.

A prefix is computed for one member by the operations of the member's own step, so its bits do not depend on other
members. Its results on a batch can be computed once, for all members, steps and trials that share it.
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
    """The rows of each sample of a batch in the results of a prefix. The rows of a sample depend on that sample
    only."""

    number: int
    rows: tuple[Rows, ...]


@dataclass(frozen=True, eq=False)
class Prefix:
    """A function of frozen tensors and a batch, whose results are further inputs of the rest of a step."""

    frozen: tuple[str, ...]
    """Names of the tensors that it reads, none of which a step changes."""
    batch: tuple[int, ...]
    """Indices of the tensors of the batch that it reads."""
    run: Callable[..., tuple[Tensor, ...]]
    """The function, which takes these tensors in this order."""
    samples: Samples | None = None
    """None if its operations may mix samples."""


@dataclass(frozen=True, eq=False)
class Divided:
    """A step divided into its prefix, if it has one that takes long, and the rest. The rest is a step whose batch ends
    with the results of the prefix."""

    prefix: Prefix | None
    rest: Trace


def divide(trace: Trace) -> Divided:
    """Divide a step into its prefix and the rest, which together do the same operations on the same values."""
    inputs = trace.inputs
    first = len(trace.trained)
    end = len(inputs) - len(trace.constants)
    frozen = {node: name for name, node in zip(trace.kept, inputs[first:], strict=False) if name in trace.unchanged}
    of_batch = set(inputs[end - trace.batch : end])
    known = {*frozen, *of_batch, *inputs[end:]}
    outputs: Any = trace.graph.output_node().args[0]
    ahead: set[Node] = set()
    for node in trace.graph.nodes:
        # Not in the prefix: random numbers, which change in the next step, and the step's own results, which may be
        # kept or changed in place. If an operation has several results, each is handed over by itself.
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
        # The value itself is handed over rather than several views of it.
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
        return None  # a single sample is cached as a batch
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
    for node in reversed(list(graph.nodes)):  # only the prefix needed these
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)
    return replace(trace, graph=graph)
