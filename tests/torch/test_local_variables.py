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
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hpstage.errors import StateError, UsageError
from hpstage.training.run import Run
from tests.torch.loops import HP, LATE, Parts, Swallowing, anchor, begun, made, stepped, trained
from tests.torch.trainables import samples

pytestmark = [pytest.mark.sampled(16), pytest.mark.forks]


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
