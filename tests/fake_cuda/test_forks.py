"""Forks on devices: a state that was taken, kept as bytes and loaded in another trainable continues bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hpstage.checkpoints.state_tree import reread
from tests.torch.trainables import FORK, STEPS, Averaged, ByEpoch, Small, advance, fresh, network, outcome

Made = Callable[[], Small]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "fused sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True),
    "adam": lambda params: torch.optim.Adam(params, 0.1),
    "capturable adam": lambda params: torch.optim.Adam(params, 0.1, capturable=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, 0.1, foreach=True),
    "amsgrad": lambda params: torch.optim.Adam(params, 0.1, amsgrad=True),
    "nadam": lambda params: torch.optim.NAdam(params, 0.1),
    "radam": lambda params: torch.optim.RAdam(params, 0.1),
    "adamax": lambda params: torch.optim.Adamax(params, 0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
    "adadelta": lambda params: torch.optim.Adadelta(params, 0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.1, momentum=0.9, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, 0.1),
    "asgd": lambda params: torch.optim.ASGD(params, 0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, 0.1),
}


def on(device: str, kind: type[Small] = Small, *args: Any) -> Small:
    made = kind(*args)
    made.device = device
    return made


class AveragedThere(Averaged):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        self.average.to("cuda")
        return model


class Halves(nn.Module):
    """One half of the network on each device."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(network())
        self.first = nn.Sequential(*layers[:4]).to("cuda:0")
        self.second = nn.Sequential(*layers[4:]).to("cuda:1")

    def to(self, *args: Any, **kwargs: Any) -> Halves:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to("cuda:0")).to("cuda:1"))  # type: ignore[no-any-return]


class Split(Small):
    """A model on two devices, with what training makes on the second: a mean, a list, a generator's numbers."""

    device = "cuda:0"
    devices_per_stage = 2

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.seen: list[torch.Tensor] = []
        self.mean: torch.Tensor | None = None
        return Halves()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        scores = model(x)
        return nn.functional.cross_entropy(scores, y.to(scores.device))

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = super().update(model, optimizer, batch)
        assert isinstance(loss, torch.Tensor)
        now = loss.detach()
        self.mean = now.clone() if self.mean is None else 0.9 * self.mean + 0.1 * now
        self.seen = [*self.seen[-2:], now]
        pair = torch.stack([now, now])
        self.views = pair[0], pair  # memory that training has made, and a view of it
        self.where = now.device
        return loss


CASES: dict[str, Made] = {
    **{name: lambda make=make: on("cuda", Small, lambda params, hp: make(params)) for name, make in OPTIMIZERS.items()},
    "average": lambda: on("cuda", AveragedThere),
    "epoch": lambda: on("cuda", ByEpoch),
    "split": Split,
    "second device": lambda: on("cuda:1"),
}


def devices_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.device)
    if isinstance(value, Mapping):
        return {key: devices_of(item) for key, item in value.items()}
    return [devices_of(item) for item in value] if isinstance(value, list | tuple) else None


@pytest.mark.parametrize("case", CASES)
def test_a_fork_on_a_device_equals_training_without_a_fork_bit_for_bit(case: str) -> None:
    straight = outcome(advance(fresh(CASES[case]()), 0, STEPS))
    state = reread(advance(fresh(CASES[case]()), 0, FORK).state_dict())
    forked = fresh(CASES[case]())
    forked.load_state_dict(state)
    assert outcome(advance(forked, FORK, STEPS)) == straight


def test_objects_created_by_training_are_restored_to_their_device() -> None:
    made = Split()
    trained = advance(fresh(made), 0, FORK)
    before = {name: devices_of(value) for name, value in vars(made).items()}
    optimizer = devices_of(dict(trained.optimizers()[0].state.items()))  # type: ignore[attr-defined]
    state = reread(trained.state_dict())
    other = Split()
    forked = fresh(other)
    forked.load_state_dict(state)
    assert {name: devices_of(value) for name, value in vars(other).items()} == before
    assert list(devices_of(dict(forked.optimizers()[0].state.items())).values()) == list(optimizer.values())  # type: ignore[attr-defined]
