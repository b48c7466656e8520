"""Which operations keep samples apart, and that a frozen prefix is computed once for each sample where it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from hpstage.errors import StateError
from hpstage.torch.backends.stacked import Bundle, outputs
from hpstage.torch.backends.stacked.outputs import SampleStore, digests
from hpstage.torch.backends.stacked.prefix import Samples
from hpstage.torch.backends.stacked.samples import Rows, rows_of
from tests.torch.backends.siblings import Trial, builder, train
from tests.torch.backends.test_frozen_siblings import OneBatch, states

SAMPLES = 4
functional = nn.functional
Step = Callable[[Tensor], Tensor]

STEPS: list[Step] = [
    *(torch.relu, lambda x: x + 1, lambda x: x * x.exp(), lambda x: x + x[:1], lambda x: x + torch.ones(x.shape[0], 1)),
    *(lambda x: x.flatten(1), lambda x: x.flatten(0, 1), lambda x: x.flatten(), lambda x: x.unflatten(0, (2, -1))),
    *(lambda x: x.unflatten(-1, (2, -1)), lambda x: x.unsqueeze(0), lambda x: x.squeeze(0), lambda x: x.unsqueeze(1)),
    *(lambda x: x.transpose(0, 1), lambda x: x.transpose(-1, -2), lambda x: x.permute(2, 0, 1), lambda x: x.t()),
    *(
        lambda x: x.sum(0),
        lambda x: x.mean(-1),
        lambda x: x.std(1),
        lambda x: x.var(-1, keepdim=True),
        lambda x: x.sum(-1, keepdim=True),
        lambda x: x.sum(),
        lambda x: x.amax(1),
    ),
    *(
        lambda x: x.softmax(0),
        lambda x: x.softmax(-1),
        lambda x: x.cumsum(0),
        lambda x: x.cumsum(-1),
        lambda x: x.flip(0),
    ),
    *(
        lambda x: x[0],
        lambda x: x[:, 0],
        lambda x: x[..., 1:],
        lambda x: x[1:],
        lambda x: x[::2],
        lambda x: x.unbind(1)[0],
    ),
    *(
        lambda x: x.split(2)[0],
        lambda x: x.split(2, -1)[1],
        lambda x: x.chunk(2, 1)[0],
        lambda x: x.expand(3, *x.shape),
    ),
    *(
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, x + 1], 1),
        lambda x: torch.stack([x, x]),
        lambda x: x - x.mean(0),
    ),
    *(
        lambda x: torch.cat([torch.ones(1, *x.shape[1:]).expand_as(x), x], 1),
        lambda x: torch.cat([torch.rand(x.shape), x], 1),
    ),
    *(
        lambda x: x @ torch.ones(x.shape[-1], 3),
        lambda x: torch.ones(3, x.shape[-2]) @ x,
        lambda x: x @ x.transpose(-1, -2),
    ),
    *(lambda x: functional.linear(x, torch.ones(4, x.shape[-1]), torch.ones(4)), lambda x: torch.addmm(x, x, x)),
    *(lambda x: functional.layer_norm(x, x.shape[-1:]), lambda x: functional.layer_norm(x, x.shape)),
    *(lambda x: functional.group_norm(x, 1), lambda x: functional.instance_norm(x)),
    *(lambda x: functional.batch_norm(x, torch.ones(x.shape[1]), torch.ones(x.shape[1])),),
    *(lambda x: functional.batch_norm(x, None, None, training=True),),
    *(lambda x: functional.conv1d(x, torch.ones(2, x.shape[1], 2)), lambda x: functional.max_pool2d(x, 2)),
    *(lambda x: functional.avg_pool2d(x, 2), lambda x: functional.adaptive_avg_pool2d(x, 2)),
    *(lambda x: functional.scaled_dot_product_attention(x, x, x),),
    *(lambda x: functional.scaled_dot_product_attention(x, x, x, x @ x.transpose(-1, -2)),),
    *(
        lambda x: functional.embedding(x.long().clamp(0, 4), torch.rand(5, 2)),
        lambda x: torch.where(x > 0, x, x.mean()),
    ),
    *(lambda x: x.roll(1, 0), lambda x: x.sort(0)[0], lambda x: x.max() - x, lambda x: x[torch.arange(x.shape[0]) - 1]),
    *(lambda x: x.contiguous(), lambda x: x.double().float(), lambda x: x.clone().add_(1), lambda x: x.reshape(-1, 2)),
]


def values_of(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=generator)


@pytest.mark.ci
@given(
    st.sampled_from([(2,), (4,), (3, 2), (2, 4, 4), (4, 3, 2)]),
    st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6),
    st.integers(0, 2**30),
)
def test_operations_classified_as_separate_per_sample_do_not_mix_samples(
    shape: Sequence[int], steps: Sequence[int], seed: int
) -> None:
    """Numbers of other samples change none of a sample's."""
    generator = torch.Generator().manual_seed(seed)
    batch = values_of(shape, generator)

    possible, value = [], batch
    for step in steps:
        try:
            value = STEPS[step](value)
        except (RuntimeError, IndexError, ValueError, UserWarning):
            continue  # it has no such dimension
        possible.append(STEPS[step])

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        for step in possible:
            x = step(x)
        return x * 1.0

    graph: Any = make_fx(run, tracing_mode="fake")(batch).graph
    (node,) = (node for node in graph.nodes if node.op == "placeholder")
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    rows = rows_of(nodes, [node], SAMPLES)
    result = graph.output_node().args[0]
    if rows is None or result not in rows:
        return
    dim, of_sample = rows[result]
    expected = run(batch)
    assert expected.shape[dim] == SAMPLES * of_sample
    for index in range(SAMPLES):
        other = values_of(shape, generator) * 3
        other[index] = batch[index]
        found = run(other).narrow(dim, index * of_sample, of_sample)
        torch.testing.assert_close(found, expected.narrow(dim, index * of_sample, of_sample), equal_nan=True)


class Epochs(OneBatch):
    """Batches of 4 of 12 samples, in another order in each epoch, the same for all members."""

    def __init__(self, changed: Step = torch.tanh) -> None:
        self._changed = changed
        generator = torch.Generator().manual_seed(5)
        self.inputs, self.labels = (
            torch.randn(12, 6, 16, generator=generator),
            torch.randint(5, (12,), generator=generator),
        )

    def data(self, generator: torch.Generator, size: int) -> Any:
        epoch, step = divmod(generator.initial_seed() % 1000, 3)
        order = torch.randperm(12, generator=generator.manual_seed(epoch))[step * 4 : step * 4 + 4]
        return self.inputs[order], self.labels[order]

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return super().loss(model, (self._changed(x), y))


class Words(Epochs):
    """Embeddings, a mask of each sentence, a first token that is all sentences'."""

    def backbone(self) -> nn.Module:
        made = nn.Module()
        made.table, made.mixed, made.first = (
            nn.Embedding(10, 16),
            nn.Linear(16, 16),
            nn.Parameter(torch.randn(1, 1, 16)),
        )
        return made

    def changed(self, backbone: Any) -> nn.Module:
        class Classifier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.backbone = backbone

            def forward(self, words: Tensor) -> Tensor:
                x = backbone.mixed(backbone.table(words))
                x = torch.cat([backbone.first.expand(len(x), -1, -1), x], 1)[:, None]
                mask = torch.cat([words[:, :1] >= 0, words > 2], 1)[:, None, None]
                return functional.scaled_dot_product_attention(x, x, x, mask)[:, 0, 1:]

        return Classifier()

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return super().loss(model, (x[:, :, 0].abs().mul(4).long().clamp(0, 9), y))

    def __init__(self) -> None:
        super().__init__(lambda x: x)


class Pictures(Epochs):
    def backbone(self) -> nn.Module:
        norm = nn.BatchNorm2d(4).eval()
        return nn.Sequential(
            *(nn.Unflatten(2, (1, 16)), nn.Conv2d(6, 4, 3, padding=(2, 1)), norm, nn.ReLU(), nn.MaxPool2d((1, 2))),
            *(nn.Conv2d(4, 12, (3, 1)), nn.GroupNorm(3, 12), nn.AdaptiveAvgPool2d((1, 8)), nn.Flatten()),
        )


def trained(subject: Epochs, ids: list[int], steps: int = 9) -> tuple[outputs.Outputs, list[dict[str, Any]]]:
    bundle, trials = Bundle(builder(subject)), [Trial(subject, id) for id in ids]
    for _ in range(steps):
        train(bundle, trials)
    return bundle._builder.outputs, states(bundle, trials)


APART: dict[str, Callable[[], Epochs]] = {
    "attention": Epochs,
    "words": Words,
    "pictures": Pictures,
    "own statistics": lambda: Epochs(lambda x: (x - x.mean(1, keepdim=True)) / x.std(-1, keepdim=True)),
}


def attended(x: Tensor) -> Tensor:
    turned = x.transpose(0, 1)
    return functional.scaled_dot_product_attention(turned, turned, turned).transpose(0, 1)


MIXED: dict[str, Step] = {
    "mean": lambda x: x - x.mean(0),
    "largest": lambda x: x / x.abs().max().clamp(min=100),
    "order": lambda x: x + torch.arange(len(x))[:, None, None],
    "reversed": lambda x: x.flip(0),
    "sums": lambda x: x.cumsum(0),
    "attention across": attended,
    "statistics": lambda x: functional.batch_norm(x, None, None, training=True),
    "products": lambda x: (x.flatten(1) @ x.flatten(1).T @ x.flatten(1)).view_as(x),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", APART)
def test_a_frozen_prefix_is_computed_once_for_each_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, found = trained(APART[name](), [0, 1, 2])
    assert (made.computed, made.found) == (3, 6)
    assert found[1] == trained(APART[name](), [1])[1][0]
    monkeypatch.setattr(outputs, "SampleStore", lambda *_: None)
    by_batch, expected = trained(APART[name](), [0, 1, 2])
    assert by_batch.computed == 9
    assert found == expected


@pytest.mark.parametrize("name", MIXED)
def test_a_frozen_prefix_that_mixes_samples_is_computed_for_each_batch(name: str) -> None:
    made, found = trained(Epochs(MIXED[name]), [0, 1])
    assert made.computed == 9
    assert found[1] == trained(Epochs(MIXED[name]), [1])[1][0]


INEXACT: dict[str, Step] = {
    "silu": lambda x: functional.silu(x),
    "softplus": functional.softplus,
    "elu": lambda x: functional.elu(x),
    "sigmoid": torch.sigmoid,
    "pow": lambda x: x.abs().pow(1.3),
    "columns": lambda x: x.t().contiguous().softmax(0).t(),
    "sums of columns": lambda x: x + x.t().contiguous().sum(0)[:, None],
    "turned": lambda x: functional.silu(x.t().contiguous()).t(),
    "few columns": lambda x: x + x @ torch.full((x.shape[1], 2), 0.3).sum(1, keepdim=True),
}


@pytest.mark.parametrize("name", INEXACT)
@pytest.mark.parametrize("width", [11, 32])
def test_operations_whose_rounding_depends_on_the_position_are_not_separate_per_sample(name: str, width: int) -> None:
    """The last elements of a tensor are computed one by one, others in vectors; columns may be samples."""
    graph: Any = make_fx(INEXACT[name], tracing_mode="fake")(torch.randn(3, width)).graph
    (node,) = (node for node in graph.nodes if node.op == "placeholder")
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    by_place = width == 11 or name in ("columns", "sums of columns", "turned", "few columns")
    assert (rows_of(nodes, [node], 3) is None) is by_place


@pytest.mark.parametrize(("width", "apart"), [(32, False), (64, True)])
def test_two_byte_numbers_need_rows_of_twice_the_width_to_be_separate_per_sample(width: int, apart: bool) -> None:
    x = torch.randn(3, width, dtype=torch.bfloat16)
    graph: Any = make_fx(lambda x: functional.silu(x), tracing_mode="fake")(x).graph
    (node,) = (node for node in graph.nodes if node.op == "placeholder")
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert (rows_of(nodes, [node], 3) is not None) is apart


class Short(Epochs):
    """A last batch that is short, and layers whose width fills no vector."""

    def backbone(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(0, 1), nn.Linear(16, 11), nn.Softplus(), nn.Linear(11, 16), nn.Unflatten(0, (-1, 6))
        )

    def data(self, generator: torch.Generator, size: int) -> Any:
        epoch, step = divmod(generator.initial_seed() % 1000, 3)
        order = torch.randperm(12, generator=generator.manual_seed(epoch))[step * 5 : step * 5 + 5]
        return self.inputs[order], self.labels[order]


@pytest.mark.ci
@pytest.mark.parametrize("trained_too", [False, True])
def test_a_short_last_batch_does_not_change_the_bits_of_stacked_models(
    trained_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph may have the same text."""
    if trained_too:
        monkeypatch.setattr(nn.Module, "requires_grad_", lambda module, requires=True: module)
    made, found = trained(Short(), [0, 1, 2])
    for id in (0, 1, 2):
        assert found[id] == trained(Short(), [id])[1][0]
    assert trained_too or made.computed


class Drawn(Epochs):
    """Batches that have a sample twice, and come again."""

    def data(self, generator: torch.Generator, size: int) -> Any:
        order = torch.tensor([0, 0, 1, 2]) + generator.initial_seed() % 1000 % 3
        return self.inputs[order], self.labels[order]


def test_frozen_outputs_of_batches_with_a_repeated_sample_are_cached_by_batch() -> None:
    made, _ = trained(Drawn(), [0])
    assert (made.computed, made.found) == (3, 6)


def test_frozen_outputs_are_cached_by_batch_if_sample_lookup_takes_longer_than_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outputs, "_OF_SAMPLE", 60.0)
    assert trained(Epochs(), [0])[0].computed == 9


def test_a_cache_without_room_for_all_samples_holds_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches come again in trials of the same seed; of some of the samples only, no batch is whole."""
    monkeypatch.setattr(outputs, "_LEAST", 8 * 6 * 16 * 4)
    monkeypatch.setattr(outputs, "_OF_HOST", 1 << 60)
    subject = Epochs()
    made = builder(subject)
    for ids in ([0], [1]):
        bundle, trials = Bundle(made), [Trial(subject, id) for id in ids]
        for _ in range(4):
            train(bundle, trials)
        assert states(bundle, trials) == trained(Epochs(), ids, 4)[1]
    assert made.outputs.found == 2  # of the batches of the second trial, those for which there was room


def store_of(run: Callable[[Tensor], Tensor]) -> SampleStore:
    return SampleStore(Samples(SAMPLES, (Rows(0, 1),)), lambda batch: (run(*batch),))


def added(store: SampleStore, run: Callable[[Tensor], Tensor], batch: Tensor) -> bool:
    keys = digests([batch], SAMPLES)
    assert keys is not None
    return store.add(keys, [batch], (run(batch),))


def by_place(batch: Tensor) -> Tensor:
    """Round differently in the last place, as a kernel's last rows may be."""
    result = batch * 3
    result[-1] = (batch[-1] + batch[-1]) + torch.nextafter(batch[-1], torch.tensor(9.0))
    return result


def by_others(batch: Tensor) -> Tensor:
    return batch * 3 + (batch[:, 0].sum() > 1.5) * 1e-6


def test_samples_whose_bits_depend_on_their_position_or_on_other_samples_are_not_cached() -> None:
    batch = torch.eye(SAMPLES)
    assert added(store_of(lambda batch: batch * 3), lambda batch: batch * 3, batch)
    assert not added(store_of(by_place), by_place, batch)
    assert not added(store_of(by_others), by_others, batch)


def test_a_batch_of_equal_samples_does_not_prove_that_samples_are_independent() -> None:
    store, batch = store_of(by_place), torch.ones(SAMPLES, 2)
    assert added(store, by_place, batch)
    keys = digests([batch], SAMPLES)
    assert keys is not None
    assert store.find(keys) is None
    assert not added(store, by_place, torch.eye(SAMPLES))


def test_a_sample_whose_bits_differ_from_its_cached_bits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleStore, "_is_exact", lambda *_: True)
    store, batch = store_of(by_place), torch.eye(SAMPLES)
    assert added(store, by_place, batch)
    with pytest.raises(StateError, match="other bits for a sample"):
        added(store, by_place, batch.flip(0))


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.randn(SAMPLES, 3, 5),
        lambda: torch.randn(5, 3, SAMPLES).permute(2, 1, 0),
        lambda: torch.randn(SAMPLES, 6, 5)[:, 0],
        lambda: torch.randn(SAMPLES, 2, 4, 4).to(memory_format=torch.channels_last),
    ],
)
def test_cached_frozen_outputs_keep_their_strides(made: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(SAMPLES, 2)
    value = made()
    store = SampleStore(Samples(SAMPLES, (Rows(0, 1),)), lambda _: (value,))
    monkeypatch.setattr(SampleStore, "_is_exact", lambda *_: True)
    keys = digests([batch], SAMPLES)
    assert keys is not None
    assert store.add(keys, [batch], (value,))
    (found,) = store.find(keys[::-1]) or ()
    assert found.stride() == value.stride()
    assert torch.equal(found, value.flip(0))
