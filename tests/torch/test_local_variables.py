"""Local variables are in no state: those on which later steps hang must stay as they were where the loop began.

Whenever they begin to change: verification compares the first steps alone.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hpstage.checkpoints.state_tree import clone, digest
from hpstage.errors import StateError, UsageError
from hpstage.training.function import FunctionTrainable
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import network, samples, sgd

pytestmark = [pytest.mark.sampled(16), pytest.mark.forks]

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


# --- what is refused ----------------------------------------------------------------------------------------------


def averaging_late(run: Run) -> None:
    parts = begun(run)
    swa = None
    for step in run.steps():
        stepped(run, parts)
        if step >= LATE:
            if swa is None:
                swa = AveragedModel(parts[0])
            swa.update_parameters(parts[0])


def anchored_late(run: Run) -> None:
    parts = begun(run)
    frozen = None
    for step in run.steps():
        stepped(run, parts, anchor(parts[0], frozen))
        if step == LATE:
            frozen = next(parts[0].parameters()).detach().clone()


def best_so_far(run: Run) -> None:
    parts = begun(run)
    best = 0.0
    for step in run.steps():
        loss = stepped(run, parts, best)
        if step >= LATE:
            best = min(best, float(loss) - 10)


def counting_late(run: Run) -> None:
    parts = begun(run)
    count = 0
    for step in run.steps():
        stepped(run, parts, count)
        count += step >= LATE


def listing_late(run: Run) -> None:
    parts = begun(run)
    losses: list[float] = []
    for step in run.steps():
        loss = stepped(run, parts, sum(losses))
        if step >= LATE:
            losses.append(float(loss))


def changing_an_array(run: Run) -> None:
    parts = begun(run)
    weights = np.ones(3)
    for step in run.steps():
        stepped(run, parts, float(weights[0]))
        if step >= LATE:
            weights *= 2


def changing_a_tensor_by_another_name(run: Run) -> None:
    parts = begun(run)
    weights = torch.ones(3)
    for step in run.steps():
        stepped(run, parts, weights.sum())
        if step >= LATE:
            weights.numpy()[0] += 1


class Meter:
    def __init__(self) -> None:
        self.seen = 0
        self.of = {"loss": [0.0]}


def metering_late(run: Run) -> None:
    parts = begun(run)
    meter = Meter()
    for step in run.steps():
        stepped(run, parts, sum(meter.of["loss"]))
        if step >= LATE:
            meter.of["loss"].append(1.0)


def drawing_late(run: Run) -> None:
    parts = begun(run)
    batches = iter(range(100))
    for step in run.steps():
        stepped(run, parts, next(batches) if step >= LATE else 0)


def loading_late(run: Run) -> None:
    parts = begun(run)
    batches = iter(DataLoader(TensorDataset(*samples()), batch_size=3))
    for step in run.steps():
        stepped(run, parts, next(batches)[0].mean() if step >= LATE else 0)


def counting_in_an_inner_function(run: Run) -> None:
    parts = begun(run)
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    for step in run.steps():
        stepped(run, parts, counted() if step >= LATE else 0)


def counting_in_a_function_made_anew(run: Run) -> None:
    parts = begun(run)
    count = 0
    for step in run.steps():
        stepped(run, parts, (lambda: count)())
        count += step >= LATE


def conditional(run: Run) -> None:
    parts = begun(run)
    for step in run.steps():
        if step == LATE:
            noise = torch.ones(())
        stepped(run, parts, noise if step > LATE else 0)


def caught(run: Run) -> None:
    """A value of the step before, which only a handler reads."""
    parts = begun(run)
    extra = 0.0
    for step in run.steps():
        try:
            if step >= LATE:
                raise ValueError
            stepped(run, parts)
        except ValueError:
            extra = float(stepped(run, parts, extra))


class Swallowing:
    """A context manager that decides when it is left."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is ValueError


def swallowed_by_suppress(run: Run) -> None:
    """Where an error is suppressed, the value of an earlier step is read."""
    parts = begun(run)
    extra = 0.0
    for step in run.steps():
        with contextlib.suppress(ValueError):
            if step > LATE:
                raise ValueError
            extra = float(step >= LATE)
        stepped(run, parts, extra)


def swallowed_by_a_class(run: Run) -> None:
    parts = begun(run)
    extra, guard = 0.0, Swallowing()
    for step in run.steps():
        with guard:
            if step > LATE:
                raise ValueError
            extra = float(step >= LATE)
        stepped(run, parts, extra)


def by_a_generator_of_the_users(run: Run) -> None:
    def counted() -> Iterator[int]:
        count = 0
        for step in run.steps():
            count += step >= LATE
            yield count

    parts = begun(run)
    for count in counted():
        stepped(run, parts, count)


def by_a_helper(run: Run) -> None:
    def loop(parts: Parts, weight: float) -> None:
        for step in run.steps():
            stepped(run, parts, weight)
            if step >= LATE:
                weight = 2.0

    loop(begun(run), 1.0)


def read_by_an_inner_function_before_it_is_set(run: Run) -> None:
    def train() -> None:
        stepped(run, parts, extra)

    parts = begun(run)
    extra = 0.0
    for step in run.steps():
        train()
        extra = float(step >= LATE)


REFUSED: dict[Callable[[Run], None], str] = {
    averaging_late: "local variable swa, .* it was None where .* and is a AveragedModel",
    anchored_late: "local variable frozen",
    best_so_far: r"local variable best, .* it was 0\.0 where .* and is -",
    counting_late: "local variable count, .* it was 0 where .* and is [1-9]",
    listing_late: r"local variable losses, .* it was \(\) where",
    changing_an_array: "local variable weights",
    changing_a_tensor_by_another_name: "local variable weights",
    metering_late: r"local variable meter\.of\['loss'\], .* it was \(0\.0\) where .* and is \(0\.0, 1\.0",
    drawing_late: "local variable batches, .* further on",
    loading_late: "local variable batches",
    counting_in_an_inner_function: "local variable count",
    counting_in_a_function_made_anew: "local variable count",
    read_by_an_inner_function_before_it_is_set: r"local variable train\.extra, .*train \(extra\) it sets first of all",
    conditional: "local variable noise, .* it was nothing where",
    caught: "local variable extra",
    swallowed_by_suppress: "local variable extra",
    swallowed_by_a_class: "local variable extra",
    by_a_generator_of_the_users: "local variable count",
    by_a_helper: "local variable weight",
}


@pytest.mark.parametrize("function", REFUSED)
def test_a_variable_that_changes_late_is_refused_by_name(function: Callable[[Run], None]) -> None:
    trainable = trained(function, LATE)
    trainable.state_dict()
    for step in range(LATE, LATE + 3):
        trainable.train(step, HP)
    with pytest.raises(StateError, match=REFUSED[function]) as raised:
        trainable.state_dict()
    assert re.search("Attach .* attribute of something .* function of the step; .* `stateless`", str(raised.value))
    trainable.close()


@pytest.mark.parametrize("function", [averaging_late, metering_late, counting_in_an_inner_function])
def test_a_variable_that_is_named_stateless_may_change(function: Callable[[Run], None]) -> None:
    def train(run: Run) -> None:
        function(run)

    train.stateless = ("swa", "meter", "count")  # type: ignore[attr-defined]
    trainable = trained(train, LATE + 3)
    trainable.state_dict()
    trainable.close()


def begun_anew(run: Run) -> None:
    parts = begun(run)
    steps = run.steps()
    for _ in range(3):
        for _, _ in zip(range(5), steps, strict=False):
            stepped(run, parts)


def asked_at_two_places(run: Run) -> None:
    parts = begun(run)
    steps = run.steps()
    next(steps)
    stepped(run, parts)
    while True:
        next(steps)
        stepped(run, parts)


def test_a_loop_that_begins_anew_is_refused() -> None:
    """What counts its steps is no local variable, and a fork would have it count from there."""
    with pytest.raises(UsageError, match="looped over twice"):
        trained(begun_anew, 7)


def test_steps_that_are_asked_for_at_another_place_are_refused() -> None:
    trainable = trained(asked_at_two_places, 3)
    with pytest.raises(StateError, match="asked_at_two_places waits for the next step at another place"):
        trainable.state_dict()
    trainable.close()


# --- what goes on working -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("function", EXACT)
def test_ordinary_loops_are_forked_anywhere(function: Callable[[Run], Any]) -> None:
    straight = trained(function, LATE + 4)
    expected = digest(straight.state_dict())
    straight.close()
    for fork in (1, LATE, LATE + 2):
        first = trained(function, fork)
        state = clone(first.state_dict())
        first.close()
        forked = made(function)
        forked.load_state_dict(state)
        for step in range(fork, LATE + 4):
            forked.train(step, HP)
        assert digest(forked.state_dict()) == expected, fork
        forked.close()


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, int]:
        return {"position": 0}

    def load_state_dict(self, state: Any) -> None:
        pass


def of_nothing(data: Callable[[], Any]) -> Callable[[Run], None]:
    def function(run: Run) -> None:
        begun(run)
        loader = DataLoader(data(), batch_size=8, drop_last=True)
        for _ in run.steps():
            for batch in run.batches(loader):
                loss = batch[0].mean()
            run.report(loss=loss.item())

    return function


@pytest.mark.parametrize("data", [Empty, lambda: TensorDataset(*(part[:2] for part in samples()))])
def test_an_epoch_without_a_batch_is_refused(data: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"is empty|every batch is dropped"):
        trained(of_nothing(data), 1)


def possibly_old(run: Run) -> None:
    parts = begun(run)
    for step in run.steps():
        for x in run.batches(DataLoader(TensorDataset(*samples()), batch_size=8)):
            if x[0].mean() > step:
                loss = x[0].mean()
        run.report(loss=float(loss))
        stepped(run, parts)


def test_what_only_some_batches_set_is_refused_by_name() -> None:
    with pytest.raises(StateError, match="local variable loss"):
        trained(possibly_old, LATE).state_dict()


def test_a_state_is_taken_of_a_loop_that_waits_for_its_first_step() -> None:
    trainable = made(averaging_late)
    assert trainable.state_dict()
    trainable.close()


def counted(run: Run) -> None:
    parts = begun(run)
    for count, step in enumerate(run.steps()):
        stepped(run, parts, step)
        if count > 100:
            parts[0].train()


def zipped(run: Run) -> None:
    parts = begun(run)
    for step, factor in zip(run.steps(), itertools.cycle([1.0, 1.5]), strict=False):
        stepped(run, parts, step)
        parts[0][0].weight.data.mul_(factor)


@pytest.mark.parametrize(("function", "name"), [(counted, "enumerate"), (zipped, "zip")])
def test_an_iterator_that_moves_on_with_the_steps_is_refused_by_name(function: Callable[[Run], Any], name: str) -> None:
    with pytest.raises(StateError, match=f"changed local variable {name}"):
        trained(function, 2).state_dict()
