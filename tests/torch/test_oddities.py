"""Places for state that one does not think of: each is captured exactly, or refused by name, never passed by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from hpstage.checkpoints.state_tree import digest, reread
from hpstage.errors import StateError
from hpstage.execution.verification import portrait_of
from hpstage.training.trainables import as_trainable
from tests.torch.oddities import ODDITIES, Odd

# torch says these once in a process, so that it hangs on the order of tests who hears them.
pytestmark = [
    pytest.mark.sampled(16),
    pytest.mark.forks,
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script`"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`"),
]

STEPS, FORK = 6, 3
# Made twice in one process, a hook has another number each time; here and in another such process it has one.
MADE_ONCE = {"hooks of tensors, with a closure"}
# A trial that changes what is met in model() alone is followed by no other: tests/torch/test_world.py.
MET_BEFORE = {"a module that an attribute holds"}
PLACES = {
    name: [
        *(["__init__"] if not oddity.network and name not in MADE_ONCE else []),
        *(["model"] if name not in MET_BEFORE else []),
    ]
    for name, oddity in ODDITIES.items()
}
# Of two places of an oddity the default suite takes now the one, now the other.
CASES = [
    pytest.param(name, place, id=f"{name}, in {place}", marks=[] if n == number % len(places) else [pytest.mark.slow])
    for number, (name, places) in enumerate(PLACES.items())
    for n, place in enumerate(places)
]
HP = {"seed": 2}


def begun(name: str, place: str) -> Any:
    torch.manual_seed(0)
    trainable: Any = as_trainable(Odd(ODDITIES[name], place))
    trainable.setup(HP)
    return trainable


def advance(trainable: Any, start: int, stop: int) -> Any:
    for step in range(start, stop):
        trainable.train(step, HP)
    return trainable


def outcome(trainable: Any) -> dict[str, Any]:
    return {"digest": digest(trainable.state_dict()), **portrait_of(trainable), "metrics": dict(trainable.evaluate())}


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {path: (one.get(path), other.get(path)) for path in {**one, **other} if one.get(path) != other.get(path)}


def trained(name: str, place: str) -> None:
    """Straight through, from a state on a worker that has trained on, as the next trial, and in a new adapter."""
    with closing(begun(name, place)) as first:
        expected = outcome(advance(first, 0, STEPS))

    with closing(begun(name, place)) as worker:
        state = reread(advance(worker, 0, FORK).state_dict())
        advance(worker, FORK, FORK + 2)
        worker.evaluate()
        worker.setup(HP)
        worker.load_state_dict(state)
        assert differing(outcome(advance(worker, FORK, STEPS)), expected) == {}
        worker.setup(HP)
        assert differing(outcome(advance(worker, 0, STEPS)), expected) == {}

    with closing(begun(name, place)) as other:
        other.load_state_dict(state)
        assert differing(outcome(advance(other, FORK, STEPS)), expected) == {}


@pytest.fixture(autouse=True)
def _script_classes() -> Iterator[None]:
    """Forget the classes that a test has scripted: training processes of later tests would not have them."""
    tables = torch.jit._state._script_classes, torch.jit._state._name_to_pyclass
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "place"), CASES)
@pytest.mark.ci_one_in(2)
def test_state_in_an_unusual_place_is_captured_exactly_or_refused_by_name(name: str, place: str) -> None:
    refused = ODDITIES[name].refused
    if refused is None:
        trained(name, place)
    else:
        with pytest.raises(StateError, match=refused):
            trained(name, place)
