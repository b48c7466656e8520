"""Settings of the process, torch's modes, and what torch keeps in C++: in the state and in the key, or refused."""

from __future__ import annotations

import contextlib
import decimal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hpstage.checkpoints.state_tree import reread
from hpstage.errors import StateError
from hpstage.training.identity import settings
from hpstage.training.identity.environment import describe
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import FORK, STEPS, Small, advance, fresh, hp_at, outcome

pytestmark = pytest.mark.sampled(10)

BACKENDS: Any = torch.backends


@pytest.fixture(autouse=True)
def _settings_end_with_their_test() -> Iterator[None]:
    before = settings.read_all()
    yield
    settings.write_all(before)
    assert settings.read_all() == before


# --- the key


def key() -> dict[str, str]:
    found = describe(as_trainable(Small()))
    return {**found.described, **found.identity}


SETTERS: dict[str, Callable[[], object]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "device by hand": lambda: torch.device("meta").__enter__(),
    "denormals": lambda: torch.set_flush_denormal(True),
    "mkldnn.matmul": lambda: setattr(BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
    "mkldnn.conv": lambda: setattr(BACKENDS.mkldnn.conv, "fp32_precision", "tf32"),
    "mkldnn": lambda: BACKENDS.mkldnn.set_flags(_fp32_precision="bf16"),
    "cuda.matmul": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "all": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "older": lambda: torch.set_float32_matmul_precision("medium"),
    "tf32": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "sums of 16 bits": lambda: setattr(BACKENDS.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "flash": lambda: BACKENDS.cuda.enable_flash_sdp(False),
    "fast path": lambda: BACKENDS.mha.set_fastpath_enabled(False),
    "einsum": lambda: setattr(BACKENDS.opt_einsum, "enabled", False),
    "einsum's strategy": lambda: setattr(BACKENDS.opt_einsum, "strategy", "optimal"),
    "mkldnn.enabled": lambda: setattr(BACKENDS.mkldnn, "enabled", False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "converted modules": lambda: torch.__future__.set_swap_module_params_on_conversion(True),
    "decimal numbers": lambda: setattr(decimal.getcontext(), "prec", 5),
    "decimal traps": lambda: decimal.getcontext().traps.__setitem__(decimal.Inexact, True),
    "numpy errors": lambda: np.seterr(over="raise"),
}


@pytest.mark.parametrize("name", SETTERS)
@pytest.mark.ci_one_in(2)
def test_a_setting_made_before_the_search_is_in_the_key_and_can_be_restored(name: str) -> None:
    before, usual = settings.read_all(), key()
    SETTERS[name]()
    made, there = settings.read_all(), settings.settings_here(("torch",))
    assert made != before
    assert key() != usual
    settings.write_all(before)
    assert settings.read_all() == before
    assert key() == usual
    settings.write_all(there)
    assert settings.read_all() == made


def test_a_precision_set_by_both_the_old_and_the_new_interface_of_torch_is_restored() -> None:
    before = settings.read_all()
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cuda.matmul.fp32_precision = "ieee"
    BACKENDS.mkldnn.matmul.fp32_precision = "tf32"
    assert "float32 matmul precision" not in settings.read_all()
    settings.write_all(before)
    assert settings.read_all() == before
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="of torch 2.9 and later")
def test_each_fp32_precision_of_the_installed_torch_is_read() -> None:
    found = {name for name in settings.read_all() if name.startswith("fp32 precision")}
    assert {
        f"fp32 precision of {name}" for name in ("generic, all", "mkldnn, matmul", "cuda, matmul", "cuda, conv")
    } < found


def test_settings_of_an_older_torch_without_the_new_interface_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_fp32_precision_getter")
    found = settings.torch_settings(torch)
    assert not any(name.startswith("fp32") for name in found)
    assert {"float32 matmul precision", "cudnn benchmark", "sdp use flash"} < {*found}


# --- the default device, and threads


class OnDevice(Small):
    """From its third step, tensors are made elsewhere unless it says where."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        factor = 2.0 if torch.empty(1).device.type == "meta" else 1.0
        if self.steps == 3:
            self.enter()
        return super().loss(model, batch) * factor

    def enter(self) -> None:
        torch.set_default_device("meta")

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"weight": float(next(model.parameters()).sum())}


class ByHand(OnDevice):
    def enter(self) -> None:
        torch.device("meta").__enter__()


@pytest.mark.parametrize("kind", [OnDevice, ByHand])
def test_a_default_device_set_in_training_is_in_the_state(kind: type[Small]) -> None:
    with contextlib.closing(fresh(kind())) as straight:  # type: ignore[type-var]
        expected = outcome(advance(straight, 0, STEPS))
    with contextlib.closing(fresh(kind())) as first:  # type: ignore[type-var]
        state = reread(advance(first, 0, FORK).state_dict())
        assert torch.get_default_device().type == "meta"
        first.setup(hp_at(0))
        advance(first, 0, 1)
        assert torch.get_default_device().type == "cpu"
    with contextlib.closing(fresh(kind())) as other:  # type: ignore[type-var]
        other.load_state_dict(state)
        assert outcome(advance(other, FORK, STEPS)) == expected


def in_a_loop(run: Run) -> None:
    model = nn.Linear(1, 1, device="cpu")
    run.attach(model=model)
    for _ in run.steps():
        run.report(
            made_on_cpu=float(torch.empty(1).device.type == "cpu"),
            gradients=float(torch.is_grad_enabled()),
            autocast=float(torch.is_autocast_enabled("cpu")),
            denormal=float(torch.tensor(1.2e-38, device="cpu") / 2 > 0),
        )


def test_a_training_function_sees_the_settings_of_the_thread_that_started_the_search() -> None:
    def metrics() -> Mapping[str, float]:
        with contextlib.closing(as_trainable(in_a_loop)) as trainable:  # type: ignore[type-var]
            trainable.setup({})
            trainable.train(0, {})
            return dict(trainable.evaluate())

    usual = metrics()
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_flush_denormal(True)
    assert metrics() == {name: 1.0 - value for name, value in usual.items()}


# --- modes


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Open(Small):
    """It opens a mode in its second step, and leaves it open until its fourth."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode, self.steps = mode, 0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == 2:
            self.mode.__enter__()
        if self.steps == 4:
            self.mode.__exit__(None, None, None)
        return super().loss(model, batch)


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_a_torch_mode_left_open_between_two_steps_is_refused_by_name(mode: Any) -> None:
    trainable: Any = fresh(Open(mode()))
    try:
        advance(trainable, 0, 2)
        for ask in (trainable.state_dict, trainable.evaluate):
            with pytest.raises(StateError, match=rf"test_settings\.{mode.__name__}, a mode of torch, is open .* `with"):
                ask()
        advance(trainable, 2, 4).state_dict()
    finally:
        trainable.close()


def test_autocast_left_open_between_two_steps_is_refused_by_name() -> None:
    trainable: Any = fresh(Open(torch.autocast("cpu", torch.bfloat16)))
    try:
        advance(trainable, 0, 2)
        with pytest.raises(StateError, match=r"torch\.autocast is open between two steps"):
            trainable.state_dict()
        advance(trainable, 2, 4).state_dict()
    finally:
        trainable.close()


@pytest.mark.parametrize("make", [Functions, Operators, FakeTensorMode])
def test_a_torch_mode_entered_before_the_search_is_refused_by_name(make: Any) -> None:
    trainable: Any = fresh(Small())
    refused = rf"\.{make.__name__}, a mode of torch, is open between two steps"
    with make(), pytest.raises(StateError, match=refused):
        describe(trainable)
    trainable.prepare()
    with make(), pytest.raises(StateError, match=refused):
        trainable.state_dict()
    trainable.setup(hp_at(0))
    advance(trainable, 0, 1)
    trainable.close()


def within_a_mode(run: Run) -> None:
    model = nn.Linear(1, 1)
    run.attach(model=model)
    with Functions():
        for _ in run.steps():
            run.report(weight=model.weight.item())


def test_a_torch_mode_around_the_loop_of_a_function_is_refused_by_name() -> None:
    with contextlib.closing(as_trainable(within_a_mode)) as trainable:  # type: ignore[type-var]
        trainable.setup({})
        with pytest.raises(StateError, match=r"Functions, a mode of torch, is open between two steps"):
            trainable.train(0, {})


def without_gradients(run: Run) -> None:
    model = nn.Linear(1, 1)
    run.attach(model=model)
    with torch.inference_mode():
        for _ in run.steps():
            model.weight.mul_(1.5)
            run.report(weight=model.weight.item())


def test_inference_mode_around_the_loop_of_a_function_is_entered_again_in_each_fork() -> None:
    def trained(start: int, stop: int, state: object = None) -> tuple[object, float]:
        with contextlib.closing(as_trainable(without_gradients)) as trainable:  # type: ignore[type-var]
            trainable.setup({"seed": 1})
            if state is not None:
                trainable.load_state_dict(state)
            for step in range(start, stop):
                trainable.train(step, {"seed": 1})
            return reread(trainable.state_dict()), trainable.evaluate()["weight"]

    state, _ = trained(0, 2)
    assert trained(2, 4, state)[1] == trained(0, 4)[1]
