"""Clean-up of a recorded graph: it removes operations that have no effect, and values after their last use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import extract_val, make_fx
from torch.fx.graph import CodeGen

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.lift_fresh_copy.default}

_FILLED: dict[Any, Any] = {
    _aten.ones_like.default: _aten.ones.default,
    _aten.zeros_like.default: _aten.zeros.default,
    _aten.empty_like.default: _aten.empty.memory_format,
}
"""Operations that use only the shape of their argument, and their replacements. Their results belong to no member."""


def lift_constants(recorded: GraphModule) -> tuple[Graph, list[Any]]:
    """Turn the constants of a recorded graph into further inputs. Return the graph and the constants, most often
    tensors."""
    graph = recorded.graph
    graph.set_codegen(CodeGen())  # its inputs are flat
    inputs: dict[Any, Node] = {}
    last = graph.find_nodes(op="placeholder")[-1]
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in inputs:
            with graph.inserting_after(last):
                last = inputs[node.target] = graph.placeholder(f"constant_{len(inputs)}")
            constant = getattr(recorded, str(node.target))
            last.meta["val"] = extract_val(constant) if isinstance(constant, Tensor) else None
        node.replace_all_uses_with(inputs[node.target])
        graph.erase_node(node)
    return graph, [getattr(recorded, str(name)) for name in inputs]


def without_mutations(graph: Graph, inputs: Sequence[Tensor]) -> Graph:
    """Return a graph that computes the same without operations that write to tensors: the graph itself if it has none,
    else a new recording."""
    if not any(node.target._schema.is_mutable for node in graph.nodes if isinstance(node.target, OpOverload)):
        return graph
    run = partial(Interpreter(GraphModule({}, graph)).run, enable_io_processing=False)
    return make_fx(functionalize(run, remove="mutations"))(*inputs).graph


def clean(graph: Graph) -> None:
    """Remove copies and aliases, which are equal to their originals, and all operations on which no output depends."""
    for node in list(graph.nodes):
        if isinstance(node.target, OpOverload) and None in node.kwargs.values():  # explicit defaults change no call
            optional = {argument.name for argument in node.target._schema.arguments if argument.has_default_value()}
            node.kwargs = {k: v for k, v in node.kwargs.items() if v is not None or k not in optional}
        if node.op == "call_function" and node.target in _SAME and _form(node) == _form(node.args[0]):
            node.replace_all_uses_with(node.args[0])
        elif node.op == "call_function" and node.target in _FILLED and node.meta["val"].is_contiguous():
            value = node.meta["val"]
            with graph.inserting_before(node):
                made = graph.call_function(
                    _FILLED[node.target], (list(value.shape),), {"dtype": value.dtype, "device": value.device}
                )
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)


def is_random(node: Node) -> bool:
    """Return whether an operation draws from torch's generator. If so, it must be done even if nothing uses its
    result."""
    if node.target is _aten._scaled_dot_product_flash_attention_for_cpu.default and not any(node.args[3:4]):
        return False  # without dropout
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """Return, for each node, the nodes whose values it is the last to use; a node whose value nothing uses counts as
    its own last user."""
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(list(graph.nodes)):
        for arg in (node, *node.all_input_nodes):
            if arg not in seen:
                seen.add(arg)
                last.setdefault(node, []).append(arg)
    return last


def is_strided(node: Any) -> bool:
    """Return whether a value is a tensor other than a sparse one."""
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.layout is torch.strided


def _form(node: Any) -> object:
    if not is_strided(node):
        return object()  # equal to no other
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype
