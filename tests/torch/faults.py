"""Training code that is not exact: what no state holds, what is another in every process, what one trial leaves to the
next. Each with what ``hpstage check`` says of it."""

from __future__ import annotations

import copy
import csv
import functools
import itertools
import os
import random
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hpstage.training.run import Run
from tests.torch.patterns import CountingOptimizer, Ema, Float32Momentum, scaled
from tests.torch.trainables import Small, network, samples, sgd

# --- the 14 patterns of hidden state, where nothing that hpstage can see holds them -----------------------------------


def measured(model: nn.Module) -> float:
    x, y = samples()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x), y).item()
    model.train()
    return loss


def loop(
    hold: Callable[[nn.Module], Any],
    use: Callable[[Any, nn.Module, torch.Tensor], torch.Tensor],
    after: Callable[[Any, nn.Module], None] = lambda held, model: None,
) -> Callable[[Run], None]:
    """An ordinary loop with a local variable ``held`` that is not attached."""

    def train(run: Run) -> None:
        x, y = samples()
        model = network()
        optimizer = sgd(model.parameters(), run.hp)
        held = hold(model)
        run.attach(model=model, optimizer=optimizer)
        for _ in run.steps():
            batch = run.indices(len(x), 8)
            optimizer.zero_grad()
            use(held, model, nn.functional.cross_entropy(model(x[batch]), y[batch])).backward()
            optimizer.step()
            after(held, model)
            if run.wants_report:
                run.report(loss=measured(model))

    return train


def _mean(held: dict[str, torch.Tensor], model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    held["loss"] = 0.9 * held["loss"] + 0.1 * loss.detach()
    return loss + 0.1 * held["loss"] * loss


def _listed(held: list[float], model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    held.append(loss.item())
    return scaled(loss, sum(held[-5:]))


def _windowed(held: deque[float], model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    held.append(loss.item())
    return scaled(loss, sum(held))


def _counted(held: np.ndarray[Any, Any], model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    held += 1
    return scaled(loss, float(held[0]))


def _near(held: nn.Module, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    pairs = zip(held.parameters(), model.parameters(), strict=True)
    return loss + 0.1 * sum(nn.functional.mse_loss(now, mean.detach()) for mean, now in pairs)


def _follow(held: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mean, now in zip(held.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 0.3)


def _shadowed(held: Ema, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return loss + 0.1 * sum((p - held.shadow[name]).square().sum() for name, p in model.named_parameters())


def _critic() -> tuple[nn.Module, torch.optim.Optimizer]:
    critic = nn.Linear(3, 1)
    return critic, torch.optim.Adam(critic.parameters(), lr=0.1)


def _criticised(held: Any, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    critic, optimizer = held
    optimizer.zero_grad()
    critic(torch.ones(3)).square().sum().backward()
    optimizer.step()
    return loss + 0.1 * critic(torch.ones(3)).detach().abs().sum() * loss


def _rescaled(held: Any, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    held._growth_tracker = (held._growth_tracker or 0) + 1
    return scaled(loss, float(held._growth_tracker))


def _noisy(held: torch.Generator, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return loss * torch.rand((), generator=held)


class Augmented(Dataset[Any]):
    """Samples with noise from a generator of their own."""

    def __init__(self) -> None:
        self.x, self.y = samples()
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.3 * float(self.rng.normal()), self.y[index]


def _augmented(held: Augmented, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return loss + nn.functional.cross_entropy(model(held[0][0][None]), held[0][1][None])


class Tracker:
    """Anything with a count."""

    def __init__(self) -> None:
        self.seen = 0


def _tracked(held: Tracker, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    held.seen += 8
    return scaled(loss, held.seen / 8)


class Own:
    """A trainable of five methods, that keeps its states itself."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=hp["lr"], momentum=0.9)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.optimizer.param_groups[0]["lr"] = hp["lr"]
        self.optimizer.zero_grad()
        self.loss(torch.randn(8, 4, dtype=self.model.weight.dtype)).backward()
        self.optimizer.step()

    def evaluate(self) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(self.loss(torch.ones(3, 4, dtype=self.model.weight.dtype)).float())}

    def state_dict(self) -> Any:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Counts(Own):
    """Counters that are attributes of the optimizer, in no ``state_dict()`` of it."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        super().setup(hp)
        self.optimizer = CountingOptimizer(self.model.parameters(), hp["lr"])


class Cast(Own):
    """float32 momentum under bfloat16 weights; torch casts it to their dtype on loading."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.model = nn.Linear(4, 2).to(torch.bfloat16)
        self.optimizer = Float32Momentum(self.model.parameters(), hp["lr"])


# --- what is in no state ----------------------------------------------------------------------------------------------


class Drops(Own):
    """load_state_dict() that forgets the optimizer."""

    def load_state_dict(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])


class Stale(Own):
    """state_dict() that gives a copy, which is made every third step."""

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        super().train(step, hp)
        if step % 3 == 0:
            self.copied = copy.deepcopy(super().state_dict())

    def state_dict(self) -> Any:
        return self.copied

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.copied = state


class Loader(Small):
    """Batches from a DataLoader's iterator of its own."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.batches = iter(DataLoader(TensorDataset(*samples()), batch_size=3, shuffle=True))
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, next(self.batches))


class Cycle(Small):
    def __init__(self) -> None:
        super().__init__()
        self.weights = itertools.cycle([1.0, 0.5, 0.25])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * next(self.weights)


class GeneratorFunction(Small):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.weights = self.decaying()
        return super().model(hp)

    def decaying(self) -> Iterator[float]:
        weight = 1.0
        while True:
            yield weight
            weight *= 0.9

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * next(self.weights)


def local_iterator(run: Run) -> None:
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    batches = iter(DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True))
    for _ in run.steps():
        images, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if run.wants_report:
            run.report(loss=measured(model))


class Reader(Small):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.lines = csv.reader(f"{number / 10}" for number in range(1, 100))
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * float(next(self.lines)[0])


class Graph(Small):
    """A running penalty that is never detached, and of which no gradients are requested."""

    def __init__(self) -> None:
        super().__init__()
        self.running: Any = 0.0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.running = 0.9 * float(self.running) + 0.1 * sum(weight.square().sum() for weight in model.parameters())
        return super().loss(model, batch)


class Fighting(Small):
    """A learning rate that follows the trial's schedule, and a scheduler of torch's."""

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model, hp)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        return optimizer

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        self.scheduler.step()


class Environ(Small):
    """A counter in the environment."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        os.environ["TESTS_STEPS"] = str(int(os.environ.get("TESTS_STEPS", "0")) + 1)
        return scaled(super().loss(model, batch), int(os.environ["TESTS_STEPS"]))


class Cached(Small):
    """A cache of what was computed under the values of the first step that called it."""

    @functools.lru_cache  # noqa: B019
    def scale(self) -> float:
        return float(self.hp["lr"]) * 10

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * self.scale()


def _in_the_environment(held: str, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    os.environ[held] = str(int(os.environ.get(held, "0")) + 1)
    return scaled(loss, int(os.environ[held]))


def in_the_environment() -> Callable[[Run], None]:
    return loop(lambda model: "TESTS_STEPS", _in_the_environment)


# --- what is another in every process ---------------------------------------------------------------------------------


class Clock(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return scaled(super().loss(model, batch), time.time() % 1)


class SetOrder(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        names = list({"crop", "flip", "rotate", "colour", "blur", "noise"})
        return scaled(super().loss(model, batch), names.index("flip"))


class TextHash(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return scaled(super().loss(model, batch), hash("fold 1") % 97)


class Address(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return scaled(super().loss(model, batch), (id(model) >> 12) % 97)


class Entropy(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return scaled(super().loss(model, batch), os.urandom(1)[0] + secrets.randbelow(100) + uuid.uuid4().int % 7)


class Unseeded(Small):
    """A generator that the system seeds."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.rng = np.random.default_rng()
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * float(self.rng.random())


class SeedsByTime(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        torch.manual_seed(time.time_ns())
        return super().loss(model, batch)


class HostName(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return scaled(super().loss(model, batch), len(os.environ.get("HOSTNAME", "")))


class Background(Small):
    """A thread that works during training."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.ticks = 0
        threading.Thread(target=self.tick, daemon=True).start()
        return super().model(hp)

    def tick(self) -> None:
        while True:
            self.ticks += 1
            time.sleep(1e-5)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return scaled(super().loss(model, batch), self.ticks)


class RandomSplit(Small):
    """Data that are split by the clock."""

    def dataset(self) -> TensorDataset:
        x, y = samples()
        return TensorDataset(x[random.Random(time.time_ns()).sample(range(len(x)), 20)], y[:20])


# --- what counts for the whole process --------------------------------------------------------------------------------


class SetsThreads(Small):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        torch.set_num_threads(2)
        return super().model(hp)


class SetsPrecision(Small):
    """A setting that one kind of trial changes and none puts back."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        if hp["wide"]:
            torch.set_float32_matmul_precision("high")
        return super().model(hp)


NAMED: dict[str, tuple[Callable[[], object], str]] = {
    "counters of an optimizer": (Counts, r"self\.optimizer\.calls"),
    "momentum that loading casts": (Cast, r"momentum(?s:.)*another form"),
    "state that loading drops": (Drops, r"momentum_buffer"),
    "a stale state": (Stale, r"something old"),
    "a DataLoader's iterator": (Loader, r"self\.batches"),
    "a DataLoader's iterator in a local variable": (lambda: local_iterator, r"local variable batches"),
    "itertools.cycle": (Cycle, r"self\.weights.* position"),
    "a generator function": (GeneratorFunction, r"self\.weights .*position"),
    "the position of a reader": (Reader, r"self\.lines "),
    "a tensor with its graph": (Graph, r"self\.running is .*graph"),
    "a scheduler that fights a schedule": (Fighting, r"lr of param group 0 follows"),
    "a counter in the environment": (Environ, r"TESTS_STEPS|os\.environ|in no state"),
    "a cache": (Cached, r"cache"),
    "the clock": (Clock, r"Clock\.loss .* names time\.time"),
    "the order of a set": (SetOrder, r"order of a set"),
    "hash() of a string": (TextHash, r"hash\(\) of a string"),
    "an address": (Address, r"names id"),
    "entropy": (Entropy, r"names os\.urandom"),
    "a generator without a seed": (Unseeded, r"self\.rng"),
    "seeding by the clock": (SeedsByTime, r"the global generator of torch"),
    "a variable of the host's": (HostName, r"names os\.environ"),
    "a thread during training": (Background, r"self\.ticks"),
    "data split by the clock": (RandomSplit, r"the workload's data"),
    "torch.set_num_threads()": (SetsThreads, r"process\.threads"),
}
"""What is not exact, and what the report says of it."""


# --- what torch's own state_dict() would lose, and hpstage makes exact ------------------------------------------------


class LeavesTrainMode(Small):
    """evaluate() that trains on: its mode, and BatchNorm's running statistics."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        model.train()
        return super().evaluate(model)


class Forgets(Own):
    """setup() that does not begin with a count of zero."""

    seen = 0

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.seen += 1
        super().train(step, {**hp, "lr": hp["lr"] / self.seen})

    def state_dict(self) -> Any:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.seen = state["seen"]


class SeedsConstantly(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return super().loss(model, batch)


HELD: dict[str, Callable[[], object]] = {
    "a dict of tensors": lambda: loop(lambda m: {"loss": torch.zeros(())}, _mean),
    "a list": lambda: loop(lambda m: [], _listed),
    "a deque": lambda: loop(lambda m: deque(maxlen=3), _windowed),
    "an array": lambda: loop(lambda m: np.zeros(2), _counted),
    "an AveragedModel": lambda: loop(
        lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        lambda held, m, loss: _near(held.module, m, loss),
        lambda held, m: held.update_parameters(m),
    ),
    "a deep-copied module": lambda: loop(copy.deepcopy, _near, _follow),
    "an EMA object": lambda: loop(lambda m: Ema(m, 0.9), _shadowed, lambda held, m: held.update(m)),
    "a second model and optimizer": lambda: loop(lambda m: _critic(), _criticised),
    "a GradScaler": lambda: loop(lambda m: torch.amp.GradScaler("cpu"), _rescaled),
    "a generator of its own": lambda: loop(lambda m: torch.Generator(), _noisy),
    "a generator of the data set's": lambda: loop(lambda m: Augmented(), _augmented),
    "an unattached object": lambda: loop(lambda m: Tracker(), _tracked),
}
"""What local variables of an ordinary loop hold, which is in its state."""

EXACT: dict[str, Callable[[], object]] = {
    "evaluate() that leaves training mode": LeavesTrainMode,
    "setup() that forgets": Forgets,
    "seeding with a constant": SeedsConstantly,
    "a setting for one kind of trial": SetsPrecision,
    **HELD,
}
