"""Trainables in which something could be left out, or have another effect, where a step is recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from hpstage.torch import TorchTrainable

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
HP = {"gamma": 0.5, "beta": 0.25, "lr": 0.05, "layers": 3}


class Slip(TorchTrainable):
    device, batch_size = "cpu", 16

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def dataset(self) -> TensorDataset:
        return TensorDataset(X, Y)

    def error(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.error(model, batch)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": functional.mse_loss(model(X), Y).item()}


# --- numbers ----------------------------------------------------------------------------------------------


class Augmented(Slip):
    """The number itself, by every operator."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = other = self.hp["gamma"]
        weight += 1
        weight -= 0.25
        weight *= 2
        weight /= 3
        weight **= 2
        weight //= 0.1
        weight %= 4
        return self.error(model, batch) * weight * other * self.hp["gamma"]


class AugmentedProduct(Slip):
    """A number made of it, which has two names."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = other = self.hp["gamma"] * 2
        weight += 1
        return self.error(model, batch) * weight * other


class AugmentedElsewhere(Slip):
    def raised(self, number: float) -> float:
        number += 1
        return number

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        numbers = [self.hp["gamma"], self.hp["beta"]]
        before = list(numbers)
        numbers[1] *= 3
        return self.error(model, batch) * (self.raised(numbers[0]) + numbers[1] + before[0] + before[1])


class AugmentedGreater(Slip):
    """A number that a function of Python's has made of others."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = other = max(self.hp["gamma"], self.hp["beta"])
        weight += 1
        return self.error(model, batch) * weight * other


class AugmentedCopy(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        hp = dict(self.hp)
        hp["gamma"] += 1
        hp["layers"] += 1
        return self.error(model, batch) * hp["gamma"] * self.hp["gamma"] * hp["layers"]


class LookedUp(Slip):
    """A tensor is found in no dict."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.error(model, batch) * {0.5: 2.0}.get(self.hp["gamma"], 7.0)


class Printed(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.error(model, batch) * len(json.dumps(self.hp["gamma"]))


class Truncated(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.error(model, batch) * (int(self.hp["gamma"] * 5) + round(self.hp["beta"] * 10))


# --- hooks ------------------------------------------------------------------------------------------------


class GradientHook(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        out.register_hook(lambda gradient: gradient * 0.5)
        return functional.mse_loss(out, batch[1])


class AfterAccumulating(Slip):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_clamp)
        return model


def _clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


class BeforeAccumulating(Slip):
    """A hook on the node of autograd that accumulates, held by C++ alone."""

    stateless = ("nodes",)

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        self.nodes: list[Any] = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
        for node in self.nodes:
            node.register_prehook(lambda gradients: (gradients[0].clamp(-0.01, 0.01),))
        return model


class SavedTensors(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 0.5, lambda saved: saved):
            return self.error(model, batch)


# --- optimizers -------------------------------------------------------------------------------------------


class Clipping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-0.01, 0.01)
        return super().step(closure)


class OwnStep(Slip):
    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return Clipping(model.parameters(), lr=hp["lr"])


class Keeping(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Accumulate gradients over all steps."""


class OwnZeroing(Slip):
    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return Keeping(model.parameters(), lr=hp["lr"])


class WrappedStep(Slip):
    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer: Any = super().optimizer(model, hp)
        step = optimizer.step

        def clipped() -> Any:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            return step()

        optimizer.step = clipped
        return optimizer  # type: ignore[no-any-return]


class WithClosure(Slip):
    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=hp["lr"], max_iter=2)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        def closure() -> float:
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            return float(loss)

        return optimizer.step(closure)


# --- what loss() does besides -----------------------------------------------------------------------------


class KnowsOfCompilers(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.error(model, batch) * (0.5 if torch.compiler.is_compiling() else 1.0)


class DrawsFromNumpy(Slip):
    """Compiled code draws from torch's generator."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (self.error(model, batch) * (1 + torch.from_numpy(np.random.rand(1)).float())).sum()


class Reseeds(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        torch.manual_seed(3)
        return self.error(model, batch) * (1 + torch.rand(()))


class Clamps(Slip):
    """Weights that the loss changes."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
        return self.error(model, batch)


class Overwrites(Slip):
    """A batch that the loss changes."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(0.5)
        return self.error(model, batch)


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        out: Tensor = self.last(self.norm(self.first(x))) * (2 if self.training else 1)
        return out


class ReadsItsMode(Slip):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Modes()


class Autocast(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        return functional.mse_loss(out.float(), batch[1])


class Catches(Slip):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.error(model, batch)
        try:
            return loss * (0.5 if loss.item() > 0.1 else 1.0)
        except Exception:
            return loss * 3


NUMBERS = (Augmented, AugmentedProduct, AugmentedElsewhere, AugmentedGreater, AugmentedCopy, LookedUp, Printed)
OWN: tuple[type[Slip], ...] = (
    *(*NUMBERS, Truncated, GradientHook, AfterAccumulating, BeforeAccumulating, SavedTensors),
    *(OwnStep, OwnZeroing, WrappedStep, WithClosure),
    *(KnowsOfCompilers, DrawsFromNumpy, Reseeds, Clamps, Overwrites, ReadsItsMode, Autocast, Catches),
)


# --- what holds for the whole process ---------------------------------------------------------------------


def _clip_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.01)


def _shrink_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


class _Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is functional.mse_loss else result


class _HalvesBelow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.mse_loss.default else result


@contextmanager
def _held(register: Callable[[], Any]) -> Iterator[None]:
    handle = register()
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _clipped(step: Any) -> Any:
    def own(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        _clip_all(self, None, None)
        return step(self, closure)

    return own


PROCESS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a hook before all steps": lambda: _held(lambda: register_optimizer_step_pre_hook(_clip_all)),
    "a hook after all steps": lambda: _held(lambda: register_optimizer_step_post_hook(_shrink_all)),
    "a hook after all forwards": lambda: _held(
        lambda: modules.register_module_forward_hook(lambda m, args, out: out * 2 if type(m) is nn.Linear else None)
    ),
    "a hook before all forwards": lambda: _held(
        lambda: modules.register_module_forward_pre_hook(lambda m, args: args[0] * 2 if type(m) is nn.Linear else None)
    ),
    "a hook before all backwards": lambda: _held(
        lambda: modules.register_module_full_backward_pre_hook(lambda m, gradients: (gradients[0] * 0.1,))
    ),
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t),
    "a mode of functions": _Halves,
    "a mode of operators": lambda: _HalvesBelow(),
    "a step replaced on its class": lambda: _patched(torch.optim.SGD, "step", _clipped),
    "gradients that are never zeroed": lambda: _patched(
        torch.optim.Optimizer, "zero_grad", lambda _: lambda self, set_to_none=True: None
    ),
    "a backward replaced": lambda: _patched(
        Tensor, "backward", lambda before: lambda self, *args, **kwargs: before(self * 0.1, *args, **kwargs)
    ),
    "autocast everywhere": lambda: torch.autocast("cpu", torch.bfloat16),
}
