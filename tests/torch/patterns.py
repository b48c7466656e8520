"""Training code as people write it, with state in places that no ``state_dict()`` contains."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from tests.torch.trainables import Small, samples, sgd

COUNTS: dict[str, int] = {"steps": 0}
total_seen = 0


def scaled(loss: torch.Tensor, count: float) -> torch.Tensor:
    """A loss that shows what was counted."""
    return loss * (1 + 0.05 * count)


class DictOfTensors(Small):
    def __init__(self) -> None:
        super().__init__()
        self.means = {"loss": torch.zeros(())}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.means["loss"] = 0.9 * self.means["loss"] + 0.1 * loss.detach()
        return loss + 0.1 * self.means["loss"] * loss


class ListOfLosses(Small):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.losses.append(loss.item())
        return scaled(loss, sum(self.losses[-5:]))


class Deque(Small):
    def __init__(self) -> None:
        super().__init__()
        self.window: deque[torch.Tensor] = deque(maxlen=3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.window.append(loss.detach())
        return loss * torch.stack(list(self.window)).mean()


class Array(Small):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.counts[batch[1].numpy()] += 1
        return scaled(super().loss(model, batch), float(self.counts[0]))


class WithAveragedModel(Small):
    """torch's exponential moving average of weights, evaluated."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return model

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        self.average.update_parameters(model)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return super().evaluate(self.average.eval())


class DeepCopied(Small):
    """A teacher, copied from the model, that follows it."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for mean, now in zip(self.teacher.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.2)
        return super().loss(model, batch) + nn.functional.mse_loss(model(batch[0]), self.teacher(batch[0]))


class Ema:
    """Averaged weights as many scripts have them: swapped in for evaluation."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.backup: dict[str, torch.Tensor] = {}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * parameter.detach()

    def swap_in(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.backup[name] = parameter.data.clone()
            parameter.data.copy_(self.shadow[name])

    def swap_out(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(self.backup[name])
        self.backup.clear()


class WithEma(Small):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        self.ema = Ema(model, 0.9)
        return model

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        self.ema.update(model)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.ema.swap_in(model)
        try:
            return super().evaluate(model)
        finally:
            self.ema.swap_out(model)


class SecondModel(Small):
    """A second model with an optimizer of its own."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.critic = nn.Linear(3, 1)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        return super().model(hp)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        self.critic_optimizer.zero_grad()
        self.critic(model(batch[0]).detach()).square().mean().backward()
        self.critic_optimizer.step()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) + 0.1 * self.critic(model(batch[0])).mean().abs()


class Scaler(Small):
    """A GradScaler made in ``__init__``, which is the natural way to write it."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {**super().evaluate(model), "scale": float(self.scaler.get_scale())}


class AnsweredScaler(Scaler):
    """The same, answered for by ``extra_state()``."""

    def extra_state(self) -> Any:
        return self.scaler.state_dict()

    def load_extra_state(self, state: Any) -> None:
        self.scaler.load_state_dict(state)


class OwnGenerator(Small):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)
        self.python = random.Random(2)
        self.numpy = np.random.default_rng(3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.rand((), generator=self.noise) + self.python.random() + float(self.numpy.random())
        return super().loss(model, batch) * noise


class Noisy(Dataset[Any]):
    """Samples with noise from a generator of the data set's own."""

    def __init__(self) -> None:
        self.x, self.y = samples()
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.3 * float(self.rng.normal()), self.y[index]


class NoisyData(Small):
    data_version = "1"

    def dataset(self) -> Any:
        return Noisy()


class ModuleGlobal(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        global total_seen
        total_seen += len(batch[1])
        COUNTS["steps"] += 1
        return scaled(super().loss(model, batch), COUNTS["steps"] + total_seen / 100)


class ClassAttribute(Small):
    calls = 0
    by_class: ClassVar[Counter[int]] = Counter()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        type(self).calls += 1
        self.by_class.update(batch[1].tolist())
        return scaled(super().loss(model, batch), self.calls + self.by_class[0])


def counting() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def count(loss: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
        nonlocal calls
        calls += 1
        seen.append(calls)
        return scaled(loss, calls + len(seen))

    return count


class Closure(Small):
    """A closure's variable, and a default argument that is changed."""

    count = staticmethod(counting())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.count(super().loss(model, batch))


class CountingOptimizer(torch.optim.SGD):
    """Counters that are attributes of the optimizer, in no ``state_dict()`` of it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1 / self.calls)
        return super().step(closure)


class OptimizerCounter(Small):
    def __init__(self) -> None:
        super().__init__(lambda parameters, hp: CountingOptimizer(parameters, hp["lr"]))


class Float32Momentum(torch.optim.Optimizer):
    """float32 momentum under bfloat16 weights, which ``load_state_dict()`` would round."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                parameter.add_((-group["lr"] * state["momentum"]).to(parameter.dtype))


class BFloat16(Small):
    def __init__(self) -> None:
        super().__init__(lambda parameters, hp: Float32Momentum(parameters, hp["lr"]))

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return super().model(hp).to(torch.bfloat16)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, (batch[0].to(torch.bfloat16), batch[1])).float()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, samples()))}


class Accumulating(Small):
    """Gradients are kept from step to step, and applied after every third."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        (self.loss(model, batch) / 3).backward()
        self.batches += 1
        if self.batches % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


class Scheduled(Small):
    """A learning rate scheduler of torch's, on a field that follows no hyperparameter."""

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=hp["momentum"])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        return optimizer

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        self.scheduler.step()

    def group_values(self, group: dict[str, Any], hp: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"momentum": hp["momentum"]}


class ChannelsLast(Small):
    """A fused optimizer, whose kernel pairs weights and momentum by their place in memory."""

    def __init__(self) -> None:
        super().__init__(lambda parameters, hp: torch.optim.SGD(parameters, lr=hp["lr"], momentum=0.9, fused=True))

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
        )
        return model.to(memory_format=torch.channels_last)


class Unfreezing(Small):
    """Layers that are trained from the fourth step on, and a parameter group that comes with them."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        model[0].requires_grad_(False)  # type: ignore[index]
        self.steps = 0
        return model

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return sgd([p for p in model.parameters() if p.requires_grad], hp)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.steps += 1
        if self.steps == 4:
            model[0].requires_grad_(True)  # type: ignore[index]
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": self.hp["lr"], "momentum": 0.9})  # type: ignore[index]
        super().update(model, optimizer, batch)


class Aliases(Small):
    """Names for existing memory: the best weights so far, which look at the model's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}
        self.last: list[Any] = [None, None]
        self.table: dict[str, list[int]] = defaultdict(list)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if not self.kept:
            self.kept = dict(model.state_dict())
        self.last = [self.last[1], self.last]
        self.last[1] = None
        self.table["sizes"].append(len(batch[1]))
        return loss + 0.01 * sum(value.float().abs().sum() for value in self.kept.values()) + len(self.table["sizes"])


class EvaluatingCounts(Small):
    """What evaluating leaves behind must not matter to training, nor to the next evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations = 0
        self.best = 0.0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return scaled(super().loss(model, batch), self.evaluations)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.evaluations += 1
        model.train()
        metrics = super().evaluate(model)
        self.best = max(self.best, metrics["loss"])
        return {**metrics, "best": self.best}


class Settings(Small):
    """Settings of the process that one trial changes: half-way, and while its model is made."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.steps = 0
        torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == 4:
            torch.set_default_dtype(torch.float32)
            np.seterr(over="ignore")
        noise = torch.rand(()).to(torch.float64)  # drawn otherwise in float32
        return super().loss(model, (batch[0].to(torch.float64), batch[1])) * (1 + noise)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = samples()
        return {"loss": float(nn.functional.cross_entropy(model(x.to(torch.float64)), y))}


class GradientsMeasured(Small):
    """It reports the norm of the last step's gradients."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        norms = [0.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()]
        return {**super().evaluate(model), "norm": sum(norms)}


class GradientsCollated(Small):
    """Batches are scaled by the norm of the last step's gradients."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.net = super().model(hp)
        return self.net

    def collate(self, samples: list[Any]) -> Any:
        norm = sum(0.0 if p.grad is None else float(p.grad.norm()) for p in self.net.parameters())
        return torch.stack([x for x, _ in samples]) * (1 + norm), torch.stack([y for _, y in samples])


class Remembering(torch.optim.SGD):
    """Half of the gradients that were zeroed are added to the next ones."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["zeroed"] = parameter.grad.clone()
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if "zeroed" in self.state[parameter]:
                parameter.grad.add_(self.state[parameter]["zeroed"], alpha=0.5)
        super().step(closure)


class KeepingZeroed(Small):
    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return Remembering(model.parameters(), lr=hp["lr"], momentum=hp["momentum"])


PATTERNS: dict[str, Callable[[], Small]] = {
    "a dict of tensors": DictOfTensors,
    "a list": ListOfLosses,
    "a deque of tensors": Deque,
    "an array": Array,
    "an AveragedModel": WithAveragedModel,
    "a deep-copied module": DeepCopied,
    "an EMA object": WithEma,
    "a second model and optimizer": SecondModel,
    "a GradScaler made in __init__": Scaler,
    "a GradScaler answered for by extra_state": AnsweredScaler,
    "generators of its own": OwnGenerator,
    "a generator of the data set's": NoisyData,
    "globals": ModuleGlobal,
    "attributes of the class": ClassAttribute,
    "a closure and a default argument": Closure,
    "a counter of the optimizer's": OptimizerCounter,
    "float32 momentum under bfloat16 weights": BFloat16,
    "accumulated gradients": Accumulating,
    "an attached scheduler": Scheduled,
    "channels_last under a fused optimizer": ChannelsLast,
    "layers that thaw": Unfreezing,
    "two names for one tensor": Aliases,
    "evaluate() that counts": EvaluatingCounts,
    "settings of the process": Settings,
    "gradients that evaluate() reads": GradientsMeasured,
    "gradients that collate() reads": GradientsCollated,
    "an optimizer that keeps the gradients it zeroes": KeepingZeroed,
}
