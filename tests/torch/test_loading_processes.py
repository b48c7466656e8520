"""Processes that load: their deaths, errors in them, and what they do not see."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hpstage.checkpoints.state_tree import clone
from hpstage.errors import StateError, TrainingError, UsageError
from hpstage.torch.data import batches_of
from hpstage.torch.loading.taken_over import Workers
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable
from tests.torch.loading import (
    DATA,
    Augmented,
    Loading,
    OfLoader,
    by_batch,
    measured,
    pids_of,
    runs,
    step,
    with_workers,
)
from tests.torch.trainables import STEPS, Small, advance, fresh, hp_at, network, outcome, sgd

pytestmark = pytest.mark.sampled(5)


class Given(Small):
    """Trained by two processes on the data set that it is given."""

    num_workers = 2

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def dataset(self) -> Any:
        return self.data


@pytest.mark.parametrize("make", [lambda count: with_workers(Loading(), count), by_batch])
def test_killed_loading_processes_are_replaced_without_losing_a_sample(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = outcome(advance(fresh(make(0)), 0, STEPS))
    trainable = advance(fresh(make(2)), 0, 4)
    killed = pids_of(trainable)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "hpstage"):
        assert outcome(advance(trainable, 4, STEPS)) == expected
    assert "one was killed by SIGKILL" in caplog.text
    assert not {*killed} & {*pids_of(trainable)}
    trainable.close()  # type: ignore[attr-defined]


class Dying(Augmented):
    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            os._exit(7)
        return super().__getitem__(index)


def test_loading_processes_that_die_repeatedly_raise_an_error_with_their_exit_status() -> None:
    trainable = fresh(Given(Dying()))
    with pytest.raises(TrainingError, match=r"3 times in a row .* positions 0 to 7: one left with exit status 7"):
        trainable.train(0, hp_at(0))
    trainable.close()  # type: ignore[attr-defined]


class Broken(Augmented):
    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            raise LookupError(f"no file for sample {index}")
        return super().__getitem__(index)


def test_an_error_in_a_loading_process_is_raised_with_its_traceback() -> None:
    trainable = fresh(Given(Broken()))
    with pytest.raises(LookupError, match="no file for sample") as raised:
        trainable.train(0, hp_at(0))
    assert "in __getitem__" in raised.value.__notes__[0]
    trainable.close()  # type: ignore[attr-defined]


class Rare(Augmented):
    """Some sample cannot be loaded, and training does not get there."""

    def __getitem__(self, index: int) -> Any:
        if index == bad[0] and get_worker_info() is not None:
            raise LookupError("bad sample")
        return super().__getitem__(index)


bad = [0]


def test_an_error_in_an_unused_prefetched_batch_is_ignored() -> None:
    subject = Given(Rare())
    trainable: Any = fresh(subject)
    order = trainable._data().source.order.take(3, 0, 30).tolist()
    bad[0] = order[20]  # in the third batch of eight
    trainable.train(0, hp_at(0))
    trainable.setup(hp_at(0))
    trainable.train(0, hp_at(0))
    with pytest.raises(LookupError, match="bad sample"):
        advance(trainable, 1, 3)
    trainable.close()


class Counting(Augmented):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        x, y = super().__getitem__(index)
        return x + self.calls, y


class OwnGenerator(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand((), generator=self.generator), y


@pytest.mark.parametrize("made", [Counting, OwnGenerator])
def test_a_data_set_whose_samples_depend_on_earlier_loads_is_refused_by_name(made: Any) -> None:
    trainable = fresh(Given(made()))
    with pytest.raises(UsageError, match=f"of {made.__name__} changed when it was loaded again .* num_workers = 0"):
        trainable.train(0, hp_at(0))
    trainable.close()  # type: ignore[attr-defined]
    advance(fresh(with_workers(Given(made()), 0)), 0, 2).state_dict()  # there it is part of the state


class Harder(Augmented):
    strength = 0.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * (1 + self.strength), y


class Curriculum(Given):
    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        self.data.strength += 0.1


def test_a_data_set_that_training_changes_is_refused_if_processes_load_it() -> None:
    trainable = advance(fresh(Curriculum(Harder())), 0, 2)
    with pytest.raises(StateError, match=r"training has changed dataset\.strength, but the processes"):
        trainable.state_dict()
    trainable.close()  # type: ignore[attr-defined]
    advance(fresh(with_workers(Curriculum(Harder()), 0)), 0, 2).state_dict()


def test_a_function_that_changes_a_data_set_loaded_by_processes_is_refused_after_a_fork() -> None:
    def train(run: Run) -> None:
        data = Harder()
        model = network()
        model.data = data  # type: ignore[assignment]
        optimizer = sgd(model.parameters(), run.hp)
        run.attach(model=model, optimizer=optimizer)
        for x, y in run.batches(data, num_workers=1):
            step(model, optimizer, x, y)
            measured(run, model)
            if run.step == 2:
                model.data.strength = 1.0

    trainable = advance(fresh(train), 0, 1)
    state = clone(trainable.state_dict())
    trainable.setup(hp_at(0))
    trainable.load_state_dict(state)
    advance(trainable, 1, 2).state_dict()
    trainable.train(2, hp_at(2))
    with pytest.raises(StateError, match=r"training has changed dataset\.strength, but the processes"):
        trainable.state_dict()
    trainable.close()  # type: ignore[attr-defined]


class SetUp(Given):
    """The model's making decides how samples are augmented."""

    def model(self, hp: Any) -> nn.Module:
        self.data.strength = hp["lr"]
        return super().model(hp)


def test_loading_processes_see_the_data_set_as_each_trial_sets_it_up() -> None:
    def results(count: int) -> list[object]:
        trainable: Any = as_trainable(with_workers(SetUp(Harder()), count))
        found = []
        for lr in (0.1, 0.2):
            values = {**hp_at(0), "lr": lr}
            trainable.setup(values)
            trainable.train(0, values)
            found.append(outcome(trainable))
        trainable.close()
        return found

    assert results(2) == results(0)


@pytest.mark.parametrize("each_its_own", [False, True])
def test_a_fork_loads_the_data_set_as_its_epoch_sets_it(each_its_own: bool) -> None:
    """Not as the processes that loaded the last epoch of another trial have it."""

    def train(run: Run, count: int) -> None:
        data = Harder()
        loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=count)
        model = network()
        optimizer = sgd(model.parameters(), run.hp)
        run.attach(model=model, optimizer=optimizer)
        for epoch in run.steps():
            data.strength = 1.0 if epoch >= 2 else 0.0
            if each_its_own:
                loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=count)
            for x, y in run.batches(loader):
                step(model, optimizer, x, y)
            measured(run, model)

    def results(count: int) -> list[object]:
        trainable: Any = fresh(functools.partial(train, count=count))
        state = clone(advance(trainable, 0, 1).state_dict())
        found = [advance(trainable, 1, 4).evaluate()]
        trainable.setup(hp_at(0))
        trainable.load_state_dict(state)
        found.append(advance(trainable, 1, 4).evaluate())
        trainable.close()
        return found

    expected, forked = results(0)
    assert expected == forked
    assert results(1) == [expected, forked]


class Reading(Loading):
    num_workers = 1

    def collate(self, samples: list[Any]) -> Any:
        x, y = zip(*samples, strict=True)
        return torch.stack(x) * self.hp["lr"], torch.stack(y)


def test_a_collate_that_reads_hyperparameters_is_refused_in_loading_processes() -> None:
    trainable = fresh(Reading())
    with pytest.raises(UsageError, match=r"reads self.hp\['lr'\]: processes that load data know no values"):
        trainable.train(0, hp_at(0))
    trainable.close()  # type: ignore[attr-defined]
    advance(fresh(with_workers(Reading(), 0)), 0, 1)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_loading_processes_support_batches_of_a_users_own_class() -> None:
    def collated(samples: list[Any]) -> Pair:
        x, y = zip(*samples, strict=True)
        return Pair(torch.stack(x), torch.stack(y))

    results = [outcome(advance(fresh(with_workers(OfLoader(collate_fn=collated), count)), 0, 4)) for count in (0, 1)]
    assert results[0] == results[1]


def test_a_batch_that_a_loading_process_cannot_send_is_refused() -> None:
    def collated(samples: list[Any]) -> Any:
        return [samples, lambda: None]

    trainable = fresh(with_workers(OfLoader(collate_fn=collated), 1))
    with pytest.raises(UsageError, match="a batch cannot be sent from a worker process of the DataLoader"):
        trainable.train(0, hp_at(0))
    trainable.close()  # type: ignore[attr-defined]


class Opening(Dataset[Any]):
    """As of files that each process opens itself."""

    def __init__(self) -> None:
        self.data: Any = None

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def open_here(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.data = DATA


def test_worker_init_fn_finds_the_users_data_set() -> None:
    class Opened(Small):
        data_version = "1"

        def dataset(self) -> Any:
            return DataLoader(Opening(), batch_size=8, num_workers=2, shuffle=True, worker_init_fn=open_here)

    loaded = advance(fresh(Opened()), 0, 3)
    assert outcome(loaded) == outcome(advance(fresh(OfLoader()), 0, 3))
    loaded.close()  # type: ignore[attr-defined]


def test_loading_processes_end_when_an_unclosed_trainable_is_deleted() -> None:
    trainable = advance(fresh(with_workers(Loading(), 2)), 0, 2)
    processes = pids_of(trainable)
    assert all(map(runs, processes))
    del trainable
    gc.collect()
    assert not any(map(runs, processes))


def test_a_timeout_of_the_loader_is_an_error() -> None:
    trainable = fresh(with_workers(Hanging(timeout=1), 1))
    with pytest.raises(TrainingError, match="no batch was loaded in 1 s"):
        trainable.train(0, hp_at(0))
    trainable.close()  # type: ignore[attr-defined]


class Stuck(Augmented):
    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            signal.pause()
        return super().__getitem__(index)


class Hanging(OfLoader):
    def dataset(self) -> Any:
        return DataLoader(Stuck(), batch_size=8, num_workers=self.num_workers, **self.options)


@pytest.mark.slow
def test_spawned_loading_processes_give_the_bits_of_the_training_process() -> None:
    expected = outcome(advance(fresh(OfLoader()), 0, 3))
    spawned = advance(fresh(with_workers(OfLoader(multiprocessing_context="spawn"), 1)), 0, 3)
    assert outcome(spawned) == expected
    spawned.close()  # type: ignore[attr-defined]


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


def test_a_forked_process_that_loads_data_does_not_disturb_loading_in_its_parent() -> None:
    """As the one that verifies a fork of training, while training continues here."""
    alone, batches = (batches_of(Squares(), None, None, Workers(count)) for count in (0, 1))
    begin, done = multiprocessing.Event(), multiprocessing.Event()

    def taken(seed: int, starts: Iterable[int]) -> list[list[int]]:
        return [batches.take(seed, start, 4).tolist() for start in starts]  # type: ignore[union-attr]

    taken(0, [0])
    batches.close()
    child = os.fork()
    if not child:
        begin.wait(60)
        for seed in (1, 2, 3):
            taken(seed, [0])
        done.set()
        time.sleep(60)
        os._exit(0)
    try:
        found = taken(0, [0])
        begin.set()
        assert done.wait(60)
        found += taken(0, range(4, 48, 4))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        batches.close()
    assert found == [alone.take(0, start, 4).tolist() for start in range(0, 48, 4)]  # type: ignore[union-attr]
