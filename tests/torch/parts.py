"""Parts of training code, of which trainables are put together at random."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import random
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import hpstage.torch

# --- optimizers

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, foreach=True),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "fused adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "amsgrad": lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True, foreach=True),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.5, centered=True),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
    "radam": lambda p, lr: torch.optim.RAdam(p, lr=lr),
    "rprop": lambda p, lr: torch.optim.Rprop(p, lr=lr),
    "adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr),
    "tensor lr": lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr), foreach=False),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=60, cycle_momentum=False),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
}

# --- averages of weights


class OwnAverage:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name] = self.shadow[name].lerp(parameter.detach(), 0.3)

    def value(self) -> float:
        return sum(float(value.double().sum()) for value in self.shadow.values())


class Copied:
    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mean, now in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 0.3)

    def value(self) -> float:
        return sum(float(p.double().sum()) for p in self.model.parameters())


class Library:
    def __init__(self, model: nn.Module) -> None:
        self.model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))

    def update(self, model: nn.Module) -> None:
        self.model.update_parameters(model)

    def value(self) -> float:
        return sum(float(p.detach().double().sum()) for p in self.model.parameters())


class Swapped(OwnAverage):
    """Memory is exchanged, not values."""

    def update(self, model: nn.Module) -> None:
        super().update(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone(memory_format=torch.preserve_format)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    "AveragedModel": Library,
    "own class": OwnAverage,
    "deepcopy": Copied,
    "new memory": Swapped,
}

# --- objects that count, wherever they are kept


@dataclass
class Record:
    count: float = 0.0
    seen: list[float] = dataclasses.field(default_factory=list)

    def add(self, x: float) -> float:
        self.count += 1
        self.seen.append(x)
        return self.count + sum(self.seen[-3:])


class Slotted:
    __slots__ = ("count", "past")

    def __init__(self) -> None:
        self.count = 0
        self.past: Slotted | None = None

    def add(self, x: float) -> float:
        self.count += 1
        return self.count + x


class Point(typing.NamedTuple):
    x: float
    inner: list[float]


TOTAL = 0.0
BOX: dict[str, Any] = {"count": 0}


class Shared:
    count = 0.0
    kept: typing.ClassVar[list[float]] = []


def by_global(x: float) -> float:
    global TOTAL
    TOTAL += x
    BOX["count"] += 1
    return TOTAL + BOX["count"]


def by_class(x: float) -> float:
    Shared.count += 1
    Shared.kept.append(x)
    return Shared.count + len(Shared.kept)


def by_default(x: float, seen: list[float] = []) -> float:  # noqa: B006
    seen.append(x)
    return len(seen) + seen[0]


def by_attribute(x: float) -> float:
    by_attribute.count = getattr(by_attribute, "count", 0) + 1  # type: ignore[attr-defined]
    return by_attribute.count + x  # type: ignore[attr-defined,no-any-return]


def closure() -> Callable[[float], float]:
    count = 0
    past: collections.deque[float] = collections.deque(maxlen=2)

    def add(x: float) -> float:
        nonlocal count
        count += 1
        past.append(x)
        return count + sum(past)

    return add


def _list(kept: Any, x: float) -> float:
    kept.append(x)
    return len(kept) + float(kept[0])


def _dict(kept: Any, x: float) -> float:
    kept[len(kept)] = {"x": x, "past": kept.get(len(kept) - 1)}
    return len(kept) + float(kept[0]["x"])


def _deque(kept: Any, x: float) -> float:
    kept.appendleft(torch.tensor(x))
    return float(sum(kept))


def _set(kept: Any, x: float) -> float:
    kept.add(len(kept) * 3)
    return float(sum(kept)) / 10


def _ordered(kept: Any, x: float) -> float:
    kept[str(len(kept) % 4)] = x
    kept.move_to_end(next(iter(kept)))
    return float(next(iter(kept.values()))) + len(kept)


def _counter(kept: Any, x: float) -> float:
    kept[round(x)] += 1
    return float(sum(kept.values()))


def _default(kept: Any, x: float) -> float:
    kept["a"].append(x)
    return len(kept["a"])


def _array(kept: Any, x: float) -> float:
    kept[1:] += x
    return float(kept.sum())


def _tensor(kept: Any, x: float) -> float:
    kept.mul_(0.5).add_(x)
    return float(kept.sum())


def _python(kept: Any, x: float) -> float:
    return kept.random() + x


def _numpy(kept: Any, x: float) -> float:
    return float(kept.random()) + x


def _torch(kept: Any, x: float) -> float:
    return float(torch.rand((), generator=kept)) + x


def _namespace(kept: Any, x: float) -> float:
    kept.count = getattr(kept, "count", 0) + 1
    return kept.count + x


def _raw(kept: Any, x: float) -> float:
    kept[0] += x
    return float(kept[0])


def _point(kept: Any, x: float) -> float:
    kept.inner.append(x)
    return len(kept.inner) + kept.x


def _made(kept: Any, x: float) -> float:
    kept.append(Record(x))
    kept[0].count += 1
    del kept[3:]
    return float(sum(item.count for item in kept))


def _self(kept: Any, x: float) -> float:
    kept.append(kept)
    return len(kept)


def _view(kept: Any, x: float) -> float:
    whole, part = kept
    part += x
    return float(whole.sum())


def _made_views(kept: Any, x: float) -> float:
    if not kept:
        kept.append(torch.zeros(4))
        kept.append(kept[0][1:3])
        kept.append(kept[0].numpy())
    kept[1].add_(x)
    kept[2] += 0.25
    return float(kept[0].sum())


def _weak(kept: Any, x: float) -> float:
    key, table = kept
    table[key] = table.get(key, 0) + 1
    return table[key] + x


def _with_view() -> Any:
    whole = torch.zeros(5)
    return whole, whole[2:4]


def _with_key() -> Any:
    key = Record()
    return Key(key), weakref.WeakKeyDictionary()


class Key:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Weak:
    def __init__(self) -> None:
        self.key = Key(0)
        self.table: Any = weakref.WeakKeyDictionary({self.key: 0})

    def add(self, x: float) -> float:
        self.table[self.key] += 1
        return self.table[self.key] + x


KEEPERS: dict[str, tuple[Callable[[], Any], Callable[[Any, float], float]]] = {
    "list": (list, _list),
    "dict": (dict, _dict),
    "deque of tensors": (lambda: collections.deque(maxlen=3), _deque),
    "set": (set, _set),
    "OrderedDict": (collections.OrderedDict, _ordered),
    "Counter": (collections.Counter, _counter),
    "defaultdict": (lambda: collections.defaultdict(list), _default),
    "ndarray": (lambda: np.zeros(3), _array),
    "tensor": (lambda: torch.zeros(3), _tensor),
    "random.Random": (lambda: random.Random(1), _python),
    "numpy generator": (lambda: np.random.default_rng(1), _numpy),
    "torch generator": (lambda: torch.Generator().manual_seed(1), _torch),
    "dataclass": (Record, Record.add),
    "slots": (Slotted, Slotted.add),
    "namespace": (types.SimpleNamespace, _namespace),
    "array": (lambda: array.array("d", [0.0]), _raw),
    "namedtuple": (lambda: Point(1.0, []), _point),
    "instances made": (list, _made),
    "itself": (list, _self),
    "a view": (_with_view, _view),
    "views made": (list, _made_views),
    "weak keys": (Weak, Weak.add),
    "iterator": (lambda: iter(range(1, 1000)), lambda kept, x: next(kept) + x),
}
FREE: dict[str, Callable[[], Callable[[float], float]]] = {
    "global": lambda: by_global,
    "class attribute": lambda: by_class,
    "default argument": lambda: by_default,
    "attribute of a function": lambda: by_attribute,
    "closure": closure,
}
PLACES = (
    *("self", "self in __init__", "model", "layer", "optimizer", "parameter", "nested", "tuple", "twice", "hook"),
    *("object", "array of objects"),
)

# --- the whole


@dataclass(frozen=True)
class Recipe:
    """What a trainable is put together from."""

    optimizer: str = "sgd"
    scheduler: str = "none"
    scheduler_in_optimizer: bool = False
    form: str = "float32"
    average: str = "none"
    keepers: tuple[tuple[str, str], ...] = ()
    free: tuple[str, ...] = ()
    accumulate: int = 1
    clip: bool = False
    scaler: bool = False
    autocast: bool = False
    norm: bool = True
    dropout: bool = True
    thaw: int = 0
    counts_evaluations: bool = False


class Holder(nn.Module):
    """A layer that does nothing but hold something."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Composed(hpstage.torch.TorchTrainable):
    device = "cpu"
    batch_size = 4
    data_version = "1"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.adders: list[Callable[[float], float]] = [FREE[name]() for name in recipe.free]
        self.kept: dict[str, Any] = {}
        self.evaluations = 0
        self.batches = 0
        self.last = 0.0
        for number, (name, place) in enumerate(recipe.keepers):
            if place == "self in __init__":
                setattr(self, f"kept_{number}", KEEPERS[name][0]())
        if recipe.scaler:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        recipe = self.recipe
        convolution = recipe.form == "channels_last"
        layers: list[nn.Module] = [nn.Conv2d(2, 3, 3) if convolution else nn.Flatten()]
        layers += [] if convolution else [nn.Linear(32, 6)]
        if recipe.norm:
            layers.append(nn.BatchNorm2d(3) if convolution else nn.BatchNorm1d(6))
        layers += [nn.ReLU(), *([nn.Dropout(0.2)] if recipe.dropout else []), nn.Flatten()]
        layers += [Holder(), nn.Linear(12 if convolution else 6, 3)]
        model = nn.Sequential(*layers)
        if convolution:
            model = model.to(memory_format=torch.channels_last)
        if recipe.form == "bfloat16":
            model = model.to(torch.bfloat16)
        if recipe.thaw:
            model[0 if convolution else 1].requires_grad_(False)
        self.average = AVERAGES[recipe.average](model)
        self.cells: list[Callable[[], Any]] = []
        for number, (name, place) in enumerate(recipe.keepers):
            self._keep(model, number, KEEPERS[name][0](), place)
        return model

    def _keep(self, model: Any, number: int, kept: Any, place: str) -> None:
        name = f"kept_{number}"
        if place == "self":
            setattr(self, name, kept)
        elif place == "model":
            setattr(model, name, [kept])  # a bare tensor or module would be registered
        elif place == "layer":
            setattr(model[-2], name, (kept,))
        elif place == "parameter":
            setattr(model[-1].weight, name, kept)
        elif place == "nested":
            self.kept[name] = [0, {"a": collections.OrderedDict(b=(1, [kept]))}]
        elif place == "tuple":
            self.kept[name] = (kept, 2)
        elif place == "twice":
            self.kept[name] = kept
            setattr(self, name, [kept, kept])
        elif place == "object":
            self.kept[name] = Key(kept)
        elif place == "array of objects":
            array_ = np.empty(2, dtype=object)
            array_[0] = kept
            self.kept[name] = array_
        elif place == "hook":
            held = [kept]

            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                assert held

            model[-1].register_forward_hook(hook)
            self.kept[name] = held
        elif place == "optimizer":
            self.kept[name] = kept

    def _found(self, model: Any, optimizer: Any, number: int, place: str) -> Any:
        name = f"kept_{number}"
        if place in ("self", "self in __init__"):
            return getattr(self, name)
        if place == "model":
            return getattr(model, name)[0]
        if place == "layer":
            return getattr(model[-2], name)[0]
        if place == "parameter":
            return getattr(model[-1].weight, name)
        if place == "nested":
            return self.kept[name][1]["a"]["b"][1][0]
        if place in ("tuple", "array of objects", "hook"):
            return self.kept[name][0]
        if place == "twice":
            return getattr(self, name)[1]
        if place == "object":
            return self.kept[name].inner
        return getattr(optimizer, name)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        recipe = self.recipe
        # torch's schedulers refuse a group that is added later: with one, what thaws is in a group from the beginning.
        parameters = [p for p in model.parameters() if p.requires_grad or recipe.scheduler != "none"]
        optimizer = OPTIMIZERS[recipe.optimizer](parameters, hp["rate"])
        for number, (_, place) in enumerate(recipe.keepers):
            if place == "optimizer":
                setattr(optimizer, f"kept_{number}", self.kept.pop(f"kept_{number}"))
        scheduler = SCHEDULERS[recipe.scheduler](optimizer)
        if recipe.scheduler_in_optimizer:
            optimizer.scheduler = scheduler  # type: ignore[attr-defined]
        else:
            self.scheduler = scheduler
        return optimizer

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(20, 2, 4, 4, generator=generator), torch.arange(20) % 3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        if self.recipe.form == "bfloat16":
            x = x.to(torch.bfloat16)
        return nn.functional.cross_entropy(model(x).float(), y)

    def update(self, model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        recipe = self.recipe
        self.batches += 1
        if recipe.thaw and self.batches == recipe.thaw:
            frozen = [p for p in model.parameters() if not p.requires_grad]
            for parameter in frozen:
                parameter.requires_grad_(True)
            if recipe.scheduler == "none":
                optimizer.add_param_group({"params": frozen})
        extra = self.evaluations * 0.1
        for number, (name, place) in enumerate(recipe.keepers):
            extra += KEEPERS[name][1](self._found(model, optimizer, number, place), round(self.last, 3))
        for add in self.adders:
            extra += add(round(self.last, 3))
        context: Any = torch.autocast("cpu", torch.bfloat16) if recipe.autocast else contextlib.nullcontext()
        with context:
            loss = self.loss(model, batch) * (1 + 0.01 * min(extra, 50.0)) * self.hp["scale"]
        loss = loss / recipe.accumulate
        (self.scaler.scale(loss) if recipe.scaler else loss).backward()
        self.last = float(loss.detach())
        if self.batches % recipe.accumulate == 0:
            self._step(model, optimizer)
        if self.average is not None:
            self.average.update(model)

    def _step(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        recipe = self.recipe
        if recipe.scaler:
            self.scaler.unscale_(optimizer)
        if recipe.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if recipe.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        scheduler = optimizer.scheduler if recipe.scheduler_in_optimizer else self.scheduler  # type: ignore[attr-defined]
        if recipe.scheduler == "plateau":
            scheduler.step(self.last)
        elif scheduler is not None:
            scheduler.step()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self.recipe.counts_evaluations:
            self.evaluations += 1
            model.train()
            torch.rand(3)
        metrics = {"loss": float(self.loss(model, self.dataset().tensors)), "last": self.last}
        if self.average is not None:
            metrics["average"] = self.average.value()
        return metrics
