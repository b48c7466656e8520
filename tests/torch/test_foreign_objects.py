"""The survey of the user's code calls nothing that it finds: proxies make up attributes, or raise for any name."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest.mock import MagicMock

import pydantic
import pytest
import torch

from hpstage.checkpoints.state_tree import reread
from hpstage.testing.toys import Tape
from hpstage.training.code.graph import Graph, functions_reached
from hpstage.training.identity.code_identity import code_identity
from tests.torch.trainables import Small, advance, fresh, outcome

pytestmark = pytest.mark.sampled(4)


class Raises:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"lookup of {name}")


class MakesUp:
    def __getattr__(self, name: str) -> object:
        return self

    def __call__(self) -> object:
        return self


class Meta(type):
    def __getattr__(cls, name: str) -> object:
        raise RuntimeError(f"lookup of {name}")


class Made(metaclass=Meta):
    pass


class Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"lookup of {name}")


FOREIGN = {
    "raises": Raises(),
    "makes up": MakesUp(),
    "metaclass": Made,
    "module": Lazy("lazy_module"),
    "module of a library": Lazy("torch.lazy_module"),
    "mock": MagicMock(),
    "torch.classes": torch.classes,
    "torch.ops": torch.ops,
    "operators": torch.ops.aten,
    "operator": torch.ops.aten.add,
}
PROXY: object = None


class Reads(Tape):
    def train(self, step: int, hp: object) -> None:
        self.classes = self.ops = torch.nn
        PROXY.load.more()  # type: ignore[attr-defined]
        with PROXY.classes:  # type: ignore[attr-defined]
            super().train(step, hp)


class Stores(Tape):
    def train(self, step: int, hp: object) -> None:
        torch.classes.loaded = PROXY
        PROXY.classes = self.classes = 1  # type: ignore[attr-defined]
        super().train(step, hp)


@pytest.mark.parametrize("kind", [Reads, Stores])
@pytest.mark.parametrize("name", FOREIGN)
def test_code_that_uses_proxy_objects_has_an_identity(
    name: str, kind: type[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PROXY", FOREIGN[name])
    assert code_identity(kind()) == code_identity(kind())
    assert Graph(kind).reached()
    assert kind.train in functions_reached(kind)


def test_code_that_takes_the_main_module_from_sys_modules_can_be_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script names it: it has no spec, and what it consists of is known from its functions."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)

    def name() -> str:
        return sys.modules["__main__"].__name__

    assert name in Graph(name).functions


def test_a_step_may_create_a_pydantic_model_whose_class_cannot_be_pickled() -> None:
    class Config(pydantic.BaseModel):
        scale: float = 2.0

    class Configured(Small):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            self.config = Config(scale=getattr(self, "config", Config()).scale + 1)
            return super().loss(model, batch) * self.config.scale

    trainable = fresh(Configured())
    state = reread(advance(trainable, 0, 2).state_dict())
    expected = outcome(advance(trainable, 2, 4))
    other = fresh(Configured())
    other.load_state_dict(state)
    assert outcome(advance(other, 2, 4)) == expected
