"""CUDA graphs of the fake device: what is captured runs at no time but when it is replayed, on the same memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {torch.ops.aten._linalg_eigh.default, torch.ops.aten._local_scalar_dense.default}
"""Operations that wait for the device."""

made: list[Captured] = []
"""What was captured in this process, as far as it has operations."""


class Captured:
    """Operations and the tensors that they were captured with. Results have no values until the first replay."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0


class Graph:
    def __init__(self) -> None:
        self.captured = Captured()

    def replay(self) -> None:
        self.captured.replays += 1
        for function, args, kwargs, results in self.captured.calls:
            with torch.no_grad(), _unseen((args, kwargs, results)):
                found = function(*args, **kwargs)
                if _is_made(function):
                    for to, value in zip(_tensors(results), _tensors(found), strict=True):
                        to.copy_(value)


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if tensor.device.type != "cuda":
                raise RuntimeError(f"CUDA error: {function} during stream capture of a tensor on {tensor.device}")
        if function in _WAITING:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({function})")
        if _is_made(function):
            with torch.random.fork_rng(devices=[]):
                results = function(*args, **kwargs)
            for tensor in _tensors(results):
                tensor.fill_(math.nan if tensor.is_floating_point() else 1)
        elif function._schema.is_mutable:
            results = args[0]
        else:
            return function(*args, **kwargs)  # a view
        self._graph.captured.calls.append((function, args, kwargs, results))
        return results


def _is_made(function: Any) -> bool:
    """Return whether the results of an operation have memory of their own."""
    return not any(result.alias_info for result in function._schema.returns) and not function._schema.is_mutable


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


@contextmanager
def _unseen(values: Any) -> Iterator[None]:
    """What a graph writes is not an operation of torch's: it counts no version of a tensor."""
    with ExitStack() as stack:
        for tensor in _tensors(values):
            if not tensor.is_inference():
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        yield


class Pool:
    """Memory of graphs. torch takes none into one of which all graphs are gone."""

    def __init__(self) -> None:
        self.graphs: WeakSet[Graph] | None = None


@contextmanager
def _graph(graph: Graph, pool: Pool, stream: torch.Stream, capture_error_mode: str) -> Iterator[None]:
    assert pool.graphs is None or pool.graphs, "use_count > 0"
    pool.graphs = pool.graphs or WeakSet()
    pool.graphs.add(graph)
    with torch.cuda.stream(stream), torch.no_grad(), _Capture(graph):
        yield
    if graph.captured.calls:
        made.append(graph.captured)


def install(cuda: Any) -> None:
    cuda.CUDAGraph = Graph
    cuda.graph = _graph
    cuda.graph_pool_handle = Pool
