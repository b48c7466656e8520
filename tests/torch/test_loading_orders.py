"""What is taken over from a DataLoader: order, cut into batches, settings; and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from hpstage.errors import UsageError
from hpstage.plan.keys import workload_key
from hpstage.torch.data import batches_of
from hpstage.torch.loading.orders import Cut
from hpstage.training.identity.environment import describe
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable
from tests.torch.loading import DATA, Loading, OfLoader, by_batch, hp_of
from tests.torch.trainables import SAMPLES, Small, network, samples, sgd

pytestmark = pytest.mark.sampled(4)

NUMBERS = TensorDataset(torch.arange(10))


def taken(loader: Any, batch_sizes: list[int], *, seed: int = 1, by_epoch: bool = False) -> list[list[int]]:
    batches = batches_of(loader, None, torch.device("cpu"))
    found, position = [], 0
    for size in batch_sizes:
        for batch, after in batches.of_step(seed, position, size, by_epoch=by_epoch):
            position = after
            found.append(batch[0].tolist())
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_a_loader_without_shuffle_keeps_the_order_of_the_data() -> None:
    assert taken(DataLoader(NUMBERS, 4), [4] * 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_a_loader_with_drop_last_skips_the_incomplete_last_batch_of_an_epoch() -> None:
    loader = DataLoader(NUMBERS, 4, drop_last=True)
    assert taken(loader, [4] * 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert taken(loader, [4, 4], by_epoch=True) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_drop_last_applies_to_the_batch_size_of_the_last_step_of_an_epoch() -> None:
    loader = DataLoader(NUMBERS, 4, drop_last=True)
    assert taken(loader, [4, 4, 2, 3]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2]]
    assert taken(loader, [7, 4]) == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3]]
    assert taken(DataLoader(NUMBERS, 4), [7, 4, 2]) == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9], [0, 1]]


def test_a_loader_whose_batches_are_all_dropped_is_refused() -> None:
    with pytest.raises(UsageError, match="batch size is 16, an epoch has 10 samples"):
        taken(DataLoader(NUMBERS, 4, drop_last=True), [16])


@pytest.mark.parametrize("end", ["full", "short", "dropped"])
def test_a_step_of_one_epoch_begins_at_the_start_of_an_epoch(end: Any) -> None:
    cut, position = Cut(10, end), 0
    for _ in range(3):
        start, count = cut.batch(position, 10)
        assert (start, count) == (position, 10)
        position = cut.end_of_epoch(position)


def test_a_shuffled_loader_gives_each_sample_once_per_epoch_in_an_order_set_by_the_seed() -> None:
    loader = DataLoader(NUMBERS, 4, shuffle=True)
    first, second = taken(loader, [4] * 3), taken(loader, [4] * 6)
    assert sorted(flat(first)) == sorted(flat(second)[10:]) == list(range(10))
    assert second[:3] == first
    assert second[3:] != first
    assert taken(loader, [4] * 3, seed=2) != first


def test_weights_of_a_sampler_decide_how_often_samples_are_drawn() -> None:
    weights = [0.0, 1.0, 2.0, *[0.0] * 6, 1.0]
    numbers = flat(taken(DataLoader(NUMBERS, 100, sampler=WeightedRandomSampler(weights, 4000)), [100] * 40))
    counts = torch.bincount(torch.tensor(numbers), minlength=10) / len(numbers)
    assert torch.allclose(counts, torch.tensor(weights) / 4, atol=0.03)
    once = WeightedRandomSampler(weights, 3, replacement=False)
    epochs = taken(DataLoader(NUMBERS, 3, sampler=once), [3] * 8)
    assert all(sorted(epoch) == [1, 2, 9] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_samplers_may_draw_fewer_or_more_samples_than_the_data_set_has() -> None:
    part = taken(DataLoader(NUMBERS, 3, sampler=SubsetRandomSampler([7, 2, 5])), [3] * 4)
    assert all(sorted(epoch) == [2, 5, 7] for epoch in part)
    more = flat(taken(DataLoader(NUMBERS, 25, sampler=RandomSampler(NUMBERS, num_samples=25)), [25]))
    assert sorted(more[:10]) == sorted(more[10:20]) == list(range(10))
    assert len(set(more[20:])) == 5
    drawn = RandomSampler(NUMBERS, replacement=True, num_samples=1000)
    numbers = flat(taken(DataLoader(NUMBERS, 1000, sampler=drawn), [1000]))
    assert min(numbers.count(number) for number in range(10)) > 50


class Own(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Collating(DataLoader[Any]):
    """It is constructed in another way, as those of libraries for graphs, and makes batches as any other."""

    named: str

    def __init__(self, data: Any, size: int, named: str = "") -> None:
        self.named = named
        super().__init__(data, size, collate_fn=doubled)


def doubled(samples: list[Any]) -> Any:
    return [2 * numbers for numbers in default_collate(samples)]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(NUMBERS, 4, sampler=Own()), "sampler is a Own"),
        (lambda: DataLoader(NUMBERS, 4, sampler=DistributedSampler(NUMBERS, 2, 0)), "need not be distributed"),
        (lambda: DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]), "has its own batch_sampler, a list"),
        (
            lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(SequentialSampler(NUMBERS), 4, False)),
            "has its own batch_sampler",
        ),
        (lambda: DataLoader(NUMBERS, batch_size=None), "batch_size=None"),
        (lambda: OwnLoader(NUMBERS, 4), r"subclass of DataLoader.* overrides __iter__\. Return"),
    ],
)
def test_a_loader_with_an_unsupported_sampler_or_iteration_is_refused_by_name(loader: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batches_of(loader(), None, None)


def test_a_dataloader_subclass_that_only_overrides_its_constructor_is_supported() -> None:
    assert taken(Collating(NUMBERS, 4), [4] * 3) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]


def test_a_loader_is_refused_if_the_trainable_also_defines_collate() -> None:
    class Twice(OfLoader):
        def collate(self, samples: list[Any]) -> Any:
            return samples

    trainable: Any = as_trainable(Twice())
    trainable.setup(hp_of(4))
    with pytest.raises(UsageError, match=r"collate\(\) is defined as well"):
        trainable.train(0, hp_of(4))


class Sizes(Small):
    """Records the sizes of its batches."""

    stateless = ("sizes",)

    def __init__(self, batch_size: int | None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.sizes: list[int] = []

    def dataset(self) -> Any:
        return DataLoader(TensorDataset(*samples()), batch_size=9)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.sizes.append(len(batch[0]))


@pytest.mark.parametrize(("attribute", "hp", "size"), [(None, {}, 9), (5, {}, 5), (5, {"batch_size": 3}, 3)])
def test_the_batch_size_comes_from_the_hyperparameter_else_the_attribute_else_the_loader(
    attribute: int | None, hp: dict[str, Any], size: int
) -> None:
    subject = Sizes(attribute)
    trainable = as_trainable(subject)
    values = {"lr": 0.1, "momentum": 0.9, **hp}
    trainable.setup(values)
    trainable.train(0, values)
    assert subject.sizes == [size]


def test_a_batch_larger_than_the_data_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    trainable = as_trainable(Loading())
    values = hp_of(SAMPLES + 1)
    with caplog.at_level(logging.WARNING, "hpstage"):
        trainable.setup(values)
        for step in range(2):
            trainable.train(step, values)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["The batch size is 31, but an epoch has 30 samples: each batch has samples of several epochs."]


def test_a_function_with_a_missing_batch_size_or_two_data_sets_is_refused() -> None:
    def sizeless(run: Run) -> None:
        model = network()
        run.attach(model=model, optimizer=sgd(model.parameters(), run.hp))
        for _ in run.batches(DATA):
            pass

    def of_two(run: Run) -> None:
        model = network()
        run.attach(model=model, optimizer=sgd(model.parameters(), run.hp))
        for _ in run.steps():
            for data in (DATA, NUMBERS):
                list(run.batches(data))

    values = {"lr": 0.1, "momentum": 0.9}
    for function, message in (
        (sizeless, "the batch size is None"),
        (of_two, "30 samples in an epoch, and now with 10"),
    ):
        trainable = as_trainable(function)
        trainable.setup(values)
        with pytest.raises(UsageError, match=message):
            trainable.train(0, values if function is sizeless else hp_of(4))
        trainable.close()  # type: ignore[attr-defined]


def key(obj: object) -> str:
    found = describe(as_trainable(obj))
    return workload_key({**found.identity, **found.described})


def test_loader_options_that_decide_batches_are_in_the_key_and_options_for_speed_are_not() -> None:
    class Fast(Loading):
        pass

    plain = key(Fast())
    for name, value in (("num_workers", 3), ("prefetch_factor", 5), ("pin_memory", True)):
        fast = Fast()
        setattr(fast, name, value)
        assert key(fast) == plain
        setattr(Fast, name, value)
        assert key(Fast()) == plain

    def of(**options: Any) -> str:
        class Given(Loading):
            def dataset(self) -> Any:
                return DataLoader(DATA, **given)

        given = {"batch_size": 8, **options}
        Given.stateless = ("given",)  # type: ignore[misc]
        trainable: Any = as_trainable(Given())
        return str(trainable.describe_data())

    assert of(num_workers=2) == of(num_workers=2, prefetch_factor=4) == of(pin_memory=True) == of()
    weights = [1.0] * SAMPLES
    others = [
        of(),
        of(shuffle=True),
        of(drop_last=True),
        of(sampler=WeightedRandomSampler(weights, 10)),
        of(sampler=WeightedRandomSampler([*weights[1:], 2.0], 10)),
        of(sampler=SubsetRandomSampler([1, 2])),
    ]
    assert len({*others}) == len(others)


def test_an_attribute_for_speed_that_the_constructor_sets_is_not_part_of_the_key() -> None:
    class Set(Loading):
        def __init__(self, workers: int, stacked: int) -> None:
            self.num_workers, self.max_stacked = workers, stacked

    assert key(Set(0, 1)) == key(Set(2, 1)) == key(Set(0, 8))


@pytest.mark.ci
def test_an_attribute_for_speed_that_training_reads_is_part_of_the_key() -> None:
    class Reading(Loading):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, batch) * (1 + self.num_workers)

    fast = Reading()
    fast.num_workers = 2
    assert key(fast) != key(Reading())


def test_a_function_and_a_class_with_the_same_loader_take_the_same_batches() -> None:
    ordinary, made = as_trainable(by_batch(0)), as_trainable(OfLoader())
    for trainable in (ordinary, made):
        trainable.setup(hp_of(7))
        for step in range(6):
            trainable.train(step, hp_of(7))
    assert dict(ordinary.evaluate())["loss"] == dict(made.evaluate())["loss"]


@pytest.mark.parametrize(("options", "length"), [({}, 4), ({"drop_last": True}, 3)])
def test_run_batches_has_the_length_data_set_and_batch_size_of_its_loader(options: dict[str, Any], length: int) -> None:
    def train_one_epoch(loader: Any) -> None:
        assert (len(loader), loader.dataset, loader.batch_size) == (length, DATA, 8)
        assert len(list(loader)) == length

    def train(run: Run) -> None:
        model = network()
        loader = DataLoader(DATA, batch_size=8, shuffle=True, **options)
        run.attach(model=model, optimizer=sgd(model.parameters(), run.hp))
        for _ in run.steps():
            train_one_epoch(run.batches(loader))

    trainable = as_trainable(train)
    trainable.setup({"lr": 0.1, "momentum": 0.9})
    trainable.train(0, {"lr": 0.1, "momentum": 0.9})
    trainable.close()
