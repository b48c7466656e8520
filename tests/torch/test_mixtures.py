"""Mixtures of data sets by weights that are hyperparameters, and micro-anneals over them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.errors import UsageError
from hpstage.search.results.microanneal import _quantile
from hpstage.torch.data import batches_of
from hpstage.torch.loading.mixture import MixedSeed, Mixture, seed_in
from hpstage.torch.loading.taken_over import Workers
from tests.bundled import Unmeasured

SIZES = {"a": 30, "b": 50, "c": 7}


def numbers() -> dict[str, TensorDataset]:
    """Samples are their index in the sources laid end to end."""
    starts = np.cumsum([0, *SIZES.values()])
    return {
        name: TensorDataset(torch.arange(start, start + size))
        for (name, size), start in zip(SIZES.items(), starts, strict=False)
    }


def weighed(a: float, b: float, c: float, seed: int = 3) -> dict[str, Any]:
    return {"seed": seed, "mixture.a": a, "mixture.b": b, "mixture.c": c}


def drawn(hp: Mapping[str, Any], position: int, count: int, workers: int = 0) -> list[int]:
    mixture = Mixture(numbers())
    batches = batches_of(mixture, None, None, Workers(workers))
    try:
        return list(batches.take(seed_in(mixture, hp), position, count)[0].tolist())  # type: ignore[union-attr]
    finally:
        batches.close()


def test_samples_of_a_mixture_depend_only_on_seed_position_and_ratio_of_weights() -> None:
    whole = drawn(weighed(0.5, 0.3, 0.2), 0, 9000)
    assert whole[4000:4600] == drawn(weighed(5, 3, 2), 4000, 600)
    assert whole != drawn(weighed(0.5, 0.3, 0.2, seed=4), 0, 9000)
    parts = [sum(30 <= i < 80 for i in whole), sum(i >= 80 for i in whole)]
    assert parts == pytest.approx([2700, 1800], rel=0.1)
    assert drawn(weighed(0.5, 0.3, 0.2), 10, 64, workers=2) == whole[10:74]
    loader = batches_of(DataLoader(mixture := Mixture(numbers()), batch_size=4, shuffle=True), None, None)
    taken = loader.take(mixture.seed(weighed(5, 3, 2)), 4000, 8)  # type: ignore[union-attr]
    assert taken[0].tolist() == whole[4000:4008]


@pytest.mark.parametrize(("name", "weights"), [("a", (1, 0, 0)), ("b", (0, 1, 0)), ("c", (0, 0, 2))])
def test_a_mixture_of_a_single_source_is_sampled_like_its_data_set(name: str, weights: tuple[int, int, int]) -> None:
    alone = batches_of(numbers()[name], None, None)
    assert drawn(weighed(*weights), 20, 100) == alone.take(3, 20, 100)[0].tolist()  # type: ignore[union-attr]


def test_similar_mixtures_with_the_same_seed_share_most_samples() -> None:
    one, other = (drawn(weighed(0.5, 0.5 - c, c), 0, 4000) for c in (0.0, 0.1))
    assert sum(map(int.__ne__, one, other)) == pytest.approx(400, rel=0.2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mixture.c": None}, "source 'c' of the mixture has no weight; give a hyperparameter 'mixture.c'"),
        ({"mixture.d": 1}, "'mixture.d' is the weight of no source; the mixture has a, b, c"),
        ({"mixture.a": -0.1}, "'mixture.a' is -0.1; a weight is a number of at least 0"),
        ({"mixture.a": math.nan}, "'mixture.a' is nan"),
        ({"mixture.a": True}, "'mixture.a' is True"),
        ({"mixture.a": "much"}, "'mixture.a' is 'much'"),
        ({"mixture.a": 0, "mixture.b": 0, "mixture.c": 0.0}, "add up to 0"),
        ({"mixture.a": 1e308, "mixture.b": 1e308}, "add up to inf"),
    ],
)
def test_missing_or_invalid_mixture_weights_are_refused_by_name(changed: dict[str, Any], message: str) -> None:
    hp = {name: value for name, value in {**weighed(1, 1, 1), **changed}.items() if value is not None}
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        Mixture(numbers()).seed(hp)


def test_a_mixture_in_an_unshuffled_loader_in_a_subset_or_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="a Mixture, whose weights decide the order; give the DataLoader shuffle=True"):
        batches_of(DataLoader(Mixture(numbers()), batch_size=4), None, None)
    with pytest.raises(UsageError, match="is a Subset of a Mixture, whose weights would have no effect"):
        batches_of(Subset(Mixture(numbers()), [1, 2]), None, None)
    with pytest.raises(UsageError, match="no source"):
        Mixture({})
    with pytest.raises(UsageError, match="source 'a' of the mixture is empty"):
        Mixture({"a": TensorDataset(torch.empty(0))})
    with pytest.raises(UsageError, match=r"for dataset\(\) of a TorchTrainable"):
        batches_of(Mixture(numbers()), None, None).take(0, 0, 4)  # type: ignore[union-attr]


def test_mixture_seeds_with_different_weights_are_different() -> None:
    one, other = MixedSeed(1, (0.5, 1.0)), MixedSeed(1, (0.25, 1.0))
    assert one != other and one == copy.copy(one) and hash(one) != hash(other)
    assert one != 1 and int(one) == 1


# --- training ---------------------------------------------------------------------------------------------


class Mixed(hpstage.torch.TorchTrainable):
    """Learns the mean of what it is given: 0 of ``low``, 1 of ``high``."""

    device, batch_size = "cpu", 4

    def dataset(self) -> Mixture:
        noise = torch.linspace(-0.1, 0.1, 24)
        return Mixture({"low": TensorDataset(noise), "high": TensorDataset(1 + noise)})

    def model(self, hp: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def optimizer(self, model: torch.nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return (model(torch.ones(len(batch[0]), 1)).squeeze(1) - batch[0]).square().mean()

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        at = model(torch.ones(1, 1)).item()
        return {"loss": at**2, "high": (at - 1) ** 2}


class Stacked(Mixed):
    numerics, max_stacked = "stacked", 4


class Loading(Mixed):
    num_workers = 2


class InParts(Mixed):
    virtual_nodes = 2


def by_function(run: hpstage.Run) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"])
    run.attach(model=model, optimizer=optimizer)
    noise = torch.linspace(-0.1, 0.1, 24)
    mixture = hpstage.torch.Mixture({"low": TensorDataset(noise), "high": TensorDataset(1 + noise)})
    for (batch,) in run.batches(mixture, batch_size=4):
        optimizer.zero_grad()
        (model(torch.ones(len(batch), 1)).squeeze(1) - batch).square().mean().backward()
        optimizer.step()
        if run.wants_report:
            at = model(torch.ones(1, 1)).item()
            run.report(loss=at**2, high=(at - 1) ** 2)


HP: dict[str, Any] = {
    "lr": 0.1,
    "seed": 0,
    "mixture.low": s.linear(1.0, start_factor=1.0, end_factor=0.5, total_iters=12),
    "mixture.high": 0.25,
}
MIXTURES = {
    "as before": {"low": 0.8, "high": 0.2},
    "half": {"low": 0.5, "high": 0.5},
    "low": {"low": 1.0},
    "high": {"high": 1.0},
    "more high": {"low": 0.2, "high": 0.8},
}


def tensors(trial: hpstage.TrainedTrial) -> list[Any]:
    return [value.tolist() for value in trial.weights().values()]


@pytest.mark.ci
@pytest.mark.parametrize("kind", [Mixed, InParts, Stacked, Loading, pytest.param("function", marks=pytest.mark.slow)])
def test_micro_anneals_of_five_mixtures_equal_training_without_sharing(kind: Any, tmp_path: Path) -> None:
    here: dict[str, Any] = {"executor": Unmeasured()}
    trainable = by_function if kind == "function" else kind()
    trunk = hpstage.train(trainable, HP, steps=12, metric="loss", store=tmp_path / "store", checkpoint_every=4, **here)
    found = trunk.microanneal(MIXTURES, control="as before", at=8, steps=6, **here)
    assert hpstage.open(tmp_path / "store").plan.totals.steps_trained == 12 + 15 * 6
    for number, (name, trials) in enumerate(found.trials.items()):
        assert [trial.schedules["seed"].value(8) for trial in trials] == [0, 1, 2]
        assert [trial.planned.steps for trial in trials] == [14] * 3
        one = trials[number % 3]
        fresh = by_function if kind == "function" else kind()
        alone = hpstage.train(fresh, one.schedules, steps=14, metric="loss", store=tmp_path / name, **here)
        assert alone.metrics[14] == one.metrics[14] and tensors(alone) == tensors(one)
    assert len({str(tensors(trial)) for trials in found.trials.values() for trial in trials}) == 15
    high = next(one for one in found.differences("high") if one.mixture == "high")
    assert high.difference < 0 and high.low < high.difference < high.high and high.seeds == 3


def test_differences_between_micro_anneals_are_paired_by_seed(tmp_path: Path) -> None:
    here: dict[str, Any] = {"executor": hpstage.InlineExecutor()}
    trunk = hpstage.train(Mixed(), HP, steps=8, metric="loss", store=tmp_path, **here)
    found = trunk.microanneal({"x": {"high": 1}, "y": {"low": 1}}, control="y", at=8, steps=2, seeds=[7, 5], **here)
    x, y = ([trial.metrics[10]["loss"] for trial in found.trials[name]] for name in "xy")
    [one] = [one for one in found.differences("loss") if one.mixture == "x"]
    test = stats.ttest_rel(x, y).confidence_interval(0.95)
    assert (one.low, one.high) == pytest.approx((test.low, test.high), rel=1e-3)
    assert (one.value, one.difference) == pytest.approx((np.mean(x), np.mean(x) - np.mean(y)))
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "mixture" and len(lines) == 5 and "control" in lines[3]
    single = trunk.microanneal({"x": {"high": 1}, "y": {"low": 1}}, control="y", at=8, steps=2, seeds=1, **here)
    assert math.isnan(single.differences()[0].low) and str(single).splitlines()[1].split()[-2:] == ["-", "1"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"control": "z"}, "control is 'z'; it must be one of the mixtures: x, y"),
        ({"mixtures": {"y": {"lo": 1}}}, r"no hyperparameter 'mixture.lo' \(did you mean 'mixture.low'"),
        ({"seeds": [1, 1]}, "seeds is .1, 1.; give different seeds"),
        ({"mixtures": {"y": {"low": 0}}}, "mixture 'y' is .'low': 0.; its weights must be at least 0, and one above"),
        ({"seeds": 0}, "seeds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"at": 9}, "has 8 steps and cannot be branched at step 9"),
        ({"lr": [0.1, 0.2]}, "lr is a list"),
        ({"wd": 0.1}, "no hyperparameter 'wd'"),
    ],
)
def test_invalid_arguments_of_microanneal_are_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    here: dict[str, Any] = {"executor": hpstage.InlineExecutor()}
    trunk = hpstage.train(Mixed(), HP, steps=8, metric="loss", store=tmp_path, **here)
    given: dict[str, Any] = {"mixtures": {"x": {"high": 1}, "y": {"low": 1}}, "control": "y", "at": 8, "steps": 2}
    with pytest.raises(UsageError, match=message):
        trunk.microanneal(**{**given, **options}, **here)


def test_microanneal_of_a_trunk_without_a_seed_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    here: dict[str, Any] = {"executor": hpstage.InlineExecutor(), "store": tmp_path, "metric": "loss"}
    hp = {name: value for name, value in HP.items() if name != "seed"}
    given: dict[str, Any] = {"mixtures": {"x": {"high": 1}}, "control": "x", "at": 2, "steps": 1}
    with pytest.raises(UsageError, match="train a trial that has it, and branch that trial"):
        hpstage.train(Mixed(), hp, steps=2, **here).microanneal(**given)
    trunk = hpstage.train(Mixed(), {**hp, "seed": 0}, steps=2, **here)
    assert len(trunk.microanneal(**given, executor=here["executor"]).trials["x"]) == 3


def test_quantiles_approximate_those_of_students_t_distribution() -> None:
    for degrees in (1, 2, 3, 4, 5, 7, 10, 30, 1000):
        assert _quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-3)


def test_a_mixture_has_a_different_data_digest_than_its_concatenated_sources() -> None:
    class EndToEnd(Mixed):
        def dataset(self) -> Any:
            return ConcatDataset(super().dataset().datasets)

    one, other = (hpstage.torch.TorchLoop(subject).describe_data() for subject in (Mixed(), EndToEnd()))
    assert one != other
