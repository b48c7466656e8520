"""A child-sum TreeLSTM that evaluates arithmetic expressions: batches of trees, level by level.

The network is that of Tai et al., "Improved Semantic Representations From Tree-Structured Long Short-Term Memory
Networks" (arXiv 1503.00075, section 3.1). ``collate`` makes a forest, a batch of trees of different shapes, whose nodes
are sorted by height: the recursion computes all nodes of one height, in all trees, at once. This takes a fraction of
the time needed node by node. The trees are made in expressions.py.

    hpstage run hpstage.workloads.tree_lstm:TreeLSTM hpstage.workloads.tree_lstm:space \
        --metric accuracy --direction maximize --steps 3000 --n-trials 24 --algorithm 'SuccessiveHalving(500, 2)'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import hpstage
from hpstage import schedule as s
from hpstage.workloads.expressions import WORDS, Expressions, Forest, Tree, forest

if TYPE_CHECKING:
    import optuna


class ChildSum(nn.Module):
    """Computes the logits of the value of each tree in a forest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.gates_of_word, self.gates_of_sum = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width, bias=False)
        self.forget_of_word, self.forget_of_child = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, 10)

    def forward(self, batch: Forest) -> Tensor:
        x = self.words(batch.words)
        gates, forget = self.gates_of_word(x).split(batch.sizes), self.forget_of_word(x).split(batch.sizes)
        h, c = self._cells(gates[0], torch.zeros_like(forget[0]))
        for (children, above), gate, forgetting in zip(batch.edges, gates[1:], forget[1:], strict=True):
            none = torch.zeros_like(forgetting)
            kept = torch.sigmoid(forgetting[above] + self.forget_of_child(h[children])) * c[children]
            total = self.gates_of_sum(none.index_add(0, above, h[children]))
            new_h, new_c = self._cells(gate + total, none.index_add(0, above, kept))
            h, c = torch.cat([h, new_h]), torch.cat([c, new_c])
        logits: Tensor = self.value(h[batch.roots])
        return logits

    def _cells(self, gates: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = gates.chunk(3, dim=1)
        c = torch.sigmoid(i) * torch.tanh(u) + kept
        return torch.sigmoid(o) * torch.tanh(c), c


class TreeLSTM(hpstage.torch.TorchTrainable):
    """A TreeLSTM on random expressions. A step is a batch."""

    def __init__(self, *, width: int = 128, trees: int = 5000, depth: int = 4) -> None:
        self.width, self.trees, self.depth = width, trees, depth

    def dataset(self) -> Expressions:
        self.test = Expressions(max(1, self.trees // 10), self.depth, seed=1)
        return Expressions(self.trees, self.depth, seed=0)

    def collate(self, samples: list[Tree]) -> Forest:
        return forest(samples)

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return ChildSum(self.width)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=hp["lr"], weight_decay=hp["weight_decay"])

    def loss(self, model: nn.Module, batch: Forest) -> Tensor:
        return nn.functional.cross_entropy(model(batch), batch.values)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        batch = forest([self.test[index] for index in range(len(self.test))])
        return {"accuracy": (model(batch).argmax(1) == batch.values).double().mean().item()}


def space(trial: optuna.Trial, steps: int = 3000) -> dict[str, s.Schedule | s.Scalar]:
    """The learning rate falls from some step on, exponentially or to a tenth; weight decay begins late, or never."""
    lr = trial.suggest_categorical("lr", [3e-3, 1e-3])
    begin = steps * trial.suggest_categorical("fall_from", [40, 60, 80]) // 100
    if trial.suggest_categorical("exponentially", [False, True]):
        rates = s.constant(lr).until(begin).then(s.exponential(lr, gamma=0.05 ** (1 / (steps - begin))))
    else:
        rates = s.multistep(lr, milestones=[begin], gamma=0.1)
    decayed = steps * trial.suggest_categorical("weight_decay_from", [50, 100]) // 100
    return {"lr": rates, "weight_decay": s.piecewise({0: 0.0, decayed: 0.1}), "batch_size": 64}
