"""A GPT on a mixture of two texts that ship with Python: prose (pydoc's topics) and code (modules of its library).

The network is that of ``gpt.py``, and tokens are bytes, too. A step is a batch of windows, drawn from the sources by
the weights ``mixture.prose`` and ``mixture.code``. The metrics are nats per byte of held-out text, for each source and
on average.

    hpstage train hpstage.workloads.mixed_gpt:MixedGPT runs --steps 400 --set lr=0.001 --set seed=0 \
        --set mixture.prose=0.8 --set mixture.code=0.2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.workloads.gpt import EVALUATED, GPT

if TYPE_CHECKING:
    import optuna

SOURCES = {"prose": ("pydoc_data.topics",), "code": ("argparse", "typing", "inspect", "tarfile", "doctest")}
"""For each source, the modules whose files are its text."""


class MixedGPT(hpstage.torch.TorchTrainable):
    """A GPT on the mixture, trained by AdamW."""

    batch_size = 32

    def __init__(self, layers: int = 4, heads: int = 4, width: int = 128, block: int = 128) -> None:
        self.sizes = (layers, heads, width, block)

    def dataset(self) -> hpstage.torch.Mixture:
        length = self.sizes[-1] + 1  # a window and the byte after it
        sources, self.held_out = {}, {}
        for name, modules in SOURCES.items():
            text = np.frombuffer(b"".join(map(_source, modules)), dtype=np.uint8)
            windows = torch.from_numpy(text[: len(text) // length * length].copy()).view(-1, length)
            training = len(windows) * 9 // 10
            sources[name] = TensorDataset(windows[:training].clone())
            self.held_out[name] = windows[training :: max(1, (len(windows) - training) // EVALUATED)].clone()
        return hpstage.torch.Mixture(sources)

    def model(self, hp: Mapping[str, s.Scalar]) -> nn.Module:
        return GPT(*self.sizes, dropout=0.0)

    def optimizer(self, model: nn.Module, hp: Mapping[str, s.Scalar]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=hp["lr"], betas=(0.9, 0.95))  # type: ignore[arg-type]

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        tokens = batch[0].long()
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        losses = {f"loss_{name}": self.loss(model, [windows]).item() for name, windows in self.held_out.items()}
        return {"loss": sum(losses.values()) / len(losses), **losses}


def _source(module: str) -> bytes:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_bytes()


def space(trial: optuna.Trial, steps: int = 400) -> dict[str, s.Schedule | s.Scalar]:
    """Trials share a trunk, and differ in the mixture of the last fifth, in which the learning rate decays."""
    decay = steps - steps // 5
    code = trial.suggest_float("code", 0.1, 0.9)
    return {
        "lr": s.wsd(1e-3, steps, warmup=steps // 20, decay=steps // 5),
        "mixture.prose": s.piecewise({0: 0.8, decay: 1 - code}),
        "mixture.code": s.piecewise({0: 0.2, decay: code}),
    }
