"""Loops as scripts have them are forked at any step: each step sets its variables before it reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpstage.training.run import Run
from tests.torch.loops import LATE, Swallowing, assert_forks_continue, begun, stepped
from tests.torch.trainables import network, samples, sgd

pytestmark = [pytest.mark.sampled(16), pytest.mark.forks]


def temporaries(run: Run) -> float:
    parts = begun(run)
    loss = total = None
    try:
        for step in run.steps():
            total = 0.0
            for index in range(3):
                total += index
            values = [float(value) * total for value in range(step + 1)]
            loss = stepped(run, parts, sum(values) * 0.01)
            if float(loss) > 1e9:
                break
            try:
                last = loss / step
            except ZeroDivisionError as error:
                print(error)  # noqa: T201
                last = loss
            del values
        print(total, last)  # noqa: T201
    finally:
        print(loss)  # noqa: T201
    return float(loss)  # type: ignore[arg-type]


def enumerated(run: Run) -> None:
    parts = begun(run)
    for _, step in enumerate(run.steps()):
        stepped(run, parts, step)


def by_epochs(run: Run) -> None:
    """As scripts have it; what loops over the steps never ends."""
    parts = begun(run)
    for _epoch in range(3):
        for step in run.steps():
            loss = stepped(run, parts, step)
        print(loss)  # noqa: T201


def loaded(run: Run) -> None:
    """A step is a pass over the data."""
    parts = begun(run)
    loader = DataLoader(TensorDataset(*samples()), batch_size=8, shuffle=True)
    for _ in run.steps():
        for x, y in loader:
            parts[1].zero_grad()
            nn.functional.cross_entropy(parts[0](x), y).backward()
            parts[1].step()
        run.report(loss=0.0)


def set_for_inner_functions(run: Run) -> None:
    def train() -> None:
        def weighted() -> float:
            return weight + 0.1 * step

        stepped(run, parts, weighted())

    parts = begun(run)
    for step in run.steps():  # noqa: B007  # train() reads it
        weight = run.hp["lr"]
        train()


def closures(run: Run) -> None:
    parts = begun(run)
    x, y = samples()
    for _ in run.steps():
        batch = run.indices(len(x), 8)

        def closure() -> Any:
            parts[1].zero_grad()
            loss = nn.functional.cross_entropy(parts[0](x[batch]), y[batch])  # noqa: B023
            loss.backward()
            return loss.item()

        parts[1].step(closure)
        scales = [float(x[batch].sum()) * scale for scale in range(3)]
        run.report(loss=sum(scales))


def in_contexts(run: Run) -> None:
    parts = begun(run)
    context = torch.autocast("cpu", torch.bfloat16)
    without, nothing = torch.no_grad(), contextlib.nullcontext()
    for _ in run.steps():
        with context:
            stepped(run, parts)
        with without, nothing:
            parts[0](samples()[0])


def other_names(run: Run) -> None:
    """What looks at the memory of what is attached is filled with it."""
    parts = begun(run)
    model, optimizer = parts
    parameters, groups = list(model.parameters()), optimizer.param_groups
    weights, arrays = model.state_dict(), [p.detach().numpy() for p in parameters]
    rates = [group["lr"] for group in groups]
    for _ in run.steps():
        stepped(run, parts, sum(p.abs().sum() for p in weights.values()) + float(arrays[0].sum()) + rates[0])
        nn.utils.clip_grad_norm_(parameters, 1.0)


def teachers(run: Run) -> None:
    parts = begun(run)
    teacher, criterion = network().eval().requires_grad_(False), nn.MSELoss()
    for _ in run.steps():
        stepped(run, parts, criterion(teacher(samples()[0]), parts[0](samples()[0])))


class Scale:
    """Something with a state of its own, whose attributes are captured with it."""

    def __init__(self) -> None:
        self.value, self.history = 1.0, [1.0]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.history[:] = state["history"]


def attached(run: Run) -> None:
    scale = Scale()
    parts = begun(run, scale=scale)
    history = scale.history
    for step in run.steps():
        if step >= LATE:
            scale.value *= 0.5
            history.append(scale.value)
        stepped(run, parts, scale.value + len(history))


def hooked(run: Run) -> None:
    """A variable that a hook of the model's changes is reached from the model."""
    count = 0

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal count
        count += 1
        return output * (1 + 0.01 * count)

    model = network()
    model.register_forward_hook(hook)
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        stepped(run, (model, optimizer), count)


def by_a_generator(run: Run) -> None:
    def pairs(x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        for step in run.steps():
            noise = x[step % len(x)]
            yield step, noise

    parts = begun(run)
    for step, noise in pairs(samples()[0]):
        stepped(run, parts, noise.sum() + step)


def drawn_by_next(run: Run) -> None:
    parts = begun(run)
    steps = iter(run.steps())
    while True:
        step = next(steps)
        stepped(run, parts, step)


class Timer:
    def __enter__(self) -> Timer:
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True


def made_in_contexts(run: Run) -> None:
    """torch's documented way to write autocast: the loss is made within, and used after the block."""
    parts = begun(run)
    loss, metrics = torch.zeros(()), {"none": 0.0}
    for _ in run.steps():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = parts[0](samples()[0]).square().mean()
        with torch.no_grad(), Timer() as timer, contextlib.nullcontext():
            metrics = {"loss": float(loss)}
            weights = [weight.mean() for weight in parts[0].parameters()]
        assert timer.left
        run.report(**metrics)
        stepped(run, parts, loss + sum(weights))


def unbound_before(run: Run) -> None:
    """What no fork has bound cannot be read there without an error, whoever swallows it."""
    parts = begun(run)
    for step in run.steps():
        with Swallowing():
            extra = step / 7
        stepped(run, parts, extra)


def read_after_batches(run: Run) -> None:
    """As scripts print it: the loss of an epoch's last batch."""
    model, optimizer = begun(run)
    loader = DataLoader(TensorDataset(*samples()), batch_size=8, shuffle=True)
    for _ in run.steps():
        for index, (x, y) in enumerate(run.batches(loader), 1):  # noqa: B007
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for x, _ in run.batches(loader):
            shift = x.mean()
            break
        model.last = loss.item() + index + shift.item()
        run.report(loss=loss.item())


EXACT = [
    made_in_contexts,
    read_after_batches,
    unbound_before,
    temporaries,
    enumerated,
    by_epochs,
    loaded,
    closures,
    set_for_inner_functions,
    in_contexts,
    other_names,
    teachers,
    attached,
    hooked,
    by_a_generator,
    drawn_by_next,
]


@pytest.mark.ci
@pytest.mark.parametrize("function", EXACT)
def test_ordinary_loops_continue_exactly_after_a_fork(function: Callable[[Run], Any]) -> None:
    assert_forks_continue(function)
