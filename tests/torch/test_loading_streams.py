"""Streams: data that can only be iterated over, with a position that is part of the state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hpstage.checkpoints.state_tree import clone
from hpstage.errors import UsageError
from hpstage.training.run import Run
from tests.torch.loading import measured, step
from tests.torch.trainables import FORK, SAMPLES, STEPS, Small, advance, fresh, hp_at, network, outcome, samples, sgd

pytestmark = pytest.mark.sampled(5)


class Shards(IterableDataset[Any]):
    """Reads shard by shard, in another order in each epoch, and augments; in the protocol of torchdata and datasets."""

    def __init__(self) -> None:
        self.x, self.y = samples()
        self.epoch = 0
        self.taken = 0
        self._go_on_from = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = [shard * 10 + i for shard in range(3) for i in range(10)]
        order = order[self.epoch % 3 * 10 :] + order[: self.epoch % 3 * 10]
        self.taken, self._go_on_from = self._go_on_from, 0
        for index in order[self.taken :]:
            self.taken += 1
            yield self.x[index] * random.random(), self.y[index]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._go_on_from = state["taken"]


class Streaming(Small):
    def dataset(self) -> Any:
        return Shards()


class Epochs(Streaming):
    step_unit = "epoch"


class Dropping(Streaming):
    def dataset(self) -> Any:
        return DataLoader(Shards(), batch_size=8, drop_last=True)


def by_batch(run: Run) -> None:
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for x, y in run.batches(DataLoader(Shards(), batch_size=8)):
        step(model, optimizer, x, y)
        measured(run, model)


def by_epoch(run: Run) -> None:
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        for x, y in run.batches(Shards()):
            step(model, optimizer, x, y)
        measured(run, model)


@pytest.mark.ci
@pytest.mark.parametrize("make", [Streaming, Epochs, Dropping, lambda: by_batch, lambda: by_epoch])
@pytest.mark.ci_one_in(2)
def test_training_on_a_stream_forks_exactly_at_any_step(make: Any) -> None:
    straight = fresh(make())
    states = []
    for number in range(STEPS):
        states.append(clone(straight.state_dict()))
        straight.train(number, hp_at(number))
    expected = outcome(straight)
    again = advance(fresh(make()), 0, STEPS)
    assert outcome(again) == expected
    for fork in (FORK, 3, 0, STEPS - 1):
        for trainable in (again, fresh(make())):
            trainable.setup(hp_at(0))
            trainable.load_state_dict(states[fork])
            assert outcome(advance(trainable, fork, STEPS)) == expected, fork


class Sizes(Streaming):
    stateless = ("sizes",)

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.sizes = make, []

    def dataset(self) -> Any:
        return self.make()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.sizes.append(len(batch[0]))


@pytest.mark.parametrize(
    ("make", "unit", "sizes"),
    [
        (Shards, "batch", [12] * 4),
        (lambda: DataLoader(Shards()), "batch", [12, 12, 6, 12]),
        (lambda: DataLoader(Shards(), drop_last=True), "batch", [12] * 4),
        (Shards, "epoch", [12, 12, 6] * 4),
        (lambda: DataLoader(Shards(), drop_last=True), "epoch", [12, 12] * 4),
    ],
)
def test_the_end_of_a_stream_ends_an_epoch(make: Any, unit: Any, sizes: list[int]) -> None:
    subject = Sizes(make)
    subject.step_unit = unit
    values = {**hp_at(0), "batch_size": 12}
    trainable = fresh(subject, values)
    for number in range(4):
        trainable.train(number, values)
    assert subject.sizes == sizes


def test_the_data_of_a_stream_are_identified_by_its_first_samples() -> None:
    class Others(Shards):
        def __init__(self) -> None:
            super().__init__()
            self.x = self.x + 1

    class Other(Streaming):
        def dataset(self) -> Any:
            return Others()

    described = [str(fresh(make()).describe_data()) for make in (Streaming, Streaming, Other)]  # type: ignore[attr-defined]
    assert described[0] == described[1] != described[2]
    trainable = fresh(Streaming())
    trainable.describe_data()  # type: ignore[attr-defined]
    assert outcome(advance(trainable, 0, 3)) == outcome(advance(fresh(Streaming()), 0, 3))


class Plain(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(SAMPLES))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Plain, r"unless it reports its position in state_dict\(\)"),
        (lambda: DataLoader(Plain(), batch_size=8), r"unless it reports its position in state_dict\(\)"),
        (lambda: DataLoader(Shards(), num_workers=2), "Shards is a stream and num_workers is 2"),
        (lambda: DataLoader(Shards(), drop_last=True), "the batch size is 31, Shards ended after 30 samples"),
    ],
)
def test_streams_that_cannot_be_forked_are_refused_by_name(make: Any, message: str) -> None:
    values = {**hp_at(0), "batch_size": SAMPLES + 1}
    trainable = fresh(Sizes(make), values)
    with pytest.raises(UsageError, match=message):
        trainable.train(0, values)
