"""What siblings do not train is there once for all of them, and so is what they compute of it on the same batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpstage.torch.backends.stacked import Bundle, outputs
from tests.torch.backends.siblings import Hp, Sibling, Trial, builder, hp_of, train, train_eagerly

pytestmark = pytest.mark.sampled(3)

STEPS = 3


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(self.norm(x)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind()
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Backbone(Sibling):
    """A frozen backbone that is the same in all members, and a classifier; batches of 6 x 16 numbers."""

    def model(self, hp: Hp) -> nn.Module:
        own = torch.get_rng_state()
        torch.manual_seed(0)
        backbone = self.backbone().requires_grad_(False)
        torch.set_rng_state(own)
        return nn.Sequential(self.changed(backbone), nn.Flatten(), nn.Linear(96, 5))

    def backbone(self) -> nn.Module:
        return nn.Sequential(Attention(), nn.Linear(16, 16), nn.GELU(), Attention())

    def changed(self, backbone: Any) -> nn.Module:
        made: nn.Module = backbone
        return made

    def optimizer(self, model: nn.Module, hp: Hp) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=hp["lr"])

    def data(self, generator: torch.Generator, size: int) -> Any:
        return torch.randn(size, 6, 16, generator=generator), torch.randint(5, (size,), generator=generator)


class OneBatch(Backbone):
    """All members train on the same batches."""

    def data(self, generator: torch.Generator, size: int) -> Any:
        step = generator.initial_seed() % 1000
        return super().data(generator.manual_seed(step), size)


class Adapted(OneBatch):
    def changed(self, backbone: Any) -> nn.Module:
        backbone[1] = Adapter(backbone[1])
        return backbone  # type: ignore[no-any-return]


class DroppedApart(Adapted):
    """Each member drops others of the numbers that all have in common."""

    def backbone(self) -> nn.Module:
        first = nn.Sequential(Attention(), nn.Dropout(0.3), nn.Linear(16, 16))
        return nn.Sequential(first, nn.Linear(16, 16), nn.Dropout(0.3), Attention())


class Dropped(DroppedApart):
    """The same, with the same random numbers for all."""

    def seed_of(self, id: int) -> int:
        return 0


class DrawnByValue(Dropped):
    """How many random numbers a member draws depends on its weights, and more are drawn after that."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        logits = model(x)
        counts = torch.poisson(logits.detach().exp() * 20)
        kept = nn.functional.dropout(x.mean(1), 0.5)
        return nn.functional.cross_entropy(logits + counts / 50, y) * (1 + kept.square().mean())


class AdaptedFirst(Backbone):
    """Gradients pass through all of the backbone, and batches differ."""

    def changed(self, backbone: Any) -> nn.Module:
        backbone[0].all = Adapter(backbone[0].all)
        return backbone  # type: ignore[no-any-return]


class Peft(OneBatch):
    def changed(self, backbone: Any) -> nn.Module:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["all", "out"], init_lora_weights=False)
        return peft.get_peft_model(backbone, config)  # type: ignore[no-any-return]


class Images(OneBatch):
    """Convolutions, and running statistics that change."""

    def backbone(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(2, (1, 16)),
            nn.Conv2d(6, 6, 3, padding=(2, 1)),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3),
            nn.AdaptiveAvgPool2d((1, 16)),
        )

    def data(self, generator: torch.Generator, size: int) -> Any:
        x, y = super().data(generator, size)
        return x, y


class ImagesInEval(Images):
    def changed(self, backbone: Any) -> nn.Module:
        made: nn.Module = backbone.eval()
        return made


class Odd(OneBatch):
    """Frozen numbers of many types, some of them no numbers."""

    def backbone(self) -> nn.Module:
        made = nn.Sequential(Attention(), nn.Linear(16, 16))
        made.register_buffer("eighths", torch.arange(16.0).to(torch.float16))
        made.register_buffer("codes", torch.arange(16, dtype=torch.int8))
        made.register_buffer("mask", torch.arange(16) % 2 == 0)
        made.register_buffer("none", torch.full((16,), torch.nan))
        made.register_buffer("turns", torch.complex(torch.ones(16), -torch.zeros(16)))
        return made

    def loss(self, model: Any, batch: Any) -> Tensor:
        parts = model[0]
        scale = parts.codes * parts.eighths.float() * parts.turns.real + parts.none.nan_to_num()
        return super().loss(model, (batch[0] + scale.where(parts.mask, 1.0) / 100, batch[1]))


class Tied(OneBatch):
    def backbone(self) -> nn.Module:
        made = nn.Sequential(Attention(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        made[3].weight = made[1].weight
        return made


class Large(OneBatch):
    """Frozen weights of which no copies are made to check programs."""

    def backbone(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 16))

    def changed(self, backbone: Any) -> nn.Module:
        backbone[1] = Adapter(backbone[1])
        return backbone  # type: ignore[no-any-return]


class ByHand(OneBatch):
    """A frozen layer that ``update()`` changes itself."""

    def update(self, model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        with torch.no_grad():
            model[0][1].weight.mul_(0.9).add_(model[0][1].bias.mean(), alpha=0.1)
        optimizer.step()
        return loss


KINDS: dict[str, type[Backbone]] = {
    kind.__name__: kind
    for kind in (
        *(Backbone, OneBatch, Adapted, DroppedApart, Dropped, DrawnByValue, AdaptedFirst, Peft),
        *(Images, ImagesInEval, Odd, Tied, Large, ByHand),
    )
}

SEVERAL = [pytest.param(name, marks=[pytest.mark.ci] * (name in ("Peft", "AdaptedFirst"))) for name in KINDS]


def together(subject: Backbone, ids: list[int], steps: int = STEPS) -> tuple[Bundle, list[Trial]]:
    bundle, trials = Bundle(builder(subject)), [Trial(subject, id) for id in ids]
    for _ in range(steps):
        train(bundle, trials)
    return bundle, trials


def states(bundle: Bundle, trials: list[Trial]) -> list[dict[str, Any]]:
    for member in bundle.members:
        bundle.sync(member)
    return [trial.state() for trial in trials]


def storages(bundle: Bundle, name: str) -> int:
    """Return how many copies of a tensor a bundle has."""
    assert bundle._trace is not None
    parts = bundle._kept[bundle._trace.kept.index(name)]
    return len({part.data_ptr() for part in parts})


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("members", [3, pytest.param(8, marks=pytest.mark.ci)])
def test_stacked_models_with_a_frozen_backbone_have_the_bits_of_a_single_model(name: str, members: int) -> None:
    subject = KINDS[name]()
    found = states(*together(subject, list(range(members))))
    for id in (0, members - 1):
        assert found[id] == states(*together(subject, [id]))[0]


@pytest.mark.ci
@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["OneBatch", "Adapted", "Dropped", "AdaptedFirst", "ImagesInEval"])
@pytest.mark.parametrize("members", range(1, 17))
def test_bits_do_not_depend_on_the_number_of_stacked_models_with_a_frozen_backbone(name: str, members: int) -> None:
    test_stacked_models_with_a_frozen_backbone_have_the_bits_of_a_single_model(name, members)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_stacked_step_with_a_frozen_backbone_equals_an_eager_update_up_to_rounding(name: str) -> None:
    subject = KINDS[name]()
    bundle, (trial, _) = together(subject, [1, 2])
    eager = Trial(KINDS[name](), 1)
    for _ in range(STEPS):
        train_eagerly(eager)
    states(bundle, [trial])
    assert trial.losses == pytest.approx(eager.losses, rel=1e-4)
    mine, its = trial.model.state_dict(), eager.model.state_dict()
    assert mine.keys() == its.keys()
    for key in mine:
        assert torch.allclose(mine[key], its[key], rtol=1e-3, atol=1e-5, equal_nan=True), key


@pytest.mark.parametrize("name", ["Backbone", "Adapted", "Odd", "Tied", "ImagesInEval"])
def test_frozen_weights_are_stored_once_for_all_stacked_models(name: str) -> None:
    bundle, trials = together(KINDS[name](), [0, 1, 2], 1)
    frozen = [path for path, weight in trials[0].model.named_parameters() if not weight.requires_grad]
    assert frozen
    frozen += [path for path, _ in trials[0].model.named_buffers()]
    assert {storages(bundle, path) for path in frozen} == {1}


@pytest.mark.parametrize(
    ("name", "changed", "others"),
    [("Images", "0.2.running_mean", "0.1.weight"), ("ByHand", "0.1.weight", "0.0.all.weight")],
)
def test_each_stacked_model_has_its_own_copy_of_tensors_that_a_step_changes(
    name: str, changed: str, others: str
) -> None:
    bundle, _ = together(KINDS[name](), [0, 1, 2], 1)
    assert (storages(bundle, changed), storages(bundle, others)) == (3, 1)


@pytest.mark.parametrize(("name", "computed"), [("OneBatch", 1), ("Backbone", 3)])
def test_a_frozen_prefix_is_computed_once_if_all_stacked_models_have_equal_batches(name: str, computed: int) -> None:
    bundle, _ = together(KINDS[name](), [0, 1, 2], 1)
    assert bundle._builder.outputs.computed == computed
    assert [work.skipped for work in bundle.frozen_work] == [computed != 3 and slot > 0 for slot in range(3)]


def test_a_model_reuses_frozen_outputs_of_a_model_that_is_one_step_ahead() -> None:
    subject = OneBatch()
    made, trials = builder(subject), [Trial(subject, id) for id in (0, 1)]
    train(first := Bundle(made), trials[:1])
    both = Bundle(made)
    first.leave(first.members[0])
    for _ in range(STEPS):
        train(both, trials)
    assert made.outputs.computed == STEPS + 1
    assert states(both, trials)[1] == states(*together(OneBatch(), [1]))[0]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "times"), [("Dropped", 2), ("DroppedApart", 0), ("DrawnByValue", 2)])
def test_stacked_models_share_equal_random_draws_until_a_draw_depends_on_a_models_values(name: str, times: int) -> None:
    bundle, _ = together(KINDS[name](), [0, 1, 2], 1)
    (source,) = (made.source for made in bundle._builder._programs.values() if made.width == 3)
    assert source.count("streams.once") == times
    assert ("streams.each" in source) is (name != "Dropped")


def test_a_model_with_a_different_backbone_joins_and_leaves_a_stack() -> None:
    subject = OneBatch()
    bundle, trials = together(subject, [0, 1], 1)
    odd = Trial(subject, 2)
    with torch.no_grad():
        odd.model[0][1].weight.mul_(2)  # type: ignore[index, operator]
    alone = Trial(subject, 2)
    alone.model.load_state_dict(odd.model.state_dict())
    train(bundle, [*trials, odd])
    assert storages(bundle, "0.1.weight") > 1
    train(bundle, trials)
    assert storages(bundle, "0.1.weight") == 1
    bundle.leave(bundle.members[0])
    assert trials[0].state() == states(*together(subject, [0], 3))[0]
    lone = Bundle(builder(subject))
    train(lone, [alone])
    assert odd.state() == states(lone, [alone])[0]


@pytest.mark.ci
@pytest.mark.parametrize("unfreeze", [True, False])
def test_a_frozen_layer_is_trained_after_it_is_unfrozen(unfreeze: bool) -> None:
    """As between two chains of a search: members leave, and join again."""
    subject = OneBatch()

    def run(ids: list[int]) -> list[dict[str, Any]]:
        trials = [Trial(subject, id) for id in ids]
        for trial in trials:
            backbone, _, classifier = trial.model
            groups = [{"params": part.parameters()} for part in (backbone[0], backbone[3], classifier)]
            trial.optimizer = torch.optim.AdamW(groups, lr=0.01)
        bundle = Bundle(builder(subject))
        train(bundle, trials)
        for member in list(bundle.members):
            bundle.leave(member)
        for trial in trials:
            trial.model[0][3].requires_grad_(unfreeze)
        bundle = Bundle(builder(subject))
        train(bundle, trials)
        return states(bundle, trials)

    found = run([0, 1, 2])
    assert found[1] == run([1])[0]
    key = "0.3.out.weight"
    assert (found[1]["model"][key] != found[0]["model"][key]) is unfreeze


def test_later_trials_on_the_same_batches_reuse_the_outputs_of_a_frozen_prefix() -> None:
    subject = OneBatch()
    made = builder(subject)

    def run(ids: list[int]) -> list[dict[str, Any]]:
        bundle, trials = Bundle(made), [Trial(subject, id) for id in ids]
        for _ in range(STEPS):
            train(bundle, trials)
        return states(bundle, trials)

    first = run([0, 1, 2])
    assert (made.outputs.computed, made.outputs.found) == (STEPS, 0)
    assert run([3, 4]) == states(*together(OneBatch(), [3, 4]))
    assert run([0])[0] == first[0]
    assert (made.outputs.computed, made.outputs.found) == (STEPS, 2 * STEPS)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["Dropped", "DroppedApart"])
def test_frozen_outputs_are_cached_up_to_the_first_random_number(name: str) -> None:
    subject = KINDS[name]()
    made = builder(subject)
    for ids in ([0, 1, 2], [3, 4], [5]):
        bundle, trials = Bundle(made), [Trial(subject, id) for id in ids]
        for _ in range(STEPS):
            train(bundle, trials)
        assert states(bundle, trials) == states(*together(KINDS[name](), ids))
    assert (made.outputs.computed, made.outputs.found) == (STEPS, 2 * STEPS)


def test_cached_frozen_outputs_are_reused_only_for_equal_batches_and_weights() -> None:
    """What a batch is a part of may be changed, and a frozen layer may be another one."""
    subject = OneBatch()
    made = builder(subject)
    data, labels = torch.randn(5, 6, 16), torch.arange(4)

    def run(id: int, *, own: bool = False, factor: float = 1.0) -> list[float]:
        trial = Trial(subject, id)
        with torch.no_grad():
            trial.model[0][1].weight.mul_(factor)  # type: ignore[index, operator]
        bundle = Bundle(builder(subject) if own else made)
        bundle.join(trial.model, trial.optimizer)
        rows = [data[:4], data[1:], data.flatten()[1 : 1 + 4 * 96].view(4, 6, 16)]
        return [float(bundle.step([(row, labels)], [hp_of(id, 0)])) for row in rows]  # type: ignore[arg-type]

    assert run(0) == run(0) == run(0, own=True)
    assert made.outputs.found == 3
    data[2] += 1
    assert run(0) == run(0, own=True)
    assert run(0, factor=2.0) == run(0, own=True, factor=2.0)


class Numbered(OneBatch):
    """A step for each value of a hyperparameter."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        assert self.hp["layers"]
        return super().loss(model, batch)


@pytest.mark.ci
def test_frozen_outputs_are_cached_for_at_most_eight_kinds_of_steps() -> None:
    subject = Numbered()
    made = builder(subject)
    batch = subject.data(torch.Generator().manual_seed(0), 4)
    for layers in [*range(1, 13), 12, 11, 1]:
        trial, bundle = Trial(subject, 0), Bundle(made)
        bundle.join(trial.model, trial.optimizer)
        bundle.step([batch], [hp_of(0, 0) | {"layers": layers}])
    assert (made.tracer.traced, made.outputs.computed, made.outputs.found) == (12, 13, 2)
    assert len(made.outputs._kept) == 8


def test_frozen_outputs_are_cached_for_at_most_two_backbones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_LEAST", 0)
    subject = OneBatch()
    made = builder(subject)
    batch = subject.data(torch.Generator().manual_seed(0), 4)
    for number in range(5):
        trial, bundle = Trial(subject, 0), Bundle(made)
        with torch.no_grad():
            for parameter in trial.model[0].parameters():  # type: ignore[index]
                parameter.add_(number)
        bundle.join(trial.model, trial.optimizer)
        bundle.step([batch], [hp_of(0, 0)])
        assert len(made.outputs._kept) == min(2, number + 1)


class Complex(OneBatch):
    """Batches, and a buffer, that are conjugates."""

    def changed(self, backbone: Any) -> nn.Module:
        backbone.register_buffer("turns", torch.complex(torch.ones(16), torch.ones(16)).conj())
        return backbone  # type: ignore[no-any-return]

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        turned = x * model[0].turns
        return super().loss(model, (turned.real + 2 * turned.imag, y))

    def data(self, generator: torch.Generator, size: int) -> Any:
        x, y = super().data(generator, size)
        return torch.complex(x, x.square()).conj(), y


@pytest.mark.parametrize("resolved", [False, True])
def test_batches_of_conjugate_tensors_train_like_batches_of_resolved_tensors(resolved: bool) -> None:
    class Resolved(Complex):
        def data(self, generator: torch.Generator, size: int) -> Any:
            x, y = super().data(generator, size)
            return x.resolve_conj(), y

    _, (trial, _) = together(Resolved() if resolved else Complex(), [0, 1])
    _, (by_itself,) = together(Complex(), [0])
    assert trial.losses == by_itself.losses
