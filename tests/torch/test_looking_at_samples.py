"""Looking at samples, for the identity of data, changes nothing that is trained."""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch.utils.data import Dataset

import hpstage
from hpstage.errors import StateError
from hpstage.store import MemoryJournal
from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable
from tests.torch.test_data_identity import data_text
from tests.torch.trainables import Small

pytestmark = pytest.mark.sampled(5)

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Counting(Dataset[Any]):
    """Each sample depends on how many were made before."""

    def __init__(self) -> None:
        self.made = 0

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        return torch.full((1, 8, 8), 0.01 * self.made), index % 3


class Drawing(Counting):
    """Each sample draws from a generator of the data set's own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 8, 8), float(self.rng.random())), index % 3


class Keeping(Counting):
    """Each sample is augmented once, where it is first made."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.kept.setdefault(index, torch.rand(1, 8, 8)), index % 3


class Writing(Counting):
    """Each sample is written into memory of the data set's."""

    def __init__(self) -> None:
        self.x = torch.zeros(30, 1, 8, 8)

    def __getitem__(self, index: int) -> Any:
        return self.x[index].add_(0.01 * index), index % 3


@functools.cache
def augmented(index: int) -> torch.Tensor:
    return torch.rand(1, 8, 8)


@functools.lru_cache(maxsize=50)
def augmented_in_few(index: int) -> torch.Tensor:
    return torch.rand(1, 8, 8)


class Cached(Counting):
    """As :class:`Keeping`, by functions. One of the results was there before training."""

    def __init__(self) -> None:
        augmented.cache_clear()
        augmented_in_few.cache_clear()
        torch.manual_seed(0)
        augmented(7)

    def __getitem__(self, index: int) -> Any:
        return augmented(index) + augmented_in_few(index), index % 3


SHARED = random.Random(0)
NUMBERS = np.random.default_rng(0)


def drawn() -> torch.Tensor:
    return torch.full((1, 8, 8), SHARED.random() + float(NUMBERS.random()))


class OfModule(Counting):
    """Each sample draws from generators of the module."""

    def __getitem__(self, index: int) -> Any:
        return drawn(), index % 3


class Streamed:
    """The same as a stream."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 30:
            self.at += 1
            yield drawn(), self.at % 3

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Looked(Small):
    """Is trained on samples that change what makes them."""

    def __init__(self, made: Any, data_version: str | None = None) -> None:
        super().__init__()
        self.made, self.data_version = made, data_version

    def dataset(self) -> Any:
        return self.made()

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"sum": sum(float(weight.double().sum()) for weight in model.parameters())}


def trained(trainable: Any, *, described: bool) -> float:
    SHARED.seed(0)
    NUMBERS.bit_generator.state = np.random.default_rng(0).bit_generator.state
    adapted: Any = as_trainable(trainable)
    if described:
        describe(adapted)
    hp = {"lr": 0.1, "momentum": 0.9, "batch_size": 4}
    adapted.setup(hp)
    for step in range(3):
        adapted.train(step, hp)
    found = float(adapted.evaluate()["sum"])
    adapted.close()
    return found


@pytest.mark.ci
@pytest.mark.parametrize("made", [Counting, Drawing, Keeping, Writing, Cached, OfModule, Streamed])
def test_reading_samples_for_the_key_does_not_change_training(made: Any) -> None:
    alone = trained(Looked(made), described=False)
    assert trained(Looked(made), described=True) == alone
    assert trained(Looked(made, "1"), described=True) == alone


class Reusing(Writing):
    """Samples are views of its memory, with numbers that nothing else shows."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index].fill_(float(os.environ["OF_SAMPLES"])), index % 3


def test_samples_written_into_memory_of_the_data_set_are_digested_with_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = []
    for number in ("1", "1", "2"):
        monkeypatch.setenv("OF_SAMPLES", number)
        dataset = Reusing()
        texts.append(data_text(dataset))
        assert not dataset.x.any()
    assert texts[0] == texts[1] != texts[2]


def test_a_second_search_in_one_process_has_the_key_of_the_first() -> None:
    """Samples draw from generators of the module, which are as before after the first one."""
    store = MemoryJournal()
    looked = Looked(OfModule)
    space = {"lr": 0.1, "momentum": 0.9, "batch_size": 4}
    found = []
    for _ in range(2):
        study = optuna.create_study()
        hpstage.optimize(
            study,
            looked,
            lambda trial: space,
            metric="sum",
            steps=3,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=store,
            catch=(),
        )
        found.append(study.trials[0].value)
    assert found == [trained(Looked(OfModule), described=False)] * 2


class Moving(Counting):
    """Each sample takes the next number of an iterator, which cannot be put back."""

    def __init__(self) -> None:
        self.numbers = map(float, range(1000))

    def __getitem__(self, index: int) -> Any:
        return torch.full((1, 8, 8), next(self.numbers)), index % 3


def test_a_change_by_reading_samples_that_cannot_be_undone_is_refused_with_the_remedy() -> None:
    with pytest.raises(StateError, match=r"dataset\.numbers.* changed by looking .* set data_version on Looked"):
        describe(as_trainable(Looked(Moving)))
    describe(as_trainable(Looked(Moving, "1")))
