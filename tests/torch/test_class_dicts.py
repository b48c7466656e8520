"""What accelerate keeps for all of its objects, in dicts of its classes, is as it was where each trial begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstage.checkpoints.state_tree import reread
from hpstage.errors import StateError
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import Small, advance, hp_at, network, outcome

accelerate = pytest.importorskip("accelerate")
STATES = accelerate.state.AcceleratorState, accelerate.state.PartialState, accelerate.state.GradientState

STEPS, FORK = 7, 3


@pytest.fixture(autouse=True)
def fresh_states(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in STATES:
        monkeypatch.setattr(kind, "_shared_state", {})


class Accelerated(Small):
    """Accumulates gradients as accelerate's book shows it, in a precision that the trial chooses."""

    def model(self, hp: Mapping[str, Any]) -> torch.nn.Module:
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=3, mixed_precision="bf16" if hp["lr"] < 0.01 else "no"
        )
        return network()

    def optimizer(self, model: torch.nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        made = super().optimizer(model, hp)
        self.prepared = self.accelerator.prepare(made)
        return made

    def update(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        with self.accelerator.accumulate(model):
            self.accelerator.backward(self.loss(model, batch))
            self.prepared.step()
            self.prepared.zero_grad()


def begun() -> Any:
    trainable: Any = as_trainable(Accelerated())
    trainable.setup(hp_at(0))
    return trainable


def test_shared_state_of_accelerate_is_reset_for_each_trial_and_fork() -> None:
    with closing(begun()) as first:
        expected = outcome(advance(first, 0, STEPS))
    assert not any(kind._shared_state for kind in STATES)
    with closing(begun()) as worker:
        state = reread(advance(worker, 0, FORK).state_dict())
        advance(worker, FORK, FORK + 2)
        worker.setup(hp_at(0))
        worker.load_state_dict(state)
        assert outcome(advance(worker, FORK, STEPS)) == expected
        worker.setup({**hp_at(0), "lr": 0.001})
        worker.prepare()
        assert worker.subject.accelerator.mixed_precision == "bf16"
        worker.setup(hp_at(0))
        worker.prepare()
        assert worker.subject.accelerator.mixed_precision == "no"
        assert outcome(advance(worker, 0, STEPS)) == expected


LIBRARY = """
SharedDict = dict

class State:
    _shared_state = {made}

    def __init__(self):
        self.__dict__ = self._shared_state
"""


class Late(Small):
    """Is the first to import a library whose class keeps the attributes of all instances."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def model(self, hp: Mapping[str, Any]) -> torch.nn.Module:
        state = self.make()
        state.trials = getattr(state, "trials", 0) + 1
        self.trials = state.trials
        return network()

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        return {"trials": self.trials}


def literal() -> Any:
    import shared_literal

    return shared_literal.State()


def by_alias() -> Any:
    import shared_by_alias

    return shared_by_alias.State()


def by_call() -> Any:
    import shared_by_call

    return shared_by_call.State()


def filled() -> Any:
    import shared_filled

    return shared_filled.State()


@pytest.mark.parametrize(
    ("make", "made"), [(literal, "{}"), (by_alias, "SharedDict()"), (by_call, "dict()"), (filled, "{'n': 2}")]
)
def test_class_level_state_of_a_library_imported_by_training_is_reset_or_refused(
    make: Callable[[], Any], made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"shared_{make.__name__}"
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / f"{name}.py").write_text(LIBRARY.format(made=made))
    monkeypatch.syspath_prepend(folder)
    trainable: Any = as_trainable(Late(make))
    with closing(trainable):
        trainable.setup(hp_at(0))
        assert trainable.evaluate() == {"trials": 1}
        trainable.setup(hp_at(0))
        if make is filled:
            with pytest.raises(StateError, match=rf"{name}\.State\._shared_state .* Import {name} at the top"):
                trainable.evaluate()
        else:
            assert trainable.evaluate() == {"trials": 1}
