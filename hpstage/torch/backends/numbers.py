"""Hyperparameters as tensors in recorded code: like numbers, they are not changed by in-place operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_MODULES = ("_operator", "builtins")


def keep_numbers(graph: torch.fx.Graph, numbers: Collection[Tensor]) -> None:
    """Make in-place operators on numbers create new ones in a graph of Dynamo's, as ``w = self.hp["gamma"]; w += 1``
    does.

    A value that code computes from numbers by Python's operators alone is a number: it cannot be changed in place.

    Args:
        numbers: the inputs that stand for numbers.
    """
    known: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            given = getattr(node.meta.get("grapharg"), "example", None)
            if any(given is number for number in numbers):
                known.add(node)
        elif node.op == "call_function" and getattr(node.target, "__module__", None) in _MODULES:
            given = node.args[:1]
            if known.issuperset(given) and (made := out_of_place(node.target)) is not None:
                node.target = made
            if node.all_input_nodes and known.issuperset(node.all_input_nodes):
                known.add(node)


def out_of_place(function: Any) -> Callable[..., Any] | None:
    """Return the out-of-place operator of one that changes its first argument."""
    name = getattr(function, "__name__", "").strip("_")
    if not name.startswith("i") or getattr(operator, name, None) is None:
        return None
    found: Callable[..., Any] | None = getattr(operator, name[1:], None) or getattr(operator, f"{name[1:]}_", None)
    return found
