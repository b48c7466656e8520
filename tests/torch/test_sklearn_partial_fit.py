"""scikit-learn through the five methods: partial_fit, forked bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from hpstage.testing import TrainableContract
from hpstage.testing.trainable import fresh, trained
from hpstage.training.sample_order import SampleOrder

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

pytestmark = pytest.mark.sampled(8)


class DigitsClassifier:
    """A linear classifier of handwritten digits; a step is one batch."""

    def __init__(self) -> None:
        x, self.y = load_digits(return_X_y=True)
        self.x = x / 16.0

    def setup(self, hp: Mapping[str, Any]) -> None:
        # The order is ours, and forgotten by partial_fit: shuffle=False.
        self.model = SGDClassifier(learning_rate="constant", eta0=hp["lr"], shuffle=False)
        self.order = SampleOrder(len(self.x))
        self.samples = 0

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        batch = self.order.take(hp["seed"], self.samples, hp["batch_size"])
        self.samples += len(batch)
        self.model.set_params(eta0=hp["lr"], alpha=hp["alpha"])
        self.model.partial_fit(self.x[batch], self.y[batch], classes=np.arange(10))

    def evaluate(self) -> dict[str, float]:
        return {"accuracy": self.model.score(self.x, self.y)}

    def state_dict(self) -> object:
        model = self.model
        return {"samples": self.samples, "coef": model.coef_, "intercept": model.intercept_, "t": model.t_}

    def load_state_dict(self, state: Any) -> None:
        # One sample fits shapes; then the state's values take the place of what it learnt.
        self.model.partial_fit(self.x[:1], self.y[:1], classes=np.arange(10))
        self.samples = state["samples"]
        self.model.coef_, self.model.intercept_ = state["coef"].copy(), state["intercept"].copy()
        self.model.t_ = state["t"]


def hp_at(step: int) -> dict[str, Any]:
    return {"lr": 0.05 if step < 20 else 0.005, "alpha": 1e-4, "batch_size": 64 if step < 10 else 100, "seed": 1}


class TestPartialFit(TrainableContract):
    steps, fork = 40, 15

    @pytest.fixture
    def make_trainable(self) -> Callable[[], object]:
        return DigitsClassifier

    @pytest.fixture
    def values_at(self) -> Callable[[int], dict[str, Any]]:
        return hp_at


def test_a_classifier_trained_by_partial_fit_learns() -> None:
    trainable = trained(fresh(DigitsClassifier(), hp_at), hp_at, 0, 40)
    assert trainable.evaluate()["accuracy"] > 0.85
