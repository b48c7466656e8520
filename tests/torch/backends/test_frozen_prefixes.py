"""What the prefix of a step may consist of, and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpstage.torch.backends.stacked import Bundle, NeedsPython
from tests.torch.backends.siblings import Hp, Trial, builder, train, train_eagerly
from tests.torch.backends.test_frozen_siblings import STEPS, OneBatch, states, together

pytestmark = pytest.mark.sampled(3)


class Keeps(OneBatch):
    """Keeps, in a buffer, one of several results of an operation that the prefix could have."""

    def changed(self, backbone: Any) -> nn.Module:
        backbone.register_buffer("last", torch.zeros(6, 6, 4))
        return backbone  # type: ignore[no-any-return]

    def results(self, features: Tensor) -> Sequence[Tensor]:
        return features.topk(4, 2)

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        backbone, *_, classifier = model
        first, second = self.results(backbone(x))
        backbone.last = first
        return nn.functional.cross_entropy(classifier(x.flatten(1)) * first.mean() + second.sum() / 100, y)


class KeepsSplit(Keeps):
    def results(self, features: Tensor) -> Sequence[Tensor]:
        return features.split([4, 12], 2)


class OtherRows(OneBatch):
    """Frozen tables that are the same in the rows that all look up, in others not; dropout is the same for all."""

    def seed_of(self, id: int) -> int:
        return 0

    def model(self, hp: Hp) -> nn.Module:
        table = nn.Embedding(100, 16).requires_grad_(False)
        with torch.no_grad():
            table.weight[:8] = torch.linspace(-1, 1, 128).view(8, 16)
        return nn.Sequential(table, super().model(hp))

    def backbone(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16))

    def data(self, generator: torch.Generator, size: int) -> Any:
        x, y = super().data(generator, size)
        return x[:, :, 0].abs().mul(3).long().clamp(0, 7), y


@pytest.mark.parametrize("kind", [Keeps, KeepsSplit, OtherRows])
def test_stacked_models_with_an_unusual_frozen_prefix_have_the_bits_of_a_single_model(kind: type[OneBatch]) -> None:
    bundle, trials = together(kind(), [0, 1, 2])
    assert bundle._builder.outputs.computed
    found = states(bundle, trials)
    for id in (0, 2):
        assert found[id] == states(*together(kind(), [id]))[0]
    eager = Trial(kind(), 1)
    for _ in range(STEPS):
        train_eagerly(eager)
    assert trials[1].losses == pytest.approx(eager.losses, rel=1e-4)


class Phases(OneBatch):
    """In one phase, steps change a buffer that the prefix reads in the other."""

    def __init__(self, phases: Sequence[bool]) -> None:
        self.phases = phases

    def changed(self, backbone: Any) -> nn.Module:
        backbone.register_buffer("scale", torch.ones(16))
        return backbone  # type: ignore[no-any-return]

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        if self.hp["changes"]:
            model[0].scale.mul_(1.1)
        return super().loss(model, (x * model[0].scale, y))


class InPhases(Trial):
    def turn(self) -> tuple[Any, dict[str, Any]]:
        assert isinstance(self.subject, Phases)
        changes = self.subject.phases[self.step]
        batch, hp = super().turn()
        return batch, hp | {"changes": changes}


@pytest.mark.ci
@pytest.mark.parametrize("phases", [(True, False, False, True, False), (False, True, True, False, False)])
def test_a_buffer_that_steps_change_in_only_some_phases_is_trained_exactly(phases: tuple[bool, ...]) -> None:
    subject = Phases(phases)

    def run(ids: list[int]) -> list[dict[str, Any]]:
        bundle, trials = Bundle(builder(subject)), [InPhases(subject, id) for id in ids]
        for _ in phases:
            train(bundle, list(trials))
        found = states(bundle, list(trials))
        for member in list(bundle.members):
            bundle.leave(member)
        assert found == [trial.state() for trial in trials]
        return found

    eager = InPhases(subject, 1)
    for _ in phases:
        train_eagerly(eager)
    found = run([0, 1, 2])
    assert found[1] == run([1])[0]
    assert found[1]["model"]["0.scale"] == eager.state()["model"]["0.scale"]
    assert found[1]["losses"] == pytest.approx(eager.losses, rel=1e-4)


class Sparse(OneBatch):
    """Frozen weights of which steps make a sparse tensor."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        weight = model[0][1].weight.relu().to_sparse()
        mixed = torch.sparse.mm(weight, x.flatten(0, 1).T).T.unflatten(0, (-1, 6))
        return super().loss(model, (mixed, y))


class Twice(OneBatch):
    """A buffer in the memory of a weight."""

    trained = True

    def changed(self, backbone: Any) -> nn.Module:
        backbone[1].weight.requires_grad_(self.trained)
        backbone.register_buffer("turned", backbone[1].weight.detach().T)
        return backbone  # type: ignore[no-any-return]

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return super().loss(model, (x @ model[0].turned, y))


class TwiceFrozen(Twice):
    trained = False


@pytest.mark.parametrize("kind", [Sparse, TwiceFrozen])
def test_sparse_and_overlapping_frozen_tensors_give_the_bits_of_a_single_model(kind: type[OneBatch]) -> None:
    test_stacked_models_with_an_unusual_frozen_prefix_have_the_bits_of_a_single_model(kind)


def test_a_step_that_changes_memory_shared_by_two_tensors_is_not_recorded() -> None:
    with pytest.raises(NeedsPython, match=r"0\.1\.weight and 0\.turned have in common"):
        together(Twice(), [0])
