"""Programs that cannot be stacked train as they are, in the same numerics class, next to any others; or are refused."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpstage.checkpoints.state_tree import reread
from hpstage.errors import UsageError
from hpstage.torch.backends.siblings import StackedLoop
from tests.torch.backends.forking import by, forks_exactly
from tests.torch.backends.odd_programs import ODD, Hooked, Printing, SideEffects, Surgery, Tiny
from tests.torch.trainables import FORK, STEPS, advance, fresh, hp_at, outcome

pytestmark = pytest.mark.sampled(8)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.classifier = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.recurrent(x.reshape(len(x), 8, 8))[0][:, -1])
        return out


class Recurrent(Tiny):
    """torch's recurrent layers hold their weights twice."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Words()


class NoFormula(Tiny):
    """An optimizer of which there is no stacked form."""

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=hp["lr"])


class SparseEmbedding(Tiny):
    """Gradients that have rows for few of the weights."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(16, 6, sparse=True), nn.Linear(6, 3))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, (batch[0].flatten(1).abs().mul(8).long() % 16, batch[1]))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"weights": float(sum(weight.abs().sum() for weight in model.parameters()))}


class LateDraws(Tiny):
    """The last batch of each epoch is short, and trained with random numbers of all three libraries."""

    step_unit = "epoch"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch) * (1 + torch.rand(()))
        if len(batch[0]) == 6:
            loss = loss * (1 + random.random() + float(np.random.rand()))
        return loss


class SomeLook(Tiny):
    """Every second sibling looks at values."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * 0.5 if self.hp.get("looks") and loss.item() > 0.5 else loss


class SomeHooked(Tiny):
    """Every second sibling has a hook on a gradient, which is all that its model differs in."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = super().model(hp)
        if hp.get("looks"):
            model[1].bias.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[index]
        return model


class Accumulating(Tiny):
    """Steps by chance, with the gradients of all batches since."""

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        loss = self.loss(model, batch)
        loss.backward()
        if random.random() < 0.5:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class OwnGenerator(Tiny):
    """The model has a generator, and a tensor that is not a buffer."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model: Any = super().model(hp)
        model.generator, model.scale = torch.Generator().manual_seed(3), torch.ones(())
        return model  # type: ignore[no-any-return]

    def loss(self, model: Any, batch: Any) -> Tensor:
        model.scale.mul_(1.01)
        return super().loss(model, batch) * model.scale * (1 + torch.rand((), generator=model.generator))


class SharedList(Tiny):
    """A list of the object's, which all models hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model: Any = super().model(hp)
        model.seen = self.seen
        return model  # type: ignore[no-any-return]

    def loss(self, model: Any, batch: Any) -> Tensor:
        model.seen.append(1)
        return super().loss(model, batch) * len(model.seen)


REFUSED = {Hooked: r"self\.mean", Surgery: r"self\.batches", SharedList: r"self\.seen"}
OTHERS = (Recurrent, NoFormula, SparseEmbedding, LateDraws, SomeLook, SomeHooked, Accumulating, OwnGenerator)
TRAINED = [kind for kind in (*ODD, *OTHERS) if kind not in REFUSED]


def hp_of(id: int, step: int) -> dict[str, Any]:
    return {**hp_at(step), "seed": id, "lr": hp_at(step)["lr"] / (1 + id), "looks": id % 2 == 1}


def alone(kind: type[Tiny], id: int, numerics: str = "stacked") -> Any:
    trainable: Any = fresh(by(numerics, kind)(), hp_of(id, 0))
    for step in range(STEPS):
        trainable.train(step, hp_of(id, step))
    return trainable


def with_others(kind: type[Tiny]) -> list[StackedLoop]:
    """Train siblings 0 to 2 to the end: 1 begins late, 2 continues in the slot of another that has left."""
    subject = by("stacked", kind)()
    subject.max_stacked = 3
    loop = StackedLoop(subject)
    slots: Any = loop.members()

    def train(steps: dict[int, tuple[int, int]]) -> None:
        due = {index: (step, hp_of(id, step)) for index, (id, step) in steps.items()}
        loop.train_together(due)
        for index, (step, hp) in due.items():
            slots[index].train(step, hp)

    for index, id in enumerate((2, 0, 7)):
        slots[index].setup(hp_of(id, 0))
    for step in range(FORK):
        train({0: (2, step), 1: (0, step), 2: (7, step)} if step < 4 else {0: (2, step), 1: (0, step)})
    state = reread(slots[0].state_dict())
    slots[2].setup(hp_of(2, 0))
    slots[2].load_state_dict(state)
    slots[0].setup(hp_of(1, 0))
    for step in range(FORK, STEPS):
        train({0: (1, step - FORK), 1: (0, step), 2: (2, step)})
    for step in range(STEPS - FORK, STEPS):
        train({0: (1, step)})
    return [slots[1], slots[0], slots[2]]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", TRAINED)
def test_an_unusual_program_forks_exactly_when_stacked(kind: type[Tiny]) -> None:
    forks_exactly(by("stacked", kind))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", TRAINED)
def test_an_unusual_program_has_the_same_bits_with_and_without_siblings(kind: type[Tiny]) -> None:
    for id, slot in enumerate(with_others(kind)):
        assert outcome(slot) == outcome(alone(kind, id))


@pytest.mark.parametrize("kind", [SideEffects, Recurrent, NoFormula, SparseEmbedding])
def test_a_program_that_cannot_be_stacked_has_the_metrics_of_eager_training(kind: type[Tiny]) -> None:
    """What was recorded in vain has left nothing behind."""
    assert alone(kind, 0).evaluate() == alone(kind, 0, "eager").evaluate()


def test_other_siblings_remain_stacked_if_one_sibling_cannot_be_stacked() -> None:
    loop = StackedLoop(by("stacked", SomeLook)())
    for id, slot in enumerate(loop.members()):
        slot.setup(hp_of(id, 0))
    loop.train_together({id: (0, hp_of(id, 0)) for id in range(3)})
    even, odd, other = loop.stack.slots[:3]
    assert even.bundle is not None and even.bundle is other.bundle
    assert odd.bundle is None and not odd.is_stacked


@pytest.mark.parametrize("kind", REFUSED)
def test_an_object_that_siblings_would_share_and_change_is_refused_by_name(kind: type[Tiny]) -> None:
    with pytest.raises(
        UsageError, match=f"{REFUSED[kind]}.*numerics = 'stacked'|numerics = 'stacked'.*{REFUSED[kind]}"
    ):
        alone(kind, 0)


def test_a_program_that_cannot_be_stacked_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        trainable = fresh(by("stacked", Printing)())
        advance(trainable, 0, 3)
        trainable.setup(hp_at(0))
        advance(trainable, 0, 3)
    [warning] = [record.getMessage() for record in caplog.records if "without stacking" in record.getMessage()]
    assert warning.endswith("Printing.update() needs Python at each step: Python looks at a tensor's value")
    assert isinstance(trainable, StackedLoop) and trainable.stack.builder.tracer.traced == 0


class CatchingAll(Tiny):
    """Catches the error by which a recording says that it has no values."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        try:
            out = out * 0.5 if out.max() > 0.5 else out
        except Exception:
            out = out * 2
        return nn.functional.cross_entropy(out, batch[1])


def test_a_program_that_catches_the_error_of_the_recording_has_the_metrics_of_eager_training() -> None:
    trainable = alone(CatchingAll, 0)
    assert trainable.evaluate() == alone(CatchingAll, 0, "eager").evaluate()


class Factorizing(Tiny):
    """Catches an error of torch's that depends on values."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        try:
            return loss + torch.linalg.cholesky(-torch.eye(3) * loss.detach()).sum()
        except torch.linalg.LinAlgError:
            return loss * 0.5


def test_a_program_that_catches_a_value_dependent_error_of_torch_is_refused() -> None:
    with pytest.raises(UsageError, match="catches an error of torch's, _LinAlgError"):
        alone(Factorizing, 0)


class Reading(Tiny):
    """Reads a file that is not there for a moment."""

    there = True

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not Reading.there:
            raise OSError(116, "Stale file handle")
        return super().loss(model, batch)


def test_a_program_is_stacked_after_a_temporary_failure_while_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    trainable: Any = fresh(by("stacked", Reading)(), hp_of(0, 0))
    monkeypatch.setattr(Reading, "there", False)
    with pytest.raises(OSError, match="Stale file handle"):
        trainable.train(0, hp_of(0, 0))
    trainable.close()
    monkeypatch.setattr(Reading, "there", True)
    trainable.setup(hp_of(0, 0))
    trainable.train(0, hp_of(0, 0))
    assert trainable.is_stacked
