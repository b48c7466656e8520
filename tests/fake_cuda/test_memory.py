"""Memory of devices: states take what training leaves, and leave where it runs out; training then loses nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import LiveCache
from hpstage.checkpoints.state_tree import flatten
from hpstage.plan.facts import StateKey
from tests.fake_cuda.plugin import fake
from tests.torch.trainables import STEPS, Small, advance, fresh, hp_at, samples

KEYS = [StateKey(f"{number:032x}") for number in range(8)]
MIB = 1 << 20


def state(value: float, device: str = "cuda:0") -> dict[str, torch.Tensor]:
    return {"w": torch.full((MIB // 4,), value, device=device)}


def on_devices(cache: LiveCache) -> list[bool]:
    return [found["w"].is_cuda for found in map(cache.get, KEYS) if isinstance(found, dict)]


def kept_values(cache: LiveCache) -> list[float]:
    return [float(found["w"][0]) for found in map(cache.get, KEYS) if isinstance(found, dict)]


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_states_cached_on_a_device_leave_the_peak_memory_of_training_free(device: str) -> None:
    index = torch.device(device).index
    live = state(0, device)
    fake.reset_peak(index)
    step = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
    del step
    fake.set_total(index, fake.allocated(index) + 6 * MIB + MIB // 2)
    cache = LiveCache()
    for number, key in enumerate(KEYS):
        live["w"].fill_(number)
        cache.put(key, live)
    assert on_devices(cache)[-1] and sum(on_devices(cache)) <= 2, "the last ones"
    assert kept_values(cache) == list(range(8))
    torch.empty(4 * MIB, dtype=torch.uint8, device=device)  # training's step still fits


def test_states_move_to_the_host_when_device_memory_runs_out_during_a_copy() -> None:
    cache = LiveCache()
    cache.put(KEYS[0], state(0))
    live = state(1)
    fake.fail_at(0, 1)
    flat = flatten(live)
    copy, wait = cache.copy(KEYS[1], flat, flat.nbytes)
    live["w"].fill_(-1)
    assert wait is None and isinstance(copy, dict)
    assert (copy["w"].device.type, float(copy["w"][0])) == ("cpu", 1.0)
    assert on_devices(cache) == [False]
    cache.put(KEYS[2], state(2))
    assert kept_values(cache) == [0.0]


class OnGPU(Small):
    device = "cuda"

    def evaluate(self, model: Any) -> dict[str, float]:
        x, y = samples()
        return {"accuracy": (model(x).argmax(1) == y).float().mean().item(), "mean": model(x).mean().item()}


def searched(store: Path) -> list[tuple[str, Any]]:
    def space(trial: optuna.Trial) -> Mapping[str, Any]:
        late = trial.suggest_categorical("late", [0.1, 0.01, 0.001])
        return {"lr": s.piecewise({0: 0.05, 4: late}), "momentum": 0.9, "batch_size": 8}

    sampler = optuna.samplers.GridSampler({"late": [0.1, 0.01, 0.001]}, seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    hpstage.optimize(
        study, OnGPU(), space, metric="mean", steps=8, n_trials=3, executor=hpstage.InlineExecutor(), store=store
    )
    return [(trial.state.name, trial.values) for trial in study.trials]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, Any]], int]:
    """The outcome of a search with enough memory, and its number of allocations."""
    before = fake.allocations(0)
    return searched(tmp_path_factory.mktemp("straight")), fake.allocations(0) - before


@pytest.mark.parametrize("share", [0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9])
def test_running_out_of_device_memory_while_states_are_cached_does_not_change_a_search(
    share: float, straight: tuple[list[tuple[str, Any]], int], tmp_path: Path
) -> None:
    """Any allocation may fail: in a step or an evaluation, or when a state is saved or loaded."""
    expected, allocations = straight
    fake.fail_at(0, int(share * allocations))
    assert searched(tmp_path / "short") == expected


@pytest.mark.parametrize(("free", "given"), [(0.5, False), (0.05, True)])
def test_reserved_device_memory_is_released_between_models_if_memory_is_short(free: float, given: bool) -> None:
    loop = advance(fresh(OnGPU()), 0, 4)
    block = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
    del block
    fake.set_total(0, int(fake.reserved(0) / (1 - free)))
    advance(loop, 4, STEPS)
    state = loop.state_dict()
    loop.setup(hp_at(0))
    loop.load_state_dict(state)
    assert fake.reserved(0) - fake.allocated(0) > 15 * MIB, "the model is the same"
    loop.setup({**hp_at(0), "seed": 4})
    loop.train(0, {**hp_at(0), "seed": 4})
    assert (fake.reserved(0) - fake.allocated(0) < 15 * MIB) == given
