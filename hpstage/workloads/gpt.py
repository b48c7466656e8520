"""A GPT on a text file, trained by an ordinary loop, with the warm-up-stable-decay schedule.

The network has nanoGPT's shape (https://github.com/karpathy/nanoGPT): pre-norm blocks of causal attention and an MLP,
no biases, learned positions, and the output tied to the embedding. AdamW decays only matrices; gradients are clipped.
Tokens are bytes, so that any file is a data set. The file is mapped into memory, so that only batches are read.

The loop is a function of hpstage's ``run``. Windows begin at random bytes, as in nanoGPT, drawn from torch's generator,
which hpstage seeds at each step: no position is part of a state. Branches of the decay share their trunk (arXiv
2405.18392).

    export GPT_TEXT=input.txt    # https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    hpstage run hpstage.workloads.gpt:TrainGPT hpstage.workloads.gpt:space \
        --metric loss --direction minimize --steps 5000 --n-trials 12
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import hpstage
from hpstage import schedule as s

if TYPE_CHECKING:
    import optuna

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


EVALUATED = 64
"""Number of evenly spaced windows of held-out text on which the loss is measured."""


class Block(nn.Module):
    """Causal self-attention, then an MLP; each has normalised input, and its output is added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        wide, narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + functional.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)), dropout)
        return x + functional.dropout(self.mlp(self.norm2(x)), dropout)


class GPT(nn.Module):
    """Computes the logits of the next byte: (batch, length) to (batch, length, 256)."""

    def __init__(self, layers: int, heads: int, width: int, block: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:  # scaled down in layers whose outputs add up in the stream
                ends = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream: Tensor = self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))
        return stream @ self.tokens.weight.T


def read(text: str, block: int) -> tuple[Bytes, Bytes]:
    """Return the first nine tenths of a file for training and the rest for validation, mapped into memory.

    Raises:
        hpstage.errors.UsageError: there is no such file, or it is too short for a block.
    """
    if not Path(text).is_file():
        raise hpstage.errors.UsageError(
            f"there is no file {text}: give a text file as `text`, or in the environment variable GPT_TEXT"
        )
    size = Path(text).stat().st_size
    if size // 10 <= block:
        raise hpstage.errors.UsageError(
            f"{text} has {size:,} bytes; a block of {block} bytes needs {10 * (block + 1):,}. Give a longer file or "
            f"a smaller block"
        )
    tokens = np.memmap(text, dtype=np.uint8, mode="r")
    return tokens[: size * 9 // 10], tokens[size * 9 // 10 :]


def windows(tokens: Bytes, starts: list[int], block: int, device: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both int64 of shape (len(starts), block). A target is the byte after an input."""
    taken = torch.from_numpy(np.stack([tokens[start : start + block + 1] for start in starts])).to(device).long()
    return taken[:, :-1], taken[:, 1:]


class TrainGPT:
    """The training function. A step is a batch; the metric is nats per byte of held-out text.

    Args:
        text: the file; by default the environment variable GPT_TEXT, else ``input.txt`` in the working directory.
        block: length of the context, in bytes.
    """

    def __init__(
        self, text: str | None = None, *, layers: int = 6, heads: int = 6, width: int = 384, block: int = 256
    ) -> None:
        self.text = os.path.abspath(text or os.environ.get("GPT_TEXT", "input.txt"))
        self.layers, self.heads, self.width, self.block = layers, heads, width, block

    def __call__(self, run: hpstage.Run) -> None:
        hp: Any = run.hp
        device = "cuda" if torch.cuda.is_available() else "cpu"
        training, validation = read(self.text, self.block)
        held_out = np.linspace(0, len(validation) - self.block - 1, EVALUATED).astype(int).tolist()
        model = GPT(self.layers, self.heads, self.width, self.block).to(device)
        matrices = [weight for weight in model.parameters() if weight.dim() > 1]
        vectors = [weight for weight in model.parameters() if weight.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=hp["lr"], betas=(0.9, 0.95))
        run.attach(model=model, optimizer=optimizer)  # from now on, "lr" follows its schedule
        for _ in run.steps():
            hp = run.hp
            starts = torch.randint(len(training) - self.block, (hp["batch_size"],)).tolist()
            inputs, targets = windows(training, starts, self.block, device)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if run.wants_report:
                model.eval()
                with torch.no_grad():
                    inputs, targets = windows(validation, held_out, self.block, device)
                    run.report(loss=functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))
                model.train()


def space(trial: optuna.Trial, steps: int = 5000) -> dict[str, s.Schedule | s.Scalar]:
    """For each peak, one trunk, and decays of three shapes that begin at 60, 80 or 90 % of training."""
    peak = trial.suggest_categorical("lr", [1e-3, 3e-4])
    decay = steps * trial.suggest_categorical("decay_percent", [10, 20, 40]) // 100
    shape: Any = trial.suggest_categorical("decay_form", ["linear", "cosine", "1-sqrt"])
    return {"lr": s.wsd(peak, steps, warmup=steps // 50, decay=decay, decay_form=shape), "batch_size": 64}
