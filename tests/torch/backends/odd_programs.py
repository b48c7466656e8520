"""Small trainables of the kind that ordinary people write, and compilers have trouble with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.torch.trainables import Small


class Tiny(Small):
    """Little to compile: it takes long."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


class DependsOnData(Tiny):
    """Branches on what it computes."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        if out.abs().max() > 1.0:
            out = out / out.abs().max()
        return nn.functional.cross_entropy(out, batch[1])


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(4, 6), nn.Linear(12, 6)
        self.top = nn.Linear(6, 3)

    def forward(self, leaves: Tensor, tree: Any) -> Tensor:
        return self.top(self.node(leaves, tree))

    def node(self, leaves: Tensor, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return torch.tanh(self.leaf(leaves[:, tree]))
        return torch.tanh(self.join(torch.cat([self.node(leaves, part) for part in tree], 1)))


class Recursive(Tiny):
    """Recursion over trees, which are others from batch to batch."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Cell()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        at = int(batch[1].sum()) % 3
        tree = [((0, 1), (2, 3)), (0, (1, (2, 3))), (((0, 1), 2), 3)][at]
        return nn.functional.cross_entropy(model(batch[0].reshape(len(batch[0]), 16, 4), tree), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"weights": float(sum(weight.abs().sum() for weight in model.parameters()))}


class Counting(nn.Sequential):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen: list[int] = [*getattr(self, "seen", []), self.calls][-3:]
        return super().forward(x) * (1 + sum(self.seen) / 100)


class SideEffects(Tiny):
    """The model counts its calls, and computes with the count."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Counting(*super().model(hp))


class Hooked(Tiny):
    """A forward hook that averages what passes by, and hooks that scale gradients."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        self.mean = torch.zeros(3)
        model[1].register_forward_hook(self.watch)
        model[1].bias.register_hook(lambda gradient: gradient * 0.5)
        return model

    def watch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + 0.01 * self.mean.sum()


class Surgery(Tiny):
    """From its eighth batch on, half of the weights are frozen, and the model has another activation."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.batches = 0
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.batches += 1
        if self.batches == 8:
            model[2] = nn.Tanh()
            model[1].requires_grad_(False)
        return super().loss(model, batch)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        return gradients[0] * (x.abs() < 2)


class OwnAutograd(Tiny):
    """An autograd function: rounding, straight-through."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(Rounded.apply(model(batch[0])), batch[1])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({name: nn.Linear(64, 3) for name in ("odd", "even")})

    def forward(self, x: Tensor, name: str) -> Tensor:
        return self.by_name[name](x.flatten(1))


class ByName(Tiny):
    """Modules by name; which one is used depends on a hyperparameter."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Experts()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        name = "odd" if self.hp["batch_size"] % 8 else "even"
        return nn.functional.cross_entropy(model(batch[0], name), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"weights": float(sum(weight.abs().sum() for weight in model.parameters()))}


class Generators(Tiny):
    """A generator yields the parts of the loss."""

    def parts(self, model: nn.Module, batch: Any) -> Iterator[Tensor]:
        out = model(batch[0])
        yield nn.functional.cross_entropy(out, batch[1])
        for weight in model.parameters():
            yield 1e-3 * weight.square().sum()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.stack(list(self.parts(model, batch))).sum()


class Printing(Tiny):
    """Prints what it computes."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        print(f"the loss is {loss.item():.3f}")  # noqa: T201
        return loss


class Catching(Tiny):
    """Catches an error of its own in the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        try:
            if not torch.isfinite(out).all() or out.max() > 0.5:
                raise ValueError("too large")
        except ValueError:
            out = out * 0.5
        return nn.functional.cross_entropy(out, batch[1])


ODD = (
    *(DependsOnData, Recursive, SideEffects, Hooked, Surgery),
    *(OwnAutograd, ByName, Generators, Printing, Catching),
)
