"""Slots have the memory of what is frozen in common, until one of them writes to it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hpstage.torch
from hpstage.checkpoints import lazy_copies
from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.state_tree import clone, digest, flatten
from hpstage.plan.facts import StateKey
from hpstage.torch.backends.siblings import StackedLoop
from hpstage.torch.frozen import frozen_shares
from hpstage.training.trainables import as_trainable

pytestmark = pytest.mark.sampled(3)

WIDTH = 128
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, of its next release
    BITS = torch.quantize_per_tensor(torch.randn(WIDTH, WIDTH), 0.1, 0, torch.qint8)


class Frozen(hpstage.torch.TorchTrainable):
    """A frozen backbone that each model() makes again, and a classifier."""

    device = "cpu"
    numerics = "stacked"
    batch_size = 4
    width = WIDTH

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        classifier = nn.Linear(self.width, 2)
        torch.manual_seed(0)
        return nn.Sequential(self.backbone().requires_grad_(False), classifier)

    def backbone(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh(), nn.Linear(self.width, self.width))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=hp["lr"])

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(16, self.width, generator=generator), torch.arange(16) % 2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": float(self.loss(model, self.dataset().tensors))}


class Tied(Frozen):
    def backbone(self) -> nn.Module:
        made: Any = super().backbone()
        made[2].weight = made[0].weight
        return made  # type: ignore[no-any-return]


class Views(Frozen):
    """Two parameters in one memory, of which nobody knows."""

    def backbone(self) -> nn.Module:
        made: Any = super().backbone()
        made[2].weight = nn.Parameter(made[0].weight.t())
        return made  # type: ignore[no-any-return]


class Changed(Frozen):
    """What is changed after it was shared with another model that was not changed in this way."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        made: Any = super().model(hp)
        with torch.no_grad():
            made[0][0].weight.mul_(100 * hp["lr"])
        return made  # type: ignore[no-any-return]


class Mapped(Frozen):
    """Weights in a mapped file, as ``from_pretrained()`` of transformers gives them."""

    def backbone(self) -> nn.Module:
        made = super().backbone()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights.safetensors"
            save_file(made.state_dict(), file)
            made.load_state_dict(load_file(file), assign=True)
        return made


class Buffers(Frozen):
    def backbone(self) -> nn.Module:
        made = super().backbone()
        made.register_buffer("table", torch.randn(WIDTH, WIDTH))
        made.register_buffer("codes", torch.arange(WIDTH * WIDTH, dtype=torch.int64))
        made.register_buffer("halves", torch.randn(WIDTH, WIDTH).half())
        return made


class Quantised(Frozen):
    """No step of this is recorded."""

    def backbone(self) -> nn.Module:
        made = super().backbone()
        made.register_buffer("bits", BITS.clone(), persistent=False)
        return made


class Averages(Frozen):
    """Running statistics, which a step changes."""

    def backbone(self) -> nn.Module:
        return nn.Sequential(super().backbone(), nn.Linear(WIDTH, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, WIDTH))


KINDS: dict[str, type[Frozen]] = {
    kind.__name__: kind for kind in (Frozen, Tied, Views, Changed, Mapped, Buffers, Quantised, Averages)
}
TRIALS = [{"lr": 0.01 * (id + 1)} for id in range(16)]


def slots_of(subject: Frozen, count: int) -> list[Any]:
    """Return slots, each trained for a step."""
    subject.max_stacked = count
    loop: Any = as_trainable(subject)
    assert isinstance(loop, StackedLoop)
    slots = list(loop.members())
    for slot, hp in zip(slots, TRIALS, strict=False):
        slot.setup(hp)
    train(loop, slots, 0)
    return slots


def train(loop: Any, slots: list[Any], step: int) -> None:
    loop.stack.first.train_together({index: (step, hp) for index, hp in enumerate(TRIALS[: len(slots)])})
    for slot, hp in zip(slots, TRIALS, strict=False):
        slot.train(step, hp)


def model_of(slot: Any) -> Any:
    return slot._built.model


def memory(models: Iterable[nn.Module]) -> int:
    """Return the bytes that models have together."""
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    sizes = {lazy_copies.address_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def frozen(slot: Any) -> int:
    trained = sum(4 * weight.numel() for weight in model_of(slot)[1].parameters())
    return memory([model_of(slot)]) - trained


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["Frozen", "Tied", "Mapped", "Averages"])
@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.ci)])
def test_an_additional_slot_takes_memory_only_for_trained_weights(name: str, count: int) -> None:
    slots = slots_of(KINDS[name](), count)
    for after in (lambda slot: slot.state_dict(), lambda slot: slot.evaluate(), lambda slot: digest(slot.state_dict())):
        for slot in slots:
            after(slot)
        own = memory(map(model_of, slots)) - frozen(slots[0])
        assert own < count * 0.1 * frozen(slots[0])


@pytest.mark.ci
@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [3, 1, 2, 8, 16])
def test_slots_that_share_frozen_memory_have_the_states_of_a_single_slot(name: str, count: int) -> None:
    slots = slots_of(KINDS[name](), count)
    train(slots[0], slots, 1)
    for index in {0, count - 1}:
        lone: Any = as_trainable(KINDS[name]())
        (slot,) = slots_of_one(lone, TRIALS[index])
        assert digest(slots[index].state_dict()) == digest(slot.state_dict())


def slots_of_one(loop: Any, hp: Mapping[str, Any]) -> list[Any]:
    slot = loop.members()[0]
    slot.setup(hp)
    for step in range(2):
        slot.train(step, hp)
    return [slot]


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[0] = 7


def by_data(weight: Tensor) -> None:
    weight.data[0] = 7


def in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


@pytest.mark.ci
@pytest.mark.one_in(4)
@pytest.mark.parametrize("write", [by_numpy, by_data, in_place])
@pytest.mark.parametrize("name", ["Frozen", "Tied", "Buffers"])
def test_a_write_to_frozen_memory_changes_only_the_slot_that_writes(write: Callable[[Tensor], None], name: str) -> None:
    slots = slots_of(KINDS[name](), 3)
    before = [digest(slot.state_dict()) for slot in slots]
    for slot in slots:
        slot.detach()
    write(model_of(slots[1])[0][0].weight)
    after = [digest(slot.state_dict()) for slot in slots]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]
    train(slots[0], slots, 1)
    untouched = slots_of(KINDS[name](), 3)
    train(untouched[0], untouched, 1)
    assert [digest(a.state_dict()) == digest(b.state_dict()) for a, b in zip(slots, untouched, strict=True)] == [
        *(True, False, True)
    ]


def test_a_frozen_weight_is_not_shared_if_a_numpy_array_holds_its_address() -> None:
    arrays = []

    class Known(Frozen):
        stateless = ("arrays",)

        def backbone(self) -> nn.Module:
            made: Any = super().backbone()
            arrays.append(made[0].weight.detach().numpy())
            return made  # type: ignore[no-any-return]

    slots = slots_of(Known(), 2)
    first, second = (model_of(slot)[0] for slot in slots)
    assert lazy_copies.address_of(first[0].weight) != lazy_copies.address_of(second[0].weight)
    assert lazy_copies.address_of(first[2].weight) == lazy_copies.address_of(second[2].weight)


def test_the_digest_of_a_state_does_not_depend_on_whether_frozen_memory_was_copied() -> None:
    (slot,) = slots_of(Frozen(), 1)
    before = digest(slot.state_dict())
    assert lazy_copies.is_lazy(model_of(slot)[0][0].weight)
    kept = clone(slot.state_dict())
    model_of(slot)[0][0].weight.data_ptr()
    assert not lazy_copies.is_lazy(model_of(slot)[0][0].weight)
    assert digest(slot.state_dict()) == digest(kept) == before
    slot.setup(TRIALS[0])
    slot.load_state_dict(kept)
    assert digest(slot.state_dict()) == before


def test_a_view_of_frozen_memory_remains_a_view_after_a_state_is_loaded() -> None:
    class Cached(Frozen):
        numerics = "eager"
        cached: Any = None

        def loss(self, model: Any, batch: Any) -> Tensor:
            self.cached = model[0][0].weight.detach()[1:]
            return super().loss(model, batch)

    subject = Cached()
    loop: Any = as_trainable(subject)
    loop.setup(TRIALS[0])
    loop.train(0, TRIALS[0])
    state = clone(loop.state_dict())
    with torch.no_grad():
        model_of(loop)[0][0].weight.zero_()
    assert not subject.cached.any()
    loop.setup(TRIALS[0])
    loop.load_state_dict(state)
    assert subject.cached.any()
    with torch.no_grad():
        model_of(loop)[0][0].weight.zero_()
    assert not subject.cached.any()


def test_a_live_copy_of_a_state_takes_no_memory_for_frozen_weights() -> None:
    (slot,) = slots_of(Frozen(), 1)
    live = LiveCache()
    live.put(StateKey("a"), slot.state_dict())
    weights = {lazy_copies.address_of(weight) for weight in model_of(slot)[0].parameters()}
    kept = {lazy_copies.address_of(value) for value in flatten(live.get(StateKey("a"))).values if value.numel()}
    assert len(weights & kept) == 2
    in_place(model_of(slot)[0][0].weight)
    slot.setup(TRIALS[0])
    slot.load_state_dict(live.get(StateKey("a")))
    assert digest(slot.state_dict()) == digest(live.get(StateKey("a")))


PEAK, LAYERS = 1024, 16  # numbers in a row of a weight; weights


class Large(Frozen):
    width = PEAK

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(PEAK, PEAK) for _ in range(LAYERS)))


@pytest.mark.ci
def test_eight_slots_take_the_memory_of_one_frozen_backbone() -> None:
    """And of a few layers, while a model is made or a program is built and checked."""
    mapped = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # freed memory goes back at once
    ran = subprocess.run([sys.executable, "-m", __name__], env=mapped, capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 1.3  # two, if a whole model is made before it is shared; nine, if each slot has its own


def grown() -> float:
    """Return by how many backbones the peak of this process grows by training eight slots."""
    slots_of(Frozen(), 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slots_of(Large(), 8)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * 1024 / (LAYERS * 4 * PEAK * PEAK)


if __name__ == "__main__":
    sys.stdout.write(str(grown()))


@pytest.mark.parametrize(
    ("trained", "shares"),
    [
        ("classifier", (0.8, 0.8)),
        ("optimizer's", (0.8, 0.8)),
        ("stem", (0.2, 0.0)),
        ("all", (0.0, 0.0)),
        ("nothing", (1, 1)),
    ],
)
def test_the_share_of_frozen_weights_is_computed_from_model_and_optimizer(
    trained: str, shares: tuple[float, float]
) -> None:
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    stem, classifier = model[1], model[2]
    if trained in ("classifier", "stem", "nothing"):
        model.requires_grad_(False)
    if trained in ("classifier", "stem"):
        (classifier if trained == "classifier" else stem).requires_grad_(True)
    optimizer = torch.optim.SGD(classifier.parameters() if trained == "optimizer's" else model.parameters(), 0.1)
    assert frozen_shares(model, optimizer) == pytest.approx(shares)
