"""GraphedBackend: trains a whole step as one CUDA graph of the kernels of eager training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from hpstage.errors import TrainingError
from hpstage.torch.backends.compiled import CompiledBackend
from hpstage.torch.trainable import TorchTrainable

Function = Callable[[list[Any]], Sequence[Any]]


class GraphedBackend(CompiledBackend):
    """Records a step as a CUDA graph and replays it, so that the GPU no longer waits for Python.

    It traces a step like :class:`~hpstage.torch.backends.compiled.CompiledBackend`; a step that cannot be traced runs
    as it is. No code is generated, so it needs no compiler. Parameters, buffers and the optimizer's state are changed
    in place; each batch is copied into the tensors of the recorded one. The optimizer counts its steps on the GPU. If
    the user overrides ``update``, torch records the loss and its backward pass, and copies the parameters for the
    graph.
    """

    numerics: ClassVar[str] = "graphed-v3"
    begins: ClassVar[float] = 1.5  # measured for tracing: 1.3 for two linear layers, 6 for a ResNet-20
    _static: ClassVar[bool] = True

    def __init__(self, subject: TorchTrainable, device: torch.device) -> None:
        super().__init__(subject, device)
        self._capturing: _Capturing | None = None

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"CUDA graphs need a GPU, and this trains on {device.type}"
        return cls._lacks_tracing()

    @classmethod
    def describe(cls) -> dict[str, str]:
        return {}

    def release(self) -> None:
        super().release()
        if self._capturing is not None:
            self._capturing.release()

    def lower(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._dynamo.backends.registry import lookup_backend

        if self._own_update:
            made: Callable[..., Any] = lookup_backend("cudagraphs")(graph, inputs)  # type: ignore[arg-type]
            return made
        new = [_is_of_batch(node) for node in graph.graph.nodes if node.op == "placeholder"]

        def record(module: torch.fx.GraphModule, arguments: Sequence[Any]) -> Function:
            function, reason = _as_cuda_graph(module, arguments, new, self._shared)
            if reason is not None:
                self._say(reason, "a CUDA graph")
            return function

        lowered: Any = aot_autograd(
            fw_compiler=boxed_nop, inference_compiler=record, keep_inference_input_mutations=True
        )
        return lowered(graph, inputs)  # type: ignore[no-any-return]

    def _shared(self) -> _Capturing:
        if self._capturing is None:
            self._capturing = _Capturing(type(self.subject).__name__, self.device)
        return self._capturing


def _is_of_batch(node: torch.fx.Node) -> bool:
    """Return whether an argument of the traced function belongs to the batch."""
    source: Any = getattr(node.meta.get("grapharg"), "source", None)
    while hasattr(source, "base"):
        source = source.base
    return getattr(source, "local_name", None) == "batch"


class _Capturing:
    """The stream and memory that the graphs of one trainable share. Only one graph runs at a time, and its results are
    copied out of the memory.

    Args:
        who: the trainable's class, for messages.
        device: the GPU.
    """

    def __init__(self, who: str, device: torch.device) -> None:
        self.who = who
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[CudaGraph] = WeakSet()
        # torch adds no graph to a pool whose graphs are all gone. So an empty one stays, as in torch's own trees.
        self._empty = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that it is empty
            with self.capture(self._empty):
                pass

    def capture(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Other threads copy states at the same time, and may wait for events and take pinned memory.
        return torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local")

    def add(self, graph: CudaGraph) -> None:
        self._graphs.add(graph)

    def release(self) -> None:
        """Free the memory of all graphs, since the tensors with which they were recorded are gone."""
        for graph in self._graphs:
            graph.release()


class CudaGraph:
    """A function that runs as a CUDA graph. The first call runs it operation by operation, which prepares libraries;
    the second records it.

    The arguments in ``given`` are different at each call: they are copied into the recorded tensors. All others are
    static: they are read and changed in place, and the function is recorded again once the address of one changes.

    Args:
        function: takes a list of tensors, and returns results.
        given: indices of the arguments that are different each time.
        changed: indices of the arguments that the function changes.
        capturing: the stream and memory to record with.
    """

    _boxed_call = True  # torch then passes a list of arguments

    def __init__(
        self, function: Function, given: Collection[int], changed: Collection[int], capturing: _Capturing
    ) -> None:
        self._function = function
        self._given = frozenset(given)
        self._changed = frozenset(changed)
        self._capturing = capturing
        capturing.add(self)
        self._places: dict[int, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: list[int] = []
        self._results: Sequence[Any] = ()

    def __call__(self, arguments: list[Any]) -> list[Any]:
        inputs, is_first = list(arguments), not self._places
        for index in self._given:
            if is_first:
                self._places[index] = inputs[index].clone()
            else:
                self._places[index].copy_(inputs[index], non_blocking=True)
            inputs[index] = self._places[index]
        if is_first:
            results = list(self._warmed_up(inputs))
        else:
            addresses = [tensor.data_ptr() for tensor in inputs]
            if self._graph is None or addresses != self._addresses:
                self._record(inputs, addresses)
            assert self._graph is not None
            self._graph.replay()
            torch.autograd.graph.increment_version([inputs[index] for index in self._changed])  # unseen by autograd
            results = [result.clone() if isinstance(result, Tensor) else result for result in self._results]
        for index in self._changed & self._given:
            arguments[index].copy_(self._places[index])
        return results

    def _warmed_up(self, inputs: list[Any]) -> Sequence[Any]:
        current = torch.cuda.current_stream(self._capturing.stream.device)
        self._capturing.stream.wait_stream(current)
        with torch.cuda.stream(self._capturing.stream):
            results = self._function(inputs)
        current.wait_stream(self._capturing.stream)
        return results

    def release(self) -> None:
        """Free the recorded memory. The next call records the function again."""
        self._results, self._graph = (), None

    def _record(self, inputs: list[Any], addresses: list[int]) -> None:
        self.release()
        graph = torch.cuda.CUDAGraph()
        try:
            with self._capturing.capture(graph):
                self._results = self._function(list(inputs))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TrainingError(
                f"a step of {self._capturing.who} cannot be recorded as a CUDA graph: "
                f"{str(error).partition(chr(10))[0]}. Give numerics = 'eager', or 'compiled'"
            ) from error
        self._graph, self._addresses = graph, addresses


def _as_cuda_graph(
    module: torch.fx.GraphModule, arguments: Sequence[Any], new: Sequence[bool], capturing: Callable[[], _Capturing]
) -> tuple[Function, str | None]:
    """Return a function that computes a graph of operations: as a CUDA graph, with ``None``, or operation by operation,
    with the reason.

    Args:
        module: a graph of torch's operations, including changes of its arguments.
        arguments: example arguments of the graph.
        new: for each argument of the traced function, whether it is a different tensor at each step.
        capturing: returns the stream and memory to record with.
    """
    from torch._dynamo.backends.cudagraphs import check_for_skip, find_input_mutations
    from torch._dynamo.backends.debugging import boxed_nop

    function: Function = boxed_nop(module, list(arguments))
    if len(arguments) != len(new):
        return function, "several of the tensors that a step changes share memory"
    reason = check_for_skip(module, len(arguments))
    if reason is not None:
        what = reason.removeprefix("skipping cudagraphs due to ").partition(". Found from")[0]
        needs = "a graph needs all tensors of loss() on one GPU, and no operation that waits for the GPU"
        return function, f"{what}: {needs}"
    given = [index for index, is_new in enumerate(new) if is_new]
    made: Any = CudaGraph(function, given, find_input_mutations(module.graph), capturing())
    return made, None
