"""A pretrained model of which a small part is trained: shared by the workloads on fine-tuning.

The last layer is trained, with some of the last blocks, or with LoRA (Hu et al., arXiv 2106.09685) in all blocks, by
hand or by PEFT. ``model()`` builds the whole model, as a script would. hpstage lets siblings share the frozen tensors
and stores them once; the workload need not do anything for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import hpstage
from hpstage import schedule as s

if TYPE_CHECKING:
    import optuna

Part = int | Literal["lora", "peft"]


class LoRA(nn.Module):
    """A frozen linear layer plus the product of two trained matrices, which is 0 at first."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.base(x) + self.up(self.down(x)) * self.scale
        return changed


class FineTuned(hpstage.torch.TorchTrainable):
    """A pretrained model, trained by AdamW.

    Args:
        part: the part that is trained besides the last layer. An int is a number of last blocks (0: a linear probe).
            ``"lora"`` (implemented here) and ``"peft"`` (by PEFT) add LoRA with hyperparameters ``rank`` and ``alpha``.
        base: a file with the model's ``state_dict()``; ``None``: the weights are random, to try the workload.
    """

    trained: Sequence[str] = ()
    """Names of modules that are always trained."""
    adapted: ClassVar[Sequence[str]] = ()
    """Last names of the linear layers that LoRA adapts."""

    def __init__(self, part: Part, base: str | None) -> None:
        self.part, self.base = part, base

    @abstractmethod
    def whole(self) -> nn.Module:
        """Return the model with random weights."""

    @abstractmethod
    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """Return the model's blocks in order."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = self.whole()
        if self.base is not None:
            model.load_state_dict(torch.load(self.base, weights_only=True))
        model.requires_grad_(False)
        blocks = self.blocks(model)
        last = blocks[len(blocks) - self.part :] if isinstance(self.part, int) else []
        for module in [*last, *map(model.get_submodule, self.trained)]:
            module.requires_grad_(True)
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.train(norm.weight.requires_grad)  # frozen statistics
        if self.part == "lora":
            for name, layer in [*model.named_modules()]:
                if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in self.adapted:
                    model.set_submodule(name, LoRA(layer, hp["rank"], hp["alpha"]))
        return by_peft(model, hp, self.adapted, self.trained) if self.part == "peft" else model

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        return torch.optim.AdamW(weights, lr=hp["lr"], weight_decay=hp["weight_decay"])


def by_peft(model: nn.Module, hp: Mapping[str, Any], adapted: Sequence[str], trained: Sequence[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # imported here, since only part="peft" needs it

    config = LoraConfig(
        r=hp["rank"], lora_alpha=hp["alpha"], target_modules=[*adapted], modules_to_save=[*trained] or None
    )
    made: nn.Module = get_peft_model(model, config)
    return made


def space(trial: optuna.Trial, steps: int = 1000) -> dict[str, s.Schedule | s.Scalar]:
    """24 trials: for each peak and weight decay, two trials share a warm-up and a plateau, and differ in the decay."""
    peak = trial.suggest_categorical("lr", [3e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4])
    weight_decay = trial.suggest_categorical("weight_decay", [0.1, 0.01])
    decay = steps * trial.suggest_categorical("decay_percent", [20, 60]) // 100
    rate = s.wsd(peak, steps, warmup=max(1, steps // 20), decay=decay)
    return {"lr": rate, "weight_decay": weight_decay, "batch_size": 32, "rank": 8, "alpha": 16}
