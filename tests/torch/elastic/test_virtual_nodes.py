"""Virtual nodes train what a batch trains; what they cannot share is refused by name, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.errors import StateError, StoreError, UsageError
from hpstage.store import MemoryJournal
from hpstage.torch.elastic.reduction import Rows, Share, Tree, mean
from hpstage.torch.elastic.virtual_nodes import cut
from hpstage.training.identity.code_identity import code_identity
from hpstage.training.trainables import as_trainable
from tests.torch.elastic.cases import CASES, Nodes, hp_at
from tests.torch.elastic.followers import trained
from tests.torch.trainables import Small, network, samples

pytestmark = pytest.mark.sampled(8)


class Plain(Small):
    """Neither BatchNorm nor dropout: virtual nodes differ from a batch by rounding alone."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))


class PlainNodes(Plain):
    virtual_nodes = 4


class Normed(Nodes):
    """BatchNorm sees the samples themselves, in the order of the data."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))

    def dataset(self) -> Any:
        x, y = samples()
        return DataLoader(TensorDataset(x[:24], y[:24]), batch_size=8, shuffle=False)


@pytest.mark.parametrize("nodes", [2, 8])
def test_virtual_nodes_give_the_weights_of_whole_batches_up_to_rounding(nodes: int) -> None:
    whole, cut_up = Plain(), PlainNodes()
    cut_up.virtual_nodes = nodes
    states = []
    for subject in (whole, cut_up):
        trainable: Any = as_trainable(subject)
        trainable.setup(hp_at(0))
        states.append(trained("", trainable=trainable).state_dict())
    for name, value in states[0]["model"].items():
        torch.testing.assert_close(states[1]["model"][name], value)


def test_batch_norm_counts_a_step_once_and_averages_its_statistics_over_virtual_nodes() -> None:
    trainable: Any = as_trainable(Normed())
    trainable.setup(hp_at(0))
    norm = trained("", stop=1, trainable=trainable).hand_over()["model"][0]
    assert norm.num_batches_tracked == 1
    parts = samples()[0][:8].view(4, -1)
    torch.testing.assert_close(norm.running_mean, 0.1 * parts.mean(1).mean(0, keepdim=True))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * parts.var(1).mean(0, keepdim=True))


def test_buffers_whose_mean_would_overflow_keep_their_values_under_virtual_nodes() -> None:
    model = trained("experts").hand_over()["model"]
    assert model.mask.tolist() == [0.0, float("-inf"), torch.finfo(torch.float32).max]
    assert not torch.equal(model.usual, torch.zeros(3))
    assert model.unused.weight.grad is None


def test_each_virtual_node_draws_different_random_numbers_at_each_step() -> None:
    drawn = []

    class Drawing(Nodes):
        stateless = ("drawn",)

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            drawn.append(float(torch.rand(())))
            return super().loss(model, batch)

    trainable: Any = as_trainable(Drawing())
    trainable.setup(hp_at(0))
    trained("", stop=3, trainable=trainable)
    assert len(set(drawn)) == len(drawn) == 12


# --- keys -----------------------------------------------------------------------------------------------------


def test_the_number_of_virtual_nodes_is_part_of_the_key_unless_it_is_one() -> None:
    class One(Small):
        virtual_nodes = 1

    one, none = as_trainable(One()), as_trainable(Small())
    assert type(one) is type(none)
    assert one.describe_environment() == none.describe_environment()  # type: ignore[attr-defined]
    described = as_trainable(Nodes()).describe_environment()  # type: ignore[attr-defined]
    assert described["virtual nodes"] == "4"
    assert described["numerics"] != none.describe_environment()["numerics"]  # type: ignore[attr-defined]
    by_attribute = Small()
    by_attribute.virtual_nodes = 4
    assert code_identity(by_attribute) == code_identity(Small())


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": s.constant(0.1), "momentum": 0.9, "batch_size": trial.suggest_categorical("size", [8]), "seed": 3}


def search(trainable: object, **options: Any) -> hpstage.Result:
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.RandomSampler(seed=0))
    settings: dict[str, Any] = {"metric": "loss", "steps": 4, "n_trials": 1, "store": MemoryJournal()}
    return hpstage.optimize(study, trainable, space, executor=hpstage.InlineExecutor(), **(settings | options))


def test_a_store_of_another_number_of_virtual_nodes_is_refused() -> None:
    journal = MemoryJournal()
    search(Nodes(), store=journal)
    other = Nodes()
    other.virtual_nodes = 2
    with pytest.raises(StoreError, match="virtual nodes"):
        search(other, store=journal)


# --- what is refused ------------------------------------------------------------------------------------------


def nodes_of(number: Any, **attributes: Any) -> Nodes:
    subject = Nodes()
    for name, value in {"virtual_nodes": number, **attributes}.items():
        setattr(subject, name, value)
    return subject


class Stepping(Nodes):
    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        return super().update(model, optimizer, batch)


class Stateful(Nodes):
    def extra_state(self) -> Any:
        return 1


class Short(Nodes):
    def dataset(self) -> Any:
        return DataLoader(TensorDataset(*samples()), batch_size=8)


class ShortNormed(Nodes):
    """Of the last batch of an epoch each node has one sample, which BatchNorm cannot normalise."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))

    def dataset(self) -> Any:
        x, y = samples()
        return DataLoader(TensorDataset(x[:20], y[:20]), batch_size=8)


class Clamping(Nodes):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for weight in model.parameters():
                weight.clamp_(-1, 1)
        return super().loss(model, batch)


class Listing(Nodes):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.seen.append(1.0)
        return super().loss(model, batch)


class Teaching(Nodes):
    """Another model, which training changes."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.teacher = network()
        return network()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.teacher(batch[0])
        return super().loss(model, batch)


class Counter(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(64, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += int((x > 0).sum())
        return self.classifier(x.flatten(1))


class Different(Nodes):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Counter()


class Lines(IterableDataset[Any]):
    """A stream of 22 samples that gives its position."""

    at = 0

    def __iter__(self) -> Any:
        x, y = samples()
        while self.at < 22:
            self.at += 1
            yield x[self.at - 1], int(y[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Streaming(Nodes):
    def dataset(self) -> Any:
        return DataLoader(Lines(), batch_size=8)


class Whole(Nodes):
    def collate(self, items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items]), torch.zeros(5)


REFUSED: dict[str, tuple[Callable[[], Nodes], str]] = {
    "no power of two": (lambda: nodes_of(3), "virtual_nodes is 3; it must be a power of two"),
    "no number": (lambda: nodes_of("4"), "virtual_nodes is '4'"),
    "compiled": (lambda: nodes_of(4, numerics="compiled"), "numerics = 'compiled': virtual nodes are trained eagerly"),
    "stacked": (lambda: nodes_of(4, numerics="stacked"), "numerics = 'stacked': virtual nodes are trained eagerly"),
    "update": (Stepping, r"Stepping overrides update\(\) .*register_step_pre_hook"),
    "extra_state": (Stateful, r"Stateful defines extra_state\(\)"),
    "a batch": (lambda: nodes_of(16), "the batch size is 8, and 16 virtual nodes share each batch equally"),
    "a short batch": (Short, "the last batch of an epoch has 6 samples, .* drop_last=True"),
    "a short batch for BatchNorm": (
        ShortNormed,
        r"the last batch of an epoch has 4 samples, and 4 virtual nodes cannot be trained on 1 each "
        r"\(Expected more than 1 value per channel when training.*drop_last=True",
    ),
    "a parameter": (Clamping, r"Clamping.loss\(\) changes model.0.weight, which each of 4"),
    "a list": (Listing, r"self\.seen changes in training, and each of 4 virtual nodes would make its own changes"),
    "another model": (Teaching, r"self\.teacher\.\S+ changes in training, and each of 4 virtual nodes"),
    "a batch's tensor": (Whole, r"cannot share batch\[2\], a tensor of shape \(5,\) in a batch of 8 samples"),
    "whole numbers": (Different, "the buffer count holds whole numbers, which virtual nodes have changed in different"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.ci_one_in(2)
def test_trainables_that_virtual_nodes_cannot_train_are_refused_with_the_reason(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises(UsageError, match=match):
        search(make())


def test_a_batch_size_that_becomes_indivisible_by_the_virtual_nodes_is_refused() -> None:
    trainable = trained("cnn", stop=2)
    with pytest.raises(UsageError, match="the batch size is 10, and 4 virtual nodes"):
        trainable.train(2, hp_at(2) | {"batch_size": 10})


def test_a_short_batch_of_a_stream_is_refused_under_virtual_nodes() -> None:
    trainable: Any = as_trainable(Streaming())
    trainable.setup(hp_at(0))
    trained("", stop=2, trainable=trainable)
    with pytest.raises(UsageError, match=r"a batch of 6 samples cannot be cut into 4 virtual nodes: .* drop_last=True"):
        trainable.train(2, hp_at(2))


def test_a_state_with_attributes_that_virtual_nodes_have_changed_is_refused_every_time() -> None:
    trainable: Any = as_trainable(Listing())
    trainable.setup(hp_at(0))
    trainable.state_dict()
    trainable.train(0, hp_at(0))
    for _ in range(2):
        with pytest.raises(StateError, match=r"self\.seen"):
            trainable.state_dict()


# --- the parts ------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    y: Any


def test_nested_batches_are_split_among_virtual_nodes() -> None:
    x = torch.arange(8).view(4, 2)
    batch = {"pair": Pair(x, None), "list": [x[:, 0], ("a", "b", "c", "d")]}
    first, second = cut(batch, 2)
    assert first["pair"].x.tolist() == [[0, 1], [2, 3]] and first["pair"].y is None
    assert type(second["pair"]) is Pair
    assert second["list"][0].tolist() == [4, 6] and second["list"][1] == ("c", "d")


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ((torch.zeros(4), torch.zeros(())), r"cannot share batch\[1\], a tensor of shape \(\)"),
        ({"x": torch.zeros(4), "n": 5}, r"batch\['n'\] is a int"),
        ({"x": torch.zeros(4), "f": object()}, r"batch\['f'\] is a object"),
        (torch.zeros(6), "a batch of 6 samples cannot be cut into 4"),
        ([1, 2], "none of its tensors has a dimension"),
    ],
)
def test_batches_that_virtual_nodes_cannot_split_are_refused_with_the_reason(batch: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        cut(batch, 4)


def test_a_tensor_whose_first_dimension_is_not_the_number_of_samples_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot share batch, a tensor of shape \(4, 8\) in a batch of 8 samples"):
        cut(torch.zeros(4, 8), 4, 8)


def share(*gradients: Any, buffers: list[torch.Tensor] | None = None) -> Share:
    return Share(1.0, list(gradients), buffers or [])


def tree(shares: Sequence[Share]) -> Share:
    grown = Tree()
    for share in shares:
        grown.add(share)
    return grown.root()


def test_sums_over_virtual_nodes_have_the_same_bits_however_the_nodes_are_grouped() -> None:
    generator = torch.Generator().manual_seed(0)

    def leaves() -> list[Share]:
        generator.manual_seed(0)
        return [
            share(
                torch.randn(50, generator=generator) * 10.0 ** (node % 5),
                None if node % 3 else torch.randn(5, generator=generator),
                Rows(torch.tensor([[node % 2, 3]]), torch.randn(2, 4, generator=generator)),
                buffers=[torch.randn(3, generator=generator)],
            )
            for node in range(8)
        ]

    whole = tree(leaves())
    for width in (2, 4, 8):
        size = 8 // width
        parts = leaves()
        found = tree([tree(parts[at : at + size]) for at in range(0, 8, size)])
        assert found.loss == whole.loss == 8
        assert torch.equal(found.gradients[0], whole.gradients[0])  # type: ignore[arg-type]
        assert torch.equal(found.gradients[1], whole.gradients[1])  # type: ignore[arg-type]
        likes = torch.zeros(5, 4)
        assert torch.equal(
            mean(found.gradients[2], likes, 8).to_dense(),  # type: ignore[union-attr]
            mean(whole.gradients[2], likes, 8).to_dense(),  # type: ignore[union-attr]
        )
        assert torch.equal(found.buffers[0], whole.buffers[0])


def test_a_mean_gradient_has_the_memory_layout_of_its_parameter() -> None:
    like = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert mean(torch.ones(2, 3, 4, 4), like, 4).stride() == like.stride()  # type: ignore[union-attr]


def test_a_gradient_sparse_in_one_virtual_node_and_dense_in_another_is_refused() -> None:
    rows = Rows(torch.tensor([[0]]), torch.ones(1, 2))
    with pytest.raises(UsageError, match="sparse gradient in one virtual node and a dense one in another"):
        tree([share(torch.ones(3, 2)), share(rows)])


# --- all ways -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_hpstage_check_finds_no_difference_under_virtual_nodes(case: str) -> None:
    report = hpstage.check(CASES[case](), space, steps=4, n_forks=1)
    assert report.ok, str(report)


def test_a_search_with_virtual_nodes_verifies_a_fork() -> None:
    result = search(Nodes(), verify="first-fork")
    assert result.plan.verified and result.study.best_value > 0
