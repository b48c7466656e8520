"""The cost of a model, as metrics for searches with several objectives: size, operations, latency.

::

    class Digits(hpstage.torch.TorchTrainable):
        noisy = ("latency",)

        def evaluate(self, model):
            sample = self.test_x[:1]
            return {"accuracy": ..., "bytes": measure.bytes_of(model), "flops": measure.flops(model, sample),
                    "latency": measure.latency(model, sample)}

:func:`bytes_of` and :func:`flops` are functions of the model alone. :func:`latency` is measured: name its metric in
``noisy``. What training itself costs needs no metric: ``metric=["accuracy", "hpstage:seconds"]``; see
:mod:`hpstage.search.costs`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from hpstage.training.identity import accelerators


def bytes_of(model: torch.nn.Module) -> int:
    """Return the bytes of parameters and buffers; shared memory counts once."""
    memory = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(memory.values())


def flops(model: torch.nn.Module, *inputs: Any) -> int:
    """Return the floating-point operations of a forward pass in matrix products, convolutions and attention."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return int(counter.get_total_flops())


def latency(model: torch.nn.Module, *inputs: Any, repeats: int = 20) -> float:
    """Return the median seconds of a forward pass, after a first pass that does not count. Noisy: it differs between
    machines, and if other processes are running."""
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    taken = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            began = time.perf_counter()
            model(*inputs)
            accelerators.synchronize(device)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])
