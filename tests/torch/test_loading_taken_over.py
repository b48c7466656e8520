"""What training gives a DataLoader, its sampler or its data set after hpstage has taken them over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import hpstage.torch
from hpstage.checkpoints.state_tree import reread
from hpstage.errors import StateError
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable
from tests.torch.loops import HP, LATE, assert_forks_continue, begun, made
from tests.torch.trainables import network, samples, sgd

Change = Callable[[Any], None]


def weighted() -> tuple[DataLoader[Any], Change]:
    sampler = WeightedRandomSampler([1.0] * 24, 24)

    def change(loader: Any) -> None:
        sampler.weights = torch.arange(24.0)

    return DataLoader(TensorDataset(*first()), batch_size=8, sampler=sampler), change


def subset_sampled() -> tuple[DataLoader[Any], Change]:
    sampler = SubsetRandomSampler(list(range(16)))

    def change(loader: Any) -> None:
        sampler.indices = list(range(8, 24))

    return DataLoader(TensorDataset(*first()), batch_size=8, sampler=sampler), change


def a_subset() -> tuple[DataLoader[Any], Change]:
    subset = Subset(TensorDataset(*first()), list(range(16)))

    def change(loader: Any) -> None:
        subset.indices[0] = 20  # type: ignore[index]

    return DataLoader(subset, batch_size=8, shuffle=True), change


def relabelled() -> tuple[DataLoader[Any], Change]:
    x, y = first()

    def change(loader: Any) -> None:
        loader.dataset.tensors = x, (y + 1) % 3

    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True), change


def collated() -> tuple[DataLoader[Any], Change]:
    def change(loader: Any) -> None:
        loader.collate_fn = halved

    return DataLoader(TensorDataset(*first()), batch_size=8, shuffle=True), change


def halved(items: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(items)
    return x / 2, y


def first() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = samples()
    return x[:24], y[:24] % 3


LOADERS = [weighted, subset_sampled, a_subset, relabelled, collated]


@pytest.mark.ci
@pytest.mark.parametrize("make", LOADERS)
def test_a_function_that_changes_its_loader_between_epochs_trains_on_the_changed_loader(
    make: Callable[[], tuple[DataLoader[Any], Change]],
) -> None:
    def trained_by_epochs(run: Run, *, changed: bool = True) -> None:
        model, optimizer = begun(run)
        loader, change = make()
        for step in run.steps():
            if changed and step == LATE - 2:
                change(loader)
            for x, y in run.batches(loader):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            run.report(loss=0.0)

    assert_forks_continue(trained_by_epochs)
    ends = []
    for changed in (True, False):
        trainable = made(lambda run, changed=changed: trained_by_epochs(run, changed=changed))  # type: ignore[misc]
        for step in range(LATE):
            trainable.train(step, HP)
        ends.append(trainable.portrait()["model.0.weight"])
        trainable.close()
    assert ends[0] != ends[1]  # as with a DataLoader


class Changing(hpstage.torch.TorchTrainable):
    device, data_version = "cpu", "1"

    def __init__(self, make: Callable[[], tuple[DataLoader[Any], Change]]) -> None:
        self.loader, self.change = make()
        self.steps = 0

    def dataset(self) -> Any:
        return self.loader

    def model(self, hp: Any) -> Any:
        return network()

    def optimizer(self, model: Any, hp: Any) -> Any:
        return sgd(model.parameters(), hp)

    def loss(self, model: Any, batch: Any) -> Any:
        self.steps += 1
        if self.steps == 2:
            self.change(self.loader)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"loss": 0.0}


@pytest.mark.parametrize("make", LOADERS)
def test_a_change_that_a_class_makes_to_its_loader_in_training_is_refused_by_name(
    make: Callable[[], tuple[DataLoader[Any], Change]],
) -> None:
    trainable: Any = as_trainable(Changing(make))
    trainable.setup(HP)

    def trained_to_a_state() -> None:
        for step in range(3):
            trainable.train(step, HP)
        trainable.state_dict()

    with pytest.raises(StateError, match=r"training has given \w+\.\w+ another value, which has no effect"):
        trained_to_a_state()
    trainable.close()


@pytest.mark.ci
def test_weights_of_a_sampler_may_change_only_between_epochs() -> None:
    def mined(run: Run, every: int) -> None:
        model, optimizer = begun(run)
        sampler = WeightedRandomSampler([1.0] * 24, 24)
        loader = DataLoader(TensorDataset(*first()), batch_size=8, sampler=sampler)
        for x, y in run.batches(loader):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if run.step % every == every - 1:
                sampler.weights[run.step] += 10.0
            run.report(loss=0.0)

    assert_forks_continue(lambda run: mined(run, 3))
    trainable = made(lambda run: mined(run, 2))
    trainable.train(0, HP)
    trainable.train(1, HP)
    with pytest.raises(StateError, match="weights of a WeightedRandomSampler within an epoch"):
        trainable.state_dict()
    trainable.close()


class Counting:
    """It makes batches, each with another factor."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, items: list[Any]) -> Any:
        self.made += 1
        x, y = torch.utils.data.default_collate(items)
        return x * self.made, y


class Collated(Changing):
    def __init__(self) -> None:
        self.steps = 0

    def dataset(self) -> Any:
        return DataLoader(TensorDataset(*first()), batch_size=8, collate_fn=Counting())

    def loss(self, model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.ci
def test_what_makes_batches_for_a_class_and_counts_is_in_the_state() -> None:
    ends = []
    trainable: Any = as_trainable(Collated())
    for forks in (False, True):
        trainable.setup(HP)
        for step in range(4):
            if forks and step == 2:
                state = reread(trainable.state_dict())
                trainable.train(step, HP)
                trainable.setup(HP)
                trainable.load_state_dict(state)
            trainable.train(step, HP)
        ends.append(trainable.portrait()["model.0.weight"])
    trainable.close()
    assert ends[0] == ends[1]
