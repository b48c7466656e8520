"""Objectives beyond accuracy: what is exact is compared as any metric, what is measured is noisy and said to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

import hpstage
from hpstage import schedule as s
from hpstage.errors import UsageError
from hpstage.torch import measure
from hpstage.training.adapter import noisy_of
from tests.torch.trainables import Small, samples


class Costly(Small):
    noisy = ("latency",)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        sample = samples()[0][:1]
        return {
            **super().evaluate(model),
            "bytes": measure.bytes_of(model),
            "flops": measure.flops(model, sample),
            "latency": measure.latency(model, sample, repeats=3),
        }


class Silent(Costly):
    noisy = ()


def space(trial: optuna.Trial) -> Mapping[str, Any]:
    drop = trial.suggest_categorical("drop", [2, 3])
    return {"lr": s.multistep(0.1, [drop], gamma=0.1), "momentum": 0.9, "batch_size": 8}


def searched(metric: list[str], store: Path, trainable: object) -> hpstage.Result:
    study = optuna.create_study(
        directions=["maximize", *["minimize"] * (len(metric) - 1)],
        sampler=optuna.samplers.GridSampler({"drop": [2, 3]}),
    )
    return hpstage.optimize(
        study, trainable, space, metric=metric, steps=4, n_trials=2, executor=hpstage.InlineExecutor(), store=store
    )


def test_bytes_are_those_of_weights_and_buffers_and_shared_ones_count_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    assert measure.bytes_of(model) == 4 * (9 + 4 * 3) + 8  # num_batches_tracked is an int64


def test_operations_are_those_of_the_products() -> None:
    assert measure.flops(nn.Linear(3, 5), torch.ones(2, 3)) == 2 * 2 * 3 * 5


def test_a_latency_is_that_of_the_forward_pass_which_is_left_without_gradients() -> None:
    model, before = nn.Linear(3, 5), torch.is_grad_enabled()
    assert measure.latency(model, torch.ones(2, 3)) > 0
    assert torch.is_grad_enabled() == before


def test_a_search_weighs_accuracy_against_size_latency_and_seconds(tmp_path: Path) -> None:
    result = searched(["accuracy", "bytes", "latency", "hpstage:seconds"], tmp_path, Costly())
    for trial in result.study.trials:
        accuracy, size, latency, seconds = trial.values
        assert 0 <= accuracy <= 1
        assert size == measure.bytes_of(Small().model({}))
        assert latency > 0 and seconds > 0
        assert trial.user_attrs["hpstage:seconds"] == seconds
        assert trial.user_attrs["hpstage:noisy"] == "latency, hpstage:seconds"
    spent = result.savings.train_seconds
    assert sum(trial.values[3] for trial in result.study.trials) > spent  # of shared steps, each has its own
    assert result.best_trials


def test_costs_are_no_part_of_a_key(tmp_path: Path) -> None:
    first = searched(["accuracy", "hpstage:seconds"], tmp_path, Small())
    again = searched(["accuracy", "bytes"], tmp_path / "other", Costly())
    more = searched(["loss", "hpstage:seconds"], tmp_path, Small())
    assert first.savings.steps_trained == again.savings.steps_trained == 6
    assert more.savings.steps_trained == 0
    assert [trial.values[1] for trial in more.study.trials] == [trial.values[1] for trial in first.study.trials]


@pytest.mark.parametrize("metric", [["hpstage:seconds", "accuracy"], ["accuracy", "hpstage:hours"]])
def test_costs_that_come_first_or_that_nobody_measures_are_refused(metric: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"the first is one that evaluate\(\) returns, and costs .*\(hpstage:seconds\)"
    ):
        searched(metric, tmp_path, Small())


def test_noisy_metrics_are_a_tuple_of_names() -> None:
    Small.noisy, kept = "latency", Small.noisy  # type: ignore[assignment]
    try:
        with pytest.raises(UsageError, match=r"noisy is 'latency'; it must be a tuple of names of metrics"):
            noisy_of(Small())
    finally:
        Small.noisy = kept
