"""What can be trained, and what is said of what cannot."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hpstage.errors import UsageError
from hpstage.torch import TorchLoop
from hpstage.trainable import Trainable
from hpstage.training.function import FunctionTrainable
from hpstage.training.trainables import as_trainable
from tests.torch.test_exactness import Drawing
from tests.torch.trainables import Small, ordinary_loop


def test_as_trainable_picks_an_adapter_by_kind_and_returns_adapters_unchanged() -> None:
    for obj, engine in ((Small(), TorchLoop), (ordinary_loop, FunctionTrainable)):
        trainable = as_trainable(obj)
        assert isinstance(trainable, engine)
        assert isinstance(trainable, Trainable)
        assert as_trainable(trainable) is trainable
        assert trainable.subject is obj  # type: ignore[attr-defined]
    assert isinstance(as_trainable(functools.partial(lambda run, width: None, width=3)), FunctionTrainable)


def test_optional_methods_of_a_trainable_are_available_on_its_adapter() -> None:
    class Waiting(Drawing):
        def synchronize(self) -> str:
            return "waited"

    assert as_trainable(Waiting()).synchronize() == "waited"  # type: ignore[attr-defined]
    assert not hasattr(as_trainable(Drawing()), "synchronize")


class Half:
    def setup(self, hp: Any) -> None: ...

    def train(self, step: int, hp: Any) -> None: ...

    def evaluate(self) -> dict[str, float]:
        return {}


class Whole(Drawing):
    def __init__(self, **settings: object) -> None:
        vars(self).update(settings)


def test_attributes_numerics_and_virtual_nodes_with_unrelated_values_are_ignored() -> None:
    for settings in ({"numerics": "eager"}, {"numerics": "float16"}, {"virtual_nodes": 1}, {"virtual_nodes": "a, b"}):
        as_trainable(Whole(**settings))


@pytest.mark.parametrize(
    ("obj", "match"),
    [
        (Whole(numerics="compiled"), "Whole has numerics = 'compiled', which only a hpstage.torch.TorchTrainable can"),
        (Whole(numerics="auto"), "Whole has numerics = 'auto', which only"),
        (Whole(virtual_nodes=4), "Whole has virtual_nodes = 4, which only"),
        (Small, r"Small is a class: pass an instance of it, Small\(...\)"),
        (Half(), "this Half cannot be trained: it has no state_dict and no load_state_dict"),
        (3, "int cannot be trained: pass a hpstage.torch.TorchTrainable, a function"),
        (lambda: None, r"<lambda>\(\) cannot be trained: it must take one argument"),
        (lambda run, other: None, "must take one argument"),
    ],
)
def test_objects_that_cannot_be_trained_are_refused_with_the_reason(obj: object, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        as_trainable(obj)


def test_a_users_trainable_has_its_original_attributes_after_close() -> None:
    subject = Drawing()
    trainable: Any = as_trainable(subject)
    trainable.setup({})
    trainable.close()
    assert vars(subject) == {}


def test_the_environment_describes_torch_only_if_the_code_of_the_trainable_names_torch() -> None:
    assert as_trainable(ordinary_loop).describe_environment()["numerics"] == "eager-v1"  # type: ignore[attr-defined]
    assert as_trainable(Small()).describe_environment()["step"] == "batch"  # type: ignore[attr-defined]
    assert as_trainable(Drawing()).describe_environment() == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "match"),
    [
        (torch.cuda.device_count() + 2, "states devices_per_stage = .*, and this process sees .* --gpus-per-worker"),
        (0, "devices_per_stage is 0; it must be a whole number"),
    ],
)
def test_devices_per_stage_is_refused_if_it_is_zero_or_exceeds_the_visible_devices(
    count: int, match: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Small, "devices_per_stage", count)
    with pytest.raises(UsageError, match=match):
        TorchLoop(Small()).describe_environment()
