"""What setup puts under a global name is made again for each trial; what a module holds that only setup has loaded is
refused to the next one."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._numpy  # it copies names of torch's, also those that a test has replaced
from torch import nn

from hpstage.checkpoints.state_tree import reread
from hpstage.errors import StateError
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import Small, advance, fresh, hp_at, outcome


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def more(self) -> int:
        self.n += 1
        return self.n


def counting() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


COUNTER: Counter | None = None
HELD: dict[str, Any] = {}
count: Callable[[], int] = int
plain_tanh, plain_softsign = torch.tanh, nn.functional.softsign


def factor() -> float:
    return 1.0


class SetsNames(Small):
    """Global names stand for objects that each setup makes, as in a script whose ``main()`` says ``global net``."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        global COUNTER, count, factor
        COUNTER, count = Counter(), counting()
        HELD["counter"], HELD["seen"] = Counter(), []
        SetsNames.counter = Counter()  # type: ignore[attr-defined]
        before, numbers = factor, counting()
        calls = [0.0]

        @functools.wraps(before)
        def factor_counted() -> float:
            return before() * numbers()

        def tanh(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 0.1
            return plain_tanh(x) * calls[0]

        @functools.wraps(plain_softsign)
        def softsign(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 0.1
            return plain_softsign(x) * calls[0]

        factor = factor_counted
        torch.tanh = tanh  # type: ignore[assignment]
        nn.functional.softsign = softsign
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert COUNTER is not None
        HELD["seen"].append(COUNTER.more() + count() + HELD["counter"].more())
        by = sum(HELD["seen"]) + SetsNames.counter.more() + factor()  # type: ignore[attr-defined]
        return torch.tanh(nn.functional.softsign(super().loss(model, batch))) * by


def test_global_names_that_setup_sets_are_set_again_for_each_trial() -> None:
    trainable: Any = fresh(SetsNames())
    state = reread(advance(trainable, 0, 3).state_dict())
    expected = outcome(advance(trainable, 3, 6))
    for start in (0, 3):
        trainable.setup(hp_at(0))
        if start:
            trainable.load_state_dict(state)
        assert outcome(advance(trainable, start, 6)) == expected
    trainable.close()
    assert COUNTER is None
    assert not HELD
    assert torch.tanh is plain_tanh
    assert nn.functional.softsign is plain_softsign


net: nn.Linear
optimizer: torch.optim.Optimizer
counter: Counter


def script(run: Any) -> None:
    """A script of globals."""
    global net, optimizer, counter
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=run.hp["lr"], momentum=run.hp["momentum"])
    counter = Counter()
    run.attach(net=net, optimizer=optimizer)
    for _ in run.steps():
        optimizer.zero_grad()
        (net(torch.ones(2)) * counter.more()).sum().backward()
        optimizer.step()
        run.report(weight=float(net.weight.detach().sum()), n=counter.n)


def test_a_function_may_set_global_names_before_its_loop() -> None:
    trainable: Any = as_trainable(script)
    found = []
    for _ in range(2):
        trainable.setup(hp_at(0))
        advance(trainable, 0, 3)
        found.append(trainable.evaluate())
    assert found[0] == found[1]
    assert found[0]["n"] == 3
    trainable.close()


class ByName(Small):
    """It finds what counts in a module that nothing names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.found = getattr(importlib.import_module(f"tests.torch.found_{'by_name' if hp else ''}"), self.name)
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        counted = self.found() if self.name == "numbered" else self.found()()
        return super().loss(model, batch) * counted


@pytest.fixture
def not_loaded() -> None:
    sys.modules.pop("tests.torch.found_by_name", None)


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize(("name", "path"), [("Counted", r"^Counted"), ("numbered", r"^self\.found\.calls")])
def test_a_changed_class_of_a_module_that_setup_imports_is_refused_in_the_next_trial(name: str, path: str) -> None:
    trainable: Any = fresh(ByName(name))
    advance(trainable, 0, 2)
    trainable.setup(hp_at(0))
    with pytest.raises(StateError, match=rf"{path}\S* has changed .* Import it at the top of your"):
        advance(trainable, 0, 1)


NETS: dict[str, type[nn.Module]] = {}


def registered(cls: type[nn.Module]) -> type[nn.Module]:
    NETS[cls.__name__] = cls
    return cls


def from_a_registry(run: Any) -> None:
    importlib.import_module(f"nets_{run.hp['kind']}")
    net = NETS["Net"](2, 1)  # type: ignore[call-arg]
    optimizer = torch.optim.SGD(net.parameters(), lr=run.hp["lr"])
    run.attach(net=net, optimizer=optimizer)
    for _ in run.steps():
        optimizer.zero_grad()
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        run.report(weight=float(net.weight.detach().sum()))


def test_a_registry_filled_by_a_module_that_setup_imports_is_refused_in_the_next_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registers = f"from {__name__} import registered\nfrom torch import nn\n\n@registered\nclass Net(nn.Linear): pass\n"
    (tmp_path / "nets_small.py").write_text(registers)
    monkeypatch.syspath_prepend(tmp_path)
    trainable: Any = as_trainable(from_a_registry)
    hp = {"kind": "small", "lr": 0.1}
    trainable.setup(hp)
    trainable.train(0, hp)
    trainable.setup(hp)
    with pytest.raises(StateError, match=r":NETS has classes or functions that nets_small has put there"):
        trainable.train(0, hp)
    NETS.clear()
    del sys.modules["nets_small"]
