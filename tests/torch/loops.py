"""Training functions of the tests: how a loop begins, what a step does, and how one is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpstage.checkpoints.state_tree import clone, digest
from hpstage.training.function import FunctionTrainable
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import network, samples, sgd

HP = {"lr": 0.1, "momentum": 0.9, "batch_size": 8}
LATE = 6
"""No test of the first steps sees what happens then."""
Parts = tuple[nn.Module, torch.optim.Optimizer]


def begun(run: Run, **more: Any) -> Parts:
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer, **more)
    return model, optimizer


def stepped(run: Run, parts: Parts, extra: Any = 0.0) -> torch.Tensor:
    model, optimizer = parts
    x, y = samples()
    batch = run.indices(len(x), 8)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[batch]), y[batch]) + extra
    loss.backward()
    optimizer.step()
    run.report(loss=loss.item())
    return loss.detach()


def anchor(model: nn.Module, weights: Any) -> Any:
    return 0.0 if weights is None else (next(model.parameters()) - weights).square().sum()


def made(function: Callable[[Run], Any]) -> FunctionTrainable:
    trainable = as_trainable(function)
    assert isinstance(trainable, FunctionTrainable)
    trainable.setup(HP)
    return trainable


def trained(function: Callable[[Run], Any], steps: int) -> FunctionTrainable:
    trainable = made(function)
    for step in range(steps):
        trainable.train(step, HP)
    return trainable


class Swallowing:
    """A context manager that decides when it is left."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is ValueError


def assert_forks_continue(function: Callable[[Run], Any]) -> None:
    """Fork a training function at three steps, and a fork of each from memory: all end as it does straight through."""
    straight = trained(function, LATE + 5)
    expected = digest(straight.state_dict())
    straight.close()
    for fork in (1, LATE, LATE + 2):
        first = trained(function, fork)
        state = clone(first.state_dict())
        first.close()
        forked = made(function)
        forked.load_state_dict(state)
        assert digest(forked.state_dict()) == digest(state)
        for step in range(fork, LATE + 4):
            forked.train(step, HP)
        again = clone(forked.state_dict())
        forked.load_state_dict(again)
        forked.train(LATE + 4, HP)
        assert digest(forked.state_dict()) == expected, fork
        forked.close()
