"""Pickles in the state of an object of the user's own: their bytes hold more than their contents."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.errors import StateError
from hpstage.store import MemoryJournal

pytest.importorskip("sklearn")

from sklearn.ensemble import GradientBoostingClassifier
from sklearn.linear_model import SGDClassifier
from sklearn.neural_network import MLPClassifier

STEPS = 6
_numbers = np.random.RandomState(0)
X = _numbers.randn(120, 6)
Y = (X[:, 0] * 2 + X[:, 1] ** 2 > 0).astype(int)

KINDS: dict[str, Callable[[], Any]] = {
    "linear": lambda: SGDClassifier(random_state=0),
    "network": lambda: MLPClassifier((5,), random_state=0),
    "trees": lambda: GradientBoostingClassifier(n_estimators=1, warm_start=True, random_state=0, subsample=0.5),
}


class Estimator:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.estimator = KINDS[self.kind]()

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        if self.kind == "trees":
            self.estimator.set_params(learning_rate=hp["lr"], n_estimators=step + 1).fit(X, Y)
        else:
            self.estimator.set_params(alpha=hp["lr"])
            batch = slice(step * 16, step * 16 + 16)
            self.estimator.partial_fit(X[batch], Y[batch], classes=[0, 1])

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(self.estimator.score(X, Y))}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": [hpstage.pickled(self.estimator)]}

    def load_state_dict(self, state: Any) -> None:
        self.estimator = pickle.loads(state["steps"][0])  # noqa: S301  # its own


class Plainly(Estimator):
    def state_dict(self) -> dict[str, Any]:
        return {"steps": [pickle.dumps(self.estimator)]}


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": s.multistep(0.1, [trial.suggest_categorical("drop", [3, 5])], gamma=0.1)}


def search(trainable: object, **options: Any) -> list[float]:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [3, 5]}, seed=0))
    hpstage.optimize(
        study,
        trainable,
        space,
        metric="loss",
        steps=STEPS,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
        **options,
    )
    return [value for _, value in sorted((trial.params["drop"], trial.values[0]) for trial in study.trials)]


def by_hand(kind: str) -> list[float]:
    values = []
    for drop in (3, 5):
        alone = Estimator(kind)
        alone.setup({})
        for step in range(STEPS):
            alone.train(step, {"lr": s.multistep(0.1, [drop], gamma=0.1).value(step)})
        values.append(alone.evaluate()["loss"])
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimator_saved_with_hpstage_pickled_forks_exactly(kind: str) -> None:
    assert search(Estimator(kind), checkpoint_every=2) == by_hand(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_that_differs_only_in_bytes_is_refused_with_the_remedy_hpstage_pickled(kind: str) -> None:
    with pytest.raises(StateError, match=r"^state\['steps'\]\[0\] is pickled, and its bytes .* hpstage\.pickled\("):
        search(Plainly(kind))


def test_hpstage_pickled_restores_a_shared_mutable_object_as_one_object() -> None:
    source, array = random.Random(1), np.arange(3)
    loop: list[Any] = [source, (source, array), {"array": array, "names": ("a" * 3, "aaa")}]
    loop.append((loop,))
    again = pickle.loads(hpstage.pickled(loop))  # noqa: S301  # its own
    assert again[0] is again[1][0]
    assert again[1][1] is again[2]["array"]
    assert again[3][0] is again
    assert hpstage.pickled(again) == hpstage.pickled(loop)
    assert again[0].random() == source.random()


def test_hpstage_pickled_refuses_objects_that_pickle_refuses() -> None:
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        hpstage.pickled(lambda: io.BytesIO())
