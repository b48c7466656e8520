"""GraphedBackend: a whole step as one CUDA graph, of the same kernels as eager training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from hpstage.torch.backends.compiled import CompiledBackend


class GraphedBackend(CompiledBackend):
    """Records a step as a CUDA graph and replays it, by which the GPU no longer waits for Python.

    It traces like :class:`~hpstage.torch.backends.compiled.CompiledBackend`, and what that cannot trace runs as it is.
    No code is generated, so it starts at once and needs no compiler.
    """

    numerics: ClassVar[str] = "graphed-v2"
    begins: ClassVar[float] = 0.0

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"CUDA graphs need a GPU, and this trains on {device.type}"
        return cls._lacks_tracing()

    @classmethod
    def describe(cls) -> dict[str, str]:
        return {}

    def lower(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        made: Callable[..., Any] = lookup_backend("cudagraphs")(graph, inputs)  # type: ignore[arg-type]
        return made
