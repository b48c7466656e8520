"""StepBackendContract: the obligations of every step backend, tested with a small TorchTrainable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from hpstage.schedule import Scalar
from hpstage.testing.trainable import Make, TrainableContract, Values, fresh, outcome
from hpstage.torch import TorchTrainable
from hpstage.torch.backends.lookup import backend_named
from hpstage.torch.environment import default_device
from hpstage.trainable import Bundling


class Small(TorchTrainable):
    """A model with dropout and buffers, a loss that reads a hyperparameter, and an optimizer with a state."""

    def model(self, hp: Mapping[str, Scalar]) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Scalar]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=float(hp["lr"] or 0), momentum=0.9)

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator)
        return torch.utils.data.TensorDataset(x, y)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, label_smoothing=float(self.hp["smoothing"] or 0))

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        data: Any = self.dataset()
        x, y = (tensor.to(next(model.parameters()).device) for tensor in data.tensors)
        return {"loss": nn.functional.cross_entropy(model(x), y).item()}


class StepBackendContract(TrainableContract):
    """Subclass it, name the subclass ``Test...`` and set ``numerics``, the name of the backend's entry point.

    ``class TestMine(StepBackendContract): numerics = "mine"``. To test it with your own models, override the fixtures
    ``make_trainable`` and ``values_at``. If the backend cannot run on this machine, the tests are skipped.
    """

    numerics: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _can_run(self) -> None:
        if missing := backend_named(self.numerics).missing(default_device()):
            pytest.skip(missing)

    @pytest.fixture
    def make_trainable(self) -> Make:
        def make() -> TorchTrainable:
            subject = Small()
            subject.numerics = self.numerics
            return subject

        return make

    @pytest.fixture
    def values_at(self) -> Values:
        return lambda step: {"lr": 0.1 if step < 4 else 0.01, "smoothing": step / 100, "batch_size": 8, "seed": 0}

    def test_a_backend_describes_its_numerics_in_stable_texts(self) -> None:
        backend = backend_named(self.numerics)
        described = backend.describe()
        assert isinstance(backend.numerics, str) and backend.numerics
        assert all(isinstance(text, str) for text in (*described, *described.values()))
        assert described == backend.describe()

    def test_models_trained_at_the_same_time_do_not_change_each_others_bits(
        self, make_trainable: Make, values_at: Values, straight: list[object]
    ) -> None:
        """Train the first model alongside others that come and go, if the backend trains several models at a time."""
        if not backend_named(self.numerics).several:
            pytest.skip("this backend trains one model at a time")
        trainable = fresh(make_trainable(), values_at)
        assert isinstance(trainable, Bundling)
        members = trainable.members()
        assert 1 < len(members) <= trainable.slots
        for seed, member in enumerate(members):
            member.setup({**values_at(0), "seed": seed})
        for step in range(self.steps):
            due = {seed: (step, {**values_at(step), "seed": seed}) for seed in range(1 + step % len(members))}
            trainable.train_together(due)
            for seed, (_, values) in due.items():
                members[seed].train(step, values)
        assert outcome(members[0]) == straight
