"""Compiled models and functions: exact, and no false alarm."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hpstage.checkpoints.state_tree import reread
from hpstage.execution.verification import ForkVerification
from tests.torch.trainables import FORK, STEPS, Small, advance, fresh, hp_at, outcome


class Compiled(Small):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return torch.compile(super().model(hp), backend=self.backend)  # type: ignore[return-value]


class CompiledInPlace(Compiled):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = Small.model(self, hp)
        model.compile(backend=self.backend)
        return model


class CompiledLoss(Compiled):
    """A function of the trainable's, which counts besides."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.criterion = torch.compile(nn.functional.cross_entropy, backend=self.backend)
        self.calls = 0
        return Small.model(self, hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        return self.criterion(model(batch[0]), batch[1]) * (1 + self.calls / 100)


# torch's own tracing looks.
pytestmark = [
    pytest.mark.sampled(4),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(make: Callable[[], Small]) -> None:
    expected = outcome(advance(fresh(make()), 0, STEPS))

    trainable: Any = fresh(make())
    verification = ForkVerification(trainable, hp_at(0), lambda step, hp, report: trainable.train(step, hp), 0, STEPS)
    for step in range(STEPS):
        trainable.train(step, hp_at(step))
        verification.after(step, hp_at(step), False)
        if step + 1 == FORK:
            state = reread(trainable.state_dict())
            trainable.evaluate()
    verification.collect(STEPS)
    assert verification.over
    assert verification.difference is None
    assert outcome(trainable) == expected

    trainable.setup(hp_at(0))
    trainable.load_state_dict(state)
    assert outcome(advance(trainable, FORK, STEPS)) == expected
    other: Any = fresh(make())
    torch._dynamo.reset()  # as in another process
    other.load_state_dict(state)
    assert outcome(advance(other, FORK, STEPS)) == expected


OLD = torch.__version__.startswith("2.5.")


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "kind",
    [
        Compiled,
        CompiledInPlace,
        pytest.param(CompiledLoss, marks=pytest.mark.skipif(OLD, reason="torch 2.5 compiles none of its own")),
    ],
)
def test_a_model_compiled_by_torch_compile_forks_exactly(kind: type[Compiled], backend: str) -> None:
    check(lambda: kind(backend))


class Slender(Compiled):
    """Little to compile: it takes long."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3))
        return torch.compile(model, backend=self.backend)  # type: ignore[return-value]


class OfOwnLayers(CompiledLoss):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        made = super().model(hp)

        class Around(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = made

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x)

        return Around()


@pytest.mark.skipif(OLD, reason="torch 2.5 compiles none of its own")
def test_the_first_compilation_within_a_step_is_not_reported_as_a_change_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, vars(nn.Module)[name])  # to be put back
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    trainable: Any = fresh(OfOwnLayers("eager"))
    advance(trainable, 0, 2)
    trainable.state_dict()


def machine_code(test: Callable[[], None]) -> Callable[[], None]:
    for mark in (
        pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # by inductor itself
        pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a compiler"),
        pytest.mark.skipif(OLD, reason="torch 2.5 draws other numbers in the first run of a process"),
    ):
        test = mark(test)
    return test


@machine_code
@pytest.mark.ci
def test_a_model_compiled_by_inductor_forks_exactly() -> None:
    straight: Any = advance(fresh(Slender("inductor")), 0, FORK)
    state = reread(straight.state_dict())
    expected = outcome(advance(straight, FORK, STEPS))
    torch._dynamo.reset()  # as in another process
    other: Any = fresh(Slender("inductor"))
    other.load_state_dict(state)
    assert outcome(advance(other, FORK, STEPS)) == expected


@pytest.mark.slow  # compiled five times
@machine_code
def test_a_model_compiled_by_inductor_passes_fork_verification_and_forks_exactly() -> None:
    check(lambda: Slender("inductor"))


class CountsInside(Compiled):
    """What is compiled reads a number that is another at each step."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.calls = 0
        self.criterion = torch.compile(self.scaled, backend=self.backend)
        return Small.model(self, hp)

    def scaled(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x, y) * (1 + self.calls / 100)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        return self.criterion(model(batch[0]), batch[1])


@pytest.mark.skipif(OLD, reason="torch 2.5 compiles as often as there is something new")
def test_code_that_is_recompiled_at_each_step_is_refused() -> None:
    trainable: Any = fresh(CountsInside("eager"))
    with pytest.raises(Exception, match="recompile_limit"):
        advance(trainable, 0, 40)
