"""What cannot be stacked is refused by name, before anything is trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpstage.torch import TorchLoop
from hpstage.torch.backends.stacked import Bundle, NotStackable, shape_key
from hpstage.torch.backends.stacked.stack import put_back
from tests.torch.backends.siblings import Hp, Mlp, Sibling, Trial, builder, hp_of, train

pytestmark = pytest.mark.sampled(4)


class Changed(Mlp):
    """An Mlp whose update is what a test says."""

    def __init__(self, how: Callable[[Any, nn.Module, Any, Any], Any]) -> None:
        self.how = how
        self.seen = 0
        self.kept = torch.zeros(3)
        self.generator = torch.Generator()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        return self.how(self, model, optimizer, batch)


def ordinary(self: Any, model: nn.Module, optimizer: Any, batch: Any, scale: Any = 1.0) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = self.loss(model, batch) * scale
    loss.backward()
    optimizer.step()
    return loss


def by_value(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    loss = self.loss(model, batch)
    return ordinary(self, model, optimizer, batch, 2.0 if loss > 1e9 else 1.0)


def by_hyper_parameter(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return ordinary(self, model, optimizer, batch, 2.0 if self.hp["penalty"] > 0.5 else 1.0)


def by_numpy(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return ordinary(self, model, optimizer, batch, float(batch[0].numpy().std()))


def of_python(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return ordinary(self, model, optimizer, batch, random.random())


def of_numpy(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return ordinary(self, model, optimizer, batch, np.random.rand())


def of_its_own(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return ordinary(self, model, optimizer, batch, torch.rand((), generator=self.generator))


def twice(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    ordinary(self, model, optimizer, batch)
    return ordinary(self, model, optimizer, batch)


def never(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return self.loss(model, batch)


def accumulating(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    self.loss(model, batch).backward()
    optimizer.step()


def averaging(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    ordinary(self, model, optimizer, batch)
    self.average = torch.stack([parameter.detach().mean() for parameter in model.parameters()])


def remembering(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    self.kept.add_(1)
    return ordinary(self, model, optimizer, batch, self.kept.sum())


def setting(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    optimizer.param_groups[0]["lr"] = 0.1
    return ordinary(self, model, optimizer, batch)


def by_state(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return ordinary(self, model, optimizer, batch, 1.0 + len(optimizer.state))


def selecting(self: Any, model: nn.Module, optimizer: Any, batch: Any) -> Any:
    return ordinary(self, model, optimizer, (batch[0][batch[1] > 0], batch[1][batch[1] > 0]))


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (by_value, "needs Python at each step"),
        (by_hyper_parameter, "'penalty'"),
        (by_numpy, r"numpy\(\)"),
        (of_python, "Python's random or of NumPy"),
        (of_numpy, "Python's random or of NumPy"),
        (of_its_own, "a generator of its own"),
        (twice, r"uses parameters after optimizer.step\(\)"),
        (never, r"without calling optimizer.step\(\)"),
        (accumulating, "accumulates gradients"),
        (averaging, "an average of weights"),
        (remembering, "neither a parameter nor a buffer"),
        (setting, "sets 'lr'"),
        (by_state, r"optimizer.state"),
        (selecting, "needs Python|has a shape"),
    ],
)
def test_an_update_that_a_recording_cannot_repeat_is_refused_without_side_effects(how: Any, named: str) -> None:
    subject = Changed(how)
    trial = Trial(subject, 0)
    before = trial.state()
    bundle = Bundle(builder(subject))
    bundle.join(trial.model, trial.optimizer)
    batch, hp = trial.turn()
    generators = random.getstate(), torch.get_rng_state()
    with pytest.raises(NotStackable, match=named):
        bundle.step([batch], [hp])
    assert trial.state() == before
    assert torch.equal(subject.kept, torch.zeros(3))
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])


def test_an_ordinary_user_defined_update_is_stacked() -> None:
    subject = Changed(ordinary)
    train(Bundle(builder(subject)), [Trial(subject, 0), Trial(subject, 1)])


class BiasBeforeNormalization(Mlp):
    """The gradient of the convolution's bias is zero but for rounding, which depends on the order of samples."""

    def __init__(self, width: int) -> None:
        self.width = width

    def model(self, hp: Hp) -> nn.Module:
        width = self.width
        return nn.Sequential(
            *(
                nn.Conv2d(1, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, 8, 3),
                nn.Flatten(),
            ),
            nn.Linear(128, 5),
        )


@pytest.mark.parametrize("width", [4, 8, 12, 20])
def test_a_gradient_that_is_only_rounding_does_not_prevent_stacking(width: int) -> None:
    subject = BiasBeforeNormalization(width)
    train(Bundle(builder(subject)), [Trial(subject, 0), Trial(subject, 1)])


class Counting(Mlp):
    def __init__(self) -> None:
        self.counted = 0

    def dataset(self) -> Any:
        return torch.utils.data.TensorDataset(torch.zeros(8, 1, 6, 6), torch.zeros(8, dtype=torch.long))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.counted += 1
        return super().loss(model, batch)


def test_python_objects_that_a_step_changes_are_refused_by_name() -> None:
    subject = Counting()
    loop = TorchLoop(subject)
    loop.setup({"lr": 0.05, "penalty": 0.02, "batch_size": 4})
    loop.portrait()
    made = builder(subject, lambda who: put_back(who, [loop]))
    with pytest.raises(NotStackable, match=r"self\.counted"):
        train(Bundle(made), [Trial(subject, 0)])
    loop.close()


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop has no stacked form"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize=True"),
        (lambda p: type("Own", (torch.optim.SGD,), {})(p, lr=0.1), "Own has no stacked form"),
    ],
)
def test_optimizers_without_a_stacked_form_are_refused_by_name(optimizer: Any, named: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(NotStackable, match=named):
        Bundle(builder(Mlp())).join(model, optimizer(model.parameters()))


def test_hooks_of_optimizers_and_parameters_are_refused() -> None:
    trial = Trial(Mlp(), 0)
    trial.optimizer.register_step_post_hook(lambda *args: None)
    with pytest.raises(NotStackable, match=r"step\(\) has hooks"):
        train(Bundle(builder(trial.subject)), [trial])
    trial = Trial(Mlp(), 0)
    trial.model[1].weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[index,union-attr,operator]
    with pytest.raises(NotStackable, match=r"1\.weight has hooks"):
        train(Bundle(builder(trial.subject)), [trial])


class Various(Mlp):
    """A model that hyperparameters shape."""

    def model(self, hp: Hp) -> nn.Module:
        return nn.Sequential(super().model(hp), nn.Dropout(0.1 * self.which))

    which = 0


def test_trials_whose_models_differ_are_not_stacked() -> None:
    subject = Various()
    first = Trial(subject, 0)
    subject.which = 1
    with pytest.raises(NotStackable, match="models"):
        train(Bundle(builder(subject)), [first, Trial(subject, 1)])


class Projected(Sibling):
    """A model that holds a tensor outside of its parameters and buffers."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
        model.projection = torch.randn(36) if self.own else torch.ones(36)  # type: ignore[assignment]
        return model

    own = True

    def optimizer(self, model: nn.Module, hp: Hp) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def loss(self, model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0].flatten(1) * model.projection), batch[1])


def test_models_are_stacked_only_if_their_unregistered_tensors_are_equal() -> None:
    subject = Projected()
    with pytest.raises(NotStackable, match="models"):
        train(Bundle(builder(subject)), [Trial(subject, 0), Trial(subject, 1)])
    subject.own = False
    bundle = Bundle(builder(subject))
    trials = [Trial(subject, 0), Trial(subject, 1)]
    train(bundle, trials)
    trials[0].model.projection.add_(1)  # type: ignore[operator,union-attr]
    with pytest.raises(NotStackable, match="has been changed"):
        train(bundle, trials)


def test_stacked_models_take_a_new_batch_shape_only_together() -> None:
    subject = Mlp()
    bundle = Bundle(builder(subject))
    trials = [Trial(subject, 0), Trial(subject, 1)]
    train(bundle, trials)
    whole, part = (subject.data(torch.Generator(), size) for size in (6, 4))
    assert shape_key(whole) != shape_key(part)
    assert shape_key(whole) == shape_key(subject.data(torch.Generator(), 6))
    with pytest.raises(NotStackable, match="batches differ in shape"):
        bundle.step([whole, part], [hp_of(0, 1), hp_of(1, 1)])
    assert bundle.step([part, part], [hp_of(0, 1), hp_of(1, 1)]) is not None


class Branching(Mlp):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (2 if self.hp["layers"] > 3 else 1)


def test_trials_are_not_stacked_if_a_step_reads_integer_hyperparameters_that_differ() -> None:
    subject = Branching()
    trials = [Trial(subject, 0), Trial(subject, 1)]
    bundle = Bundle(builder(subject))
    train(bundle, trials)
    batches = [subject.data(torch.Generator(), 6)] * 2
    with pytest.raises(NotStackable, match="hyperparameters"):
        bundle.step(batches, [hp_of(0, 1), {**hp_of(1, 1), "layers": 4}])


def test_a_stacked_step_is_refused_if_the_momentum_becomes_zero() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bundle = Bundle(builder(Mlp()))
    bundle.join(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(NotStackable, match="momentum or weight decay"):
        bundle.step([Mlp().data(torch.Generator(), 2)], [hp_of(0, 0)])
    with pytest.raises(NotStackable, match="in more than the values"):
        bundle.join(model, optimizer)
