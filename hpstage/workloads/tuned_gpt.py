"""A GPT that is fine-tuned on a text file: LoRA in all of its blocks, by hand or by PEFT, or its last blocks.

The network is that of ``gpt.py``, and tokens are bytes, too. A step is a batch of windows of the file; the metric is
nats per byte of held-out text. The embedding, which is also the last layer, is frozen.

    export GPT_TEXT=input.txt
    hpstage run hpstage.workloads.tuned_gpt:TunedGPT hpstage.workloads.tuned_gpt:space \
        --metric loss --direction minimize --steps 1000 --n-trials 24
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hpstage.workloads.fine_tuning import FineTuned, Part, space
from hpstage.workloads.gpt import EVALUATED, GPT, read

__all__ = ["TunedGPT", "space"]


class TunedGPT(FineTuned):
    """The fine-tuned network; ``part`` and ``base``: see :class:`FineTuned`.

    Args:
        text: the file; by default the environment variable GPT_TEXT, else ``input.txt`` in the working directory.
        block: length of the context, in bytes.
    """

    adapted = ("qkv", "out")

    def __init__(
        self,
        text: str | None = None,
        *,
        part: Part = "lora",
        base: str | None = None,
        layers: int = 6,
        heads: int = 6,
        width: int = 384,
        block: int = 256,
    ) -> None:
        super().__init__(part, base)
        self.text = os.path.abspath(text or os.environ.get("GPT_TEXT", "input.txt"))
        self.sizes = (layers, heads, width, block)

    def dataset(self) -> TensorDataset:
        block = self.sizes[-1]
        training, validation = (torch.from_numpy(np.array(tokens)) for tokens in read(self.text, block))
        self.held_out = validation.unfold(0, block + 1, max(1, (len(validation) - block) // EVALUATED)).contiguous()
        return TensorDataset(training.unfold(0, block + 1, max(1, block // 2)).contiguous())

    def whole(self) -> nn.Module:
        return GPT(*self.sizes, dropout=0.0)

    def blocks(self, model: GPT) -> Sequence[nn.Module]:
        return [*model.blocks]

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        tokens = batch[0].long()
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": self.loss(model, [self.held_out]).item()}
