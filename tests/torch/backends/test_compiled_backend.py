"""Steps compiled as a whole: exact, the same training as eager's up to rounding, and nothing compiled twice."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import hpstage
from hpstage.errors import CompilerFailed, TrainingError
from hpstage.plan.facts import ChainLost
from hpstage.plan.log import read_facts
from hpstage.store import MemoryJournal
from hpstage.torch.backends import formulas
from hpstage.torch.backends.compiled import CompiledBackend
from hpstage.training.step_log import Recorder, recording
from tests.torch.backends.forking import by, compiled_of, forks_exactly
from tests.torch.backends.odd_programs import Tiny
from tests.torch.backends.searches import search
from tests.torch.trainables import Averaged, Small, adam, advance, fresh, hp_at, outcome

pytestmark = [
    pytest.mark.sampled(10),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler"),
]


def metrics(trainable: Any) -> dict[str, float]:
    return dict(trainable.evaluate())


@pytest.mark.slow
@pytest.mark.parametrize("make", [Small, lambda: Small(adam), Averaged], ids=["sgd", "adam", "average"])
def test_compiled_training_forks_exactly(make: Callable[[], Small]) -> None:
    forks_exactly(by("compiled", make))


@pytest.mark.ci
def test_compiled_training_equals_eager_training_up_to_rounding() -> None:
    compiled = advance(fresh(by("compiled", Tiny)()), 0, 10)
    eager = advance(fresh(Tiny()), 0, 10)
    assert compiled_of(compiled).compiled
    assert metrics(compiled) == pytest.approx(metrics(eager), rel=1e-4)
    assert metrics(compiled) != metrics(advance(fresh(Tiny()), 0, 9))


@pytest.mark.slow
def test_compiled_bits_do_not_depend_on_the_compiler_cache(tmp_path: Path) -> None:
    expected = forks_exactly(by("compiled", Tiny))
    for attempt in range(2):  # with nothing in torch's caches on disk, and with what the first has left there
        done = subprocess.run(
            [sys.executable, "-m", "tests.torch.backends.elsewhere"],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [2, expected], attempt


class Weighted(Tiny):
    """The loss reads a hyperparameter, and so does the optimizer."""

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=hp["lr"], momentum=hp["momentum"], weight_decay=hp["weight_decay"]
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * self.hp["weight"]


def changing(step: int) -> dict[str, Any]:
    """Every value is another at each step."""
    left = 0.1 / (step + 1)
    return {"lr": left, "momentum": 0.9 - left, "weight_decay": left / 100, "weight": 1 + left, "batch_size": 8}


@pytest.mark.ci
def test_hyperparameters_that_change_at_every_step_cause_no_recompilation() -> None:
    trainable = fresh(by("compiled", Weighted)(), changing(0))
    for step in range(2):
        trainable.train(step, changing(step))
    met = compiled_of(trainable).compiled
    for step in range(2, 30):
        trainable.train(step, changing(step))
    assert compiled_of(trainable).compiled == met >= 1
    assert trainable.state_dict().keys().isdisjoint({"backend"})  # type: ignore[attr-defined]

    trainable.setup({**changing(0), "lr": 0.02})  # another trial, with another model
    for step in range(5):
        trainable.train(step, {**changing(step), "lr": 0.02 + step / 100})
    assert compiled_of(trainable).compiled == met

    eager = fresh(Weighted(), changing(0))
    for step in range(30):
        eager.train(step, changing(step))
    again = fresh(by("compiled", Weighted)(), changing(0))
    for step in range(30):
        again.train(step, changing(step))
    assert metrics(again) == pytest.approx(metrics(eager), rel=1e-3)


class Own(Tiny):
    """Clips its gradients itself."""

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss


@pytest.mark.ci
def test_the_loss_within_a_custom_update_is_compiled() -> None:
    trainable = advance(fresh(by("compiled", Own)()), 0, 5)
    assert compiled_of(trainable).compiled == 1
    assert metrics(trainable) == pytest.approx(metrics(advance(fresh(Own()), 0, 5)), rel=1e-4)
    assert outcome(trainable) == outcome(trainable)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "decay": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "upwards": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, betas=(0.8, 0.99)),
    "adam upwards": lambda params: torch.optim.Adam(params, lr=0.1, maximize=True, eps=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_formulas_equal_the_optimizers_of_torch_up_to_rounding(name: str) -> None:
    start = [torch.randn(3, 4), torch.randn(()), torch.randn(2)]
    theirs = [nn.Parameter(part.clone()) for part in start]
    ours = [nn.Parameter(part.clone()) for part in start]
    reference, optimizer = OPTIMIZERS[name](theirs), OPTIMIZERS[name](ours)
    assert formulas.has_formula(optimizer)
    formula = formulas.Formula(optimizer)
    for step in range(6):
        gradients = [torch.randn_like(part) for part in start]
        for param, gradient in zip(theirs, gradients, strict=True):
            param.grad = gradient.clone()
        reference.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        reference.step()
        with torch.no_grad():
            formulas.apply(formula.groups(), gradients)
        for param, expected in zip(ours, theirs, strict=True):
            assert torch.allclose(param, expected, rtol=1e-4, atol=1e-6)
    for param, expected in zip(ours, theirs, strict=True):
        held, theirs_held = optimizer.state[param], reference.state[expected]
        assert {key for key, value in theirs_held.items() if value is not None} == held.keys()
        assert all(torch.allclose(held[key], theirs_held[key], rtol=1e-4, atol=1e-6) for key in held)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.RMSprop(params),
        lambda params: torch.optim.Adam(params, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    ],
)
def test_unsupported_optimizers_have_no_formula(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    optimizer = make([nn.Parameter(torch.zeros(2))])
    assert not formulas.has_formula(optimizer)


@pytest.mark.slow
def test_a_step_is_compiled_even_if_its_optimizer_has_no_formula() -> None:
    class Slow(Tiny):
        def group_values(self, group: dict[str, Any], hp: Mapping[str, Any]) -> dict[str, Any]:
            return {"lr": hp["lr"] / 100}

        def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
            return torch.optim.RMSprop(model.parameters(), lr=hp["lr"] / 100)

    trainable = advance(fresh(by("compiled", Slow)()), 0, 5)
    assert compiled_of(trainable).compiled == 1
    assert metrics(trainable) == pytest.approx(metrics(advance(fresh(Slow()), 0, 5)), rel=1e-3)


class Logging(Weighted):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        self.log("loss", loss)
        hpstage.log("weight", self.hp["weight"])
        self.log("number", 3)
        for factor in (1, 3):
            self.log("twice", factor * loss)
        return loss


class Updating(Logging):
    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = super().update(model, optimizer, batch)
        self.log("update", loss)
        return loss


@pytest.mark.ci
@pytest.mark.parametrize("make", [Logging, pytest.param(Updating, marks=pytest.mark.slow)])
def test_compiled_steps_log_the_values_of_eager_steps(make: type[Logging]) -> None:
    def logged(trainable: Any) -> dict[str, dict[int, float]]:
        recorder = Recorder(0)
        trainable.train(0, changing(0))  # nobody listens, as in a verification
        for step in range(1, 6):
            recorder.step = step
            with recording(recorder):
                trainable.train(step, changing(step))
        taken = recorder.take(6)
        assert taken is not None
        return {name: dict(zip(found.steps, found.values, strict=True)) for name, found in taken.series.items()}

    compiled = fresh(by("compiled", make)(), changing(0))
    values, expected = logged(compiled), logged(fresh(make(), changing(0)))
    assert compiled_of(compiled).compiled
    assert values.keys() == expected.keys()
    for name, found in values.items():
        assert found == pytest.approx(expected[name], rel=1e-3)
    silent = fresh(by("compiled", make)(), changing(0))
    for step in range(6):
        silent.train(step, changing(step))
    assert metrics(compiled) == metrics(silent)


# --- what fails while compiling ---------------------------------------------------------------------------

PASSING = [
    OSError(28, "No space left on device"),
    MemoryError(),
    ImportError("/tmp/torchinductor/main.so: file too short"),
    subprocess.CalledProcessError(-9, "g++"),
    EOFError("Ran out of input"),
]


@pytest.mark.ci
@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("make", [Tiny, Own])
@pytest.mark.ci_one_in(3)
def test_a_temporary_failure_of_the_compiler_is_not_attributed_to_the_code(
    make: type[Tiny], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To train on without compiling would give other bits under the same key."""

    def fails(self: CompiledBackend, graph: Any, inputs: Any) -> Any:
        raise error

    with monkeypatch.context() as short_of_room:
        short_of_room.setattr(CompiledBackend, "lower", fails)
        trainable = fresh(by("compiled", make)())
        with pytest.raises(
            CompilerFailed, match=f"compiling a step of {make.__name__} has failed: {type(error).__name__}"
        ):
            trainable.train(0, hp_at(0))
    monkeypatch.setattr(
        CompiledBackend, "lower", lambda self, graph, inputs: lookup_backend("aot_eager")(graph, inputs)
    )
    trainable.setup(hp_at(0))
    trainable.train(0, hp_at(0))
    assert compiled_of(trainable).compiled and compiled_of(trainable).state() is None


def test_a_permanent_failure_of_the_compiler_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: CompiledBackend, graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(CompiledBackend, "lower", fails)
    with pytest.raises(TrainingError, match=r"torch cannot compile Tiny: NotImplementedError.*numerics = 'eager'"):
        fresh(by("compiled", Tiny)()).train(0, hp_at(0))


def test_a_chain_is_retried_after_a_temporary_failure_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    def fails_at_first(self: CompiledBackend, graph: Any, inputs: Any) -> Any:
        calls.append(None)
        if len(calls) <= 2:
            raise OSError(28, "No space left on device")
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(CompiledBackend, "lower", fails_at_first)
    journal = MemoryJournal()
    result = search("compiled", journal)
    assert all(trial.value is not None for trial in result.study.trials)
    outcomes = [fact.outcome for fact in read_facts(journal) if isinstance(fact, ChainLost)]
    assert outcomes.count("lost") == 1 and outcomes[0] == "lost"


def test_compiled_code_is_cached_in_a_folder_that_only_its_owner_can_access(tmp_path: Path) -> None:
    code = (
        "import os, hpstage.torch, torch\n"
        "from hpstage.torch.backends.compiled import _start_compiler\n"
        "_start_compiler()\n"
        "print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment["TMPDIR"] = str(tmp_path)
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    folder = Path(found.stdout.strip())
    assert folder.parent.parent == tmp_path and stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
