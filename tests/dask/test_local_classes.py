"""Trainables whose classes are defined in functions: as tests, notebooks and factories do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
import pytest
from distributed import Client

import hpstage
from hpstage.store import MemoryJournal

pytestmark = pytest.mark.sampled(4)

optuna.logging.set_verbosity(optuna.logging.ERROR)


def plain(by: float) -> Any:
    class Toy:
        def setup(self, hp: Mapping[str, Any]) -> None:
            self.x = 0.0

        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            self.x += by * hp["rate"]

        def evaluate(self) -> dict[str, float]:
            return {"score": self.x}

        def state_dict(self) -> Any:
            return self.x

        def load_state_dict(self, state: Any) -> None:
            self.x = state

    return Toy()


def derived(by: float) -> Any:
    base = type(plain(by))

    class Toy(base):  # type: ignore[misc, valid-type]
        class Rule:
            factor = 2.0

        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            super().train(step, {"rate": self.Rule.factor * hp["rate"]})

    return Toy()


def with_data(by: float) -> Any:
    base = type(plain(by))

    @dataclass
    class Toy(base):  # type: ignore[misc, valid-type]
        scale: float

        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            super().train(step, {"rate": self.scale * hp["rate"]})

    return Toy(3.0)


def search(trainable: object, executor: object, store: MemoryJournal | None = None) -> hpstage.Result:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"rate": [0.1, 0.2]}), study_name="local")
    return hpstage.optimize(
        study,
        trainable,
        lambda trial: {"rate": trial.suggest_float("rate", 0.1, 0.2)},
        metric="score",
        steps=3,
        executor=executor,  # type: ignore[arg-type]
        store=MemoryJournal() if store is None else store,
    )


@pytest.mark.ci
@pytest.mark.parametrize("make", [plain, derived, with_data], ids=lambda make: make.__name__)
def test_trainables_of_local_classes_give_the_same_values_on_a_cluster_as_inline(
    client: Client, make: Callable[[float], Any]
) -> None:
    found = [
        sorted(trial.value for trial in search(make(2.0), executor).study.trials)
        for executor in (hpstage.InlineExecutor(), client)
    ]
    assert found[0] == found[1]


@pytest.mark.ci
def test_local_classes_of_the_same_name_are_distinguished_by_code_and_closure(client: Client) -> None:
    journal = MemoryJournal()
    search(plain(2.0), client, journal)
    for other in (plain(3.0), derived(2.0)):
        with pytest.raises(hpstage.errors.HpstageError, match=r"edited since|other|differ"):
            search(other, client, journal)
