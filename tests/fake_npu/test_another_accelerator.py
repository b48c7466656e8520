"""Training on an accelerator of which hpstage knows nothing but what torch says of it."""

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
from hpstage.execution.fork import obstacle
from hpstage.execution.snapshot import _generators
from hpstage.torch import environment
from hpstage.torch.backends.lookup import usable
from hpstage.training.identity import accelerators
from hpstage.training.randomness import Purpose, generators_restored, rekey
from tests.torch.trainables import Small, samples


class ByDefault(Small):
    device = None

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.2), nn.Linear(16, 4))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert {parameter.device.type for parameter in model.parameters()} == {"npu"}
        return {"mean": model(samples()[0].to("npu")).mean().item()}


LATE = [0.1, 0.01, 0.001]


def searched(values: list[float], store: Path) -> tuple[dict[float, float | None], int]:
    """Return the value of each trial, and the steps trained."""

    def space(trial: optuna.Trial) -> Mapping[str, Any]:
        late = trial.suggest_categorical("late", values)
        return {"lr": s.piecewise({0: 0.05, 4: late}), "momentum": 0.9, "batch_size": 8}

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"late": values}))
    result = hpstage.optimize(
        study, ByDefault(), space, metric="mean", steps=8, n_trials=len(values), executor=hpstage.InlineExecutor(),
        store=store,
    )  # fmt: skip
    return {trial.params["late"]: trial.value for trial in study.trials}, result.savings.steps_trained


def test_a_search_on_another_accelerator_has_the_values_of_separate_searches(tmp_path: Path) -> None:
    together, trained = searched(LATE, tmp_path / "together")
    assert trained == 4 + 3 * 4
    apart = [searched([late], tmp_path / str(late))[0] for late in LATE]
    assert together == {late: value for one in apart for late, value in one.items()}
    assert len(set(together.values())) == 3


def test_another_accelerator_is_the_default_device_and_part_of_the_environment() -> None:
    assert environment.default_device() == torch.device("npu")
    described = environment.describe()
    assert described["device"] == "npu (Fake)" and described["system"].startswith("Linux")
    assert usable(torch.device("npu")) == ["eager"]


def test_random_generators_of_another_accelerator_are_seeded_restored_and_listed() -> None:
    module = torch.get_device_module("npu")
    rekey(3, 0, Purpose.SETUP)
    first = module.get_rng_state_all()
    with generators_restored():
        rekey(3, 1)
        assert not torch.equal(first[0], module.get_rng_state_all()[0])
    assert torch.equal(first[0], module.get_rng_state_all()[0])
    assert sum("torch on npu" in name for name, _ in _generators()) == 2


def test_an_accelerator_is_not_used_if_it_is_hidden_or_torch_has_no_accelerator_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerators, "_found", accelerators._found.__wrapped__)  # which is cached otherwise
    with monkeypatch.context() as hidden:
        hidden.setenv(accelerators.HIDDEN, "1")
        assert environment.default_device() == torch.device("cpu")
    assert environment.default_device() == torch.device("npu")
    monkeypatch.delattr(torch, "accelerator")  # torch 2.5
    assert environment.default_device() == torch.device("cpu")
    rekey(3, 0, Purpose.SETUP)


def test_training_processes_are_not_forked_if_torch_sees_another_accelerator() -> None:
    assert "torch sees a GPU" in obstacle()
