"""Objectives beyond accuracy: what is exact is compared as any metric, what is measured is noisy and said to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.format import MANIFEST
from hpstage.errors import UsageError
from hpstage.plan.facts import Fact, PlanCreated, StateLost, StateReached
from hpstage.plan.plan import SearchPlan
from hpstage.search.costs import COSTS
from hpstage.torch import measure
from hpstage.training.adapter import noisy_of
from tests.torch.trainables import Small, samples

pytestmark = pytest.mark.sampled(4)


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


def test_bytes_of_a_model_count_weights_and_buffers_and_shared_tensors_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    assert measure.bytes_of(model) == 4 * (9 + 4 * 3) + 8  # num_batches_tracked is an int64


def test_flops_of_a_linear_layer_are_those_of_its_matrix_product() -> None:
    assert measure.flops(nn.Linear(3, 5), torch.ones(2, 3)) == 2 * 2 * 3 * 5


def test_measuring_latency_leaves_gradients_enabled() -> None:
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


@pytest.mark.ci
def test_cost_metrics_of_a_search_are_not_part_of_the_key(tmp_path: Path) -> None:
    first = searched(["accuracy", "hpstage:seconds"], tmp_path, Small())
    again = searched(["accuracy", "bytes"], tmp_path / "other", Costly())
    more = searched(["loss", "hpstage:seconds"], tmp_path, Small())
    assert first.savings.steps_trained == again.savings.steps_trained == 6
    assert more.savings.steps_trained == 0
    assert [trial.values[1] for trial in more.study.trials] == [trial.values[1] for trial in first.study.trials]


@pytest.mark.parametrize("metric", [["hpstage:seconds", "accuracy"], ["accuracy", "hpstage:hours"]])
def test_a_cost_as_the_first_metric_and_an_unknown_cost_are_refused(metric: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"the first must be one that evaluate\(\) returns, and costs .*"
        r"\(hpstage:seconds, hpstage:peak_bytes, hpstage:bytes\)",
    ):
        searched(metric, tmp_path, Small())


def test_a_search_weighs_accuracy_against_the_exact_bytes_of_checkpoints(tmp_path: Path) -> None:
    result = searched(["accuracy", "hpstage:bytes"], tmp_path / "one", Small())
    again = searched(["accuracy", "hpstage:bytes"], tmp_path / "other", Small())
    for trial in result.study.trials:
        files = Path(result.checkpoint(trial)).iterdir()
        assert trial.values[1] == sum(file.stat().st_size for file in files if file.name != MANIFEST)
        assert "hpstage:noisy" not in trial.user_attrs
    assert [trial.values for trial in result.study.trials] == [trial.values for trial in again.study.trials]


def test_bytes_of_a_checkpoint_are_known_after_it_is_evicted(tmp_path: Path) -> None:
    first = searched(["accuracy", "hpstage:bytes"], tmp_path, Small())
    plan = SearchPlan(first.plan.workload)
    for fact in first.journal:
        plan.apply(fact)
    for state in list(plan.kept.values()):
        plan.apply(StateLost(node=state.node.id, step=state.step, reason="evicted"))
    again = [COSTS["hpstage:bytes"](plan, trial, 4) for trial in plan.trials.values()]
    assert again == [trial.values[1] for trial in first.study.trials]


def with_peaks(facts: Sequence[Fact], peak: Callable[[StateReached], int | None]) -> SearchPlan:
    """The fold of a journal, through its encoding, had its workers measured these peaks."""
    plan = SearchPlan(next(fact.workload for fact in facts if isinstance(fact, PlanCreated)))
    for fact in facts:
        if isinstance(fact, StateReached):
            fact = replace(fact, peak_bytes=peak(fact))
        plan.apply(msgspec.json.decode(msgspec.json.encode(fact), type=Fact))  # type: ignore[arg-type]
    return plan


def test_peak_bytes_of_a_trial_are_the_maximum_over_its_own_stages(tmp_path: Path) -> None:
    result = searched(["accuracy", "loss"], tmp_path, Small())
    ends = [trial.node_at(4).id for trial in result.plan.trials.values()]
    assert len(set(ends)) == 2
    plan = with_peaks(result.journal, lambda fact: 900 if fact.node == ends[1] else 100 + fact.step)
    of = [COSTS["hpstage:peak_bytes"](plan, trial, 4) for trial in plan.trials.values()]
    assert of == [104, 900]


def test_peak_bytes_of_a_state_trained_again_are_the_maximum_of_all_measurements(tmp_path: Path) -> None:
    result = searched(["accuracy", "loss"], tmp_path, Small())
    plan = with_peaks(result.journal, lambda fact: 100)
    last = next(fact for fact in reversed(result.journal) if isinstance(fact, StateReached))
    for peak in (300, 200, None):
        plan.apply(replace(last, kept=None, peak_bytes=peak))
    assert plan.nodes[last.node].states[last.step].peak_bytes == 300


def test_peak_bytes_are_refused_if_an_earlier_build_has_not_measured_them(tmp_path: Path) -> None:
    result = searched(["accuracy", "loss"], tmp_path, Small())
    records = [msgspec.json.encode(fact) for fact in result.journal]
    old = [msgspec.json.decode(record.replace(b',"peak_bytes":null', b""), type=Fact) for record in records]  # type: ignore[arg-type]
    assert old == list(result.journal)
    for peaks in (lambda fact: None, lambda fact: 5 if fact.step < 4 else None):
        plan = with_peaks(old, peaks)
        with pytest.raises(UsageError, match="trained by an earlier build of hpstage, or on no CUDA device"):
            COSTS["hpstage:peak_bytes"](plan, next(iter(plan.trials.values())), 4)


@pytest.mark.ci
def test_peak_bytes_are_refused_on_a_cpu_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the peak memory of CUDA devices, and training here uses none"):
        searched(["accuracy", "hpstage:peak_bytes"], tmp_path, Small())
    assert not list(tmp_path.iterdir())


class OnGPU(Small):
    device = "cuda"

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        torch.empty(int(self.hp["extra"]), dtype=torch.uint8, device="cuda")
        return super().loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = (part.to("cuda") for part in samples())
        return {"accuracy": (model(x).argmax(1) == y).float().mean().item()}


@pytest.mark.gpu
def test_peak_bytes_on_a_gpu_are_those_of_the_steps_of_each_trial(tmp_path: Path) -> None:
    def wide(trial: optuna.Trial) -> Mapping[str, Any]:
        late = trial.suggest_categorical("late", [0, 1 << 26])
        return {"lr": 0.1, "momentum": 0.9, "batch_size": 8, "extra": s.piecewise({0: 1 << 20, 2: late})}

    study = optuna.create_study(
        directions=["maximize", "minimize"], sampler=optuna.samplers.GridSampler({"late": [0, 1 << 26]})
    )
    executor = hpstage.InlineExecutor()
    metric = ["accuracy", "hpstage:peak_bytes"]
    hpstage.optimize(study, OnGPU(), wide, metric=metric, steps=4, n_trials=2, executor=executor, store=tmp_path)
    small, large = sorted(trial.values[1] for trial in study.trials)
    assert small >= 1 << 20
    assert large - small >= (1 << 26) - (1 << 21)
    assert all(trial.user_attrs["hpstage:noisy"] == "hpstage:peak_bytes" for trial in study.trials)


def test_noisy_is_refused_unless_it_is_a_tuple_of_metric_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Small, "noisy", "latency")
    with pytest.raises(UsageError, match=r"noisy is 'latency'; it must be a tuple of names of metrics"):
        noisy_of(Small())
