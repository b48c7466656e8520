"""What a trainable made in ``__init__`` may refer back to it: bound methods, callbacks, closures. It is trained as it
would be by hand, and afterwards it is the user's as it was."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

import hpstage
from hpstage import schedule as s
from hpstage.errors import TrainingError, UsageError
from hpstage.store import MemoryJournal
from hpstage.training.identity.code_identity import code_identity
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import Small, advance, fresh, hp_at, outcome

pytestmark = pytest.mark.sampled(5)

STEPS = 8


def search(trainable: object, **options: Any) -> list[float]:
    """Two trials that part at step 3, one of them with another scale; their losses."""
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [3, 5], "scale": [0.5, 2.0]}, seed=0))

    def space(trial: optuna.Trial) -> dict[str, Any]:
        drop = trial.suggest_categorical("drop", [3, 5])
        scale = trial.suggest_categorical("scale", [0.5, 2.0])
        return {
            "lr": s.multistep(0.05, [drop], gamma=0.1),
            "momentum": 0.9,
            "batch_size": 8,
            "seed": 3,
            "scale": s.piecewise({0: 1.0, 2: scale}),
        }

    hpstage.optimize(
        study,
        trainable,
        space,
        metric="loss",
        steps=STEPS,
        n_trials=4,
        executor=options.pop("executor", None) or hpstage.InlineExecutor(),
        store=MemoryJournal(),
        **options,
    )
    values = {tuple(sorted(trial.params.items())): trial.values[0] for trial in study.trials}
    return [values[key] for key in sorted(values)]


class Scaled(Small):
    """The loss is scaled by a hyperparameter and by a count, both of which are read from ``self``."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def scale(self) -> float:
        self.count += 1
        return float(self.hp["scale"]) * (1 + 0.1 * self.count)

    def now(self) -> float:
        return self.scale()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        (super().loss(model, batch) * self.now()).backward()
        optimizer.step()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {**super().evaluate(model), "count": float(self.count)}


class Table(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.factors = {"scaled": self.scale}

    def now(self) -> float:
        return self.factors["scaled"]()


class Partial(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [functools.partial(type(self).scale, self), functools.partial(self.scale)]

    def now(self) -> float:
        return self.factors[self.count % 2]()


class Callback:
    def __init__(self, trainable: Scaled) -> None:
        self.trainable = trainable

    def factor(self) -> float:
        return self.trainable.scale()


class Slotted:
    __slots__ = ("owner",)

    def __init__(self, owner: Scaled) -> None:
        self.owner = owner

    def factor(self) -> float:
        return self.owner.scale()


class Back(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.callbacks = (Callback(self), Slotted(self))

    def now(self) -> float:
        return self.callbacks[self.count % 2].factor()


class Closure(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [lambda: self.scale()]

    def now(self) -> float:
        return self.factors[0]()


class Weak(Scaled):
    version = "1"  # weak references have no digest

    def __init__(self) -> None:
        super().__init__()
        self.me = weakref.ref(self)

    def now(self) -> float:
        me = self.me()
        assert me is not None
        return me.scale()


class Criterion(nn.Module):
    def __init__(self, owner: Scaled) -> None:
        super().__init__()
        self.owner = owner

    def forward(self) -> float:
        return self.owner.scale()


class InModule(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = Criterion(self)

    def now(self) -> float:
        return float(self.criterion())


REFERRING = (Table, Partial, Back, Closure, Weak, InModule)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    values = search(Scaled(), sharing=False)
    assert len(set(values)) == 4
    return values


@pytest.mark.ci
@pytest.mark.parametrize("sharing", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize("kind", REFERRING)
@pytest.mark.one_in(3)
def test_references_of_a_trainable_to_itself_do_not_change_training(
    kind: type[Scaled], sharing: bool, expected: list[float]
) -> None:
    trainable = kind()
    identity, attributes = code_identity(trainable), dict(vars(trainable))
    assert search(trainable, sharing=sharing) == expected
    assert vars(trainable) == attributes
    assert code_identity(trainable) == identity
    assert search(trainable, sharing=not sharing) == expected


class Plain:
    """An object with the five methods, no randomness, and tables of its own methods."""

    def __init__(self) -> None:
        self.rules = {"plain": self.plain, "sign": lambda g, lr: self.sign(g, lr)}
        self.hooks = [self.counted]
        self.n = 0

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.w, self.n = np.ones(3), 0

    def counted(self) -> None:
        self.n += 1

    def plain(self, g: Any, lr: float) -> None:
        self.w = self.w - lr * g

    def sign(self, g: Any, lr: float) -> None:
        self.w = self.w - lr * np.sign(g)

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        for hook in self.hooks:
            hook()
        self.rules["sign" if step % 2 else "plain"](self.w * hp["scale"] / self.n, hp["lr"])

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(abs(self.w).sum())}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "n": self.n}

    def load_state_dict(self, state: Any) -> None:
        self.w, self.n = state["w"], state["n"]


def test_a_plain_object_with_references_to_itself_is_trained_as_by_hand() -> None:
    by_hand = []
    for drop in (3, 5):
        for scale in (0.5, 2.0):
            alone = Plain()
            alone.setup({})
            for step in range(STEPS):
                lr = s.multistep(0.05, [drop], gamma=0.1).value(step)
                alone.train(step, {"lr": lr, "scale": 1.0 if step < 2 else scale})
            by_hand.append(alone.evaluate()["loss"])
    trainable = Plain()
    before = dict(vars(trainable))
    for sharing in (True, False):
        assert search(trainable, sharing=sharing) == by_hand
        assert vars(trainable) == before


# --- the object is the user's again ------------------------------------------------------------------------


class Failing(Table):
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        raise RuntimeError("out of paper")


def test_a_trainable_has_its_original_attributes_after_a_failed_search() -> None:
    trainable = Failing()
    before = dict(vars(trainable))
    with pytest.raises(TrainingError, match="out of paper"):
        search(trainable, catch=())
    assert vars(trainable) == before
    assert trainable.hp == {}


def test_attributes_set_by_describe_data_are_available_only_in_training() -> None:
    class Describing(Plain):
        def describe_data(self) -> str:
            self.data = np.arange(3.0)
            return "three numbers"

        def train(self, step: int, hp: Mapping[str, Any]) -> None:
            self.w = self.w - self.data

    subject = Describing()
    before = dict(vars(subject))
    trainable: Any = as_trainable(subject)
    assert trainable.describe_data() == "three numbers"
    assert vars(subject) == before
    trainable.setup({})
    trainable.train(0, {})
    assert list(subject.w) == [1.0, 0.0, -1.0]
    trainable.close()
    assert vars(subject) == before


def test_a_search_is_refused_while_its_trainable_is_being_trained() -> None:
    trainable = Table()
    holder: Any = fresh(trainable, {**hp_at(0), "scale": 1.0})
    holder.state_dict()
    with pytest.raises(UsageError, match=r"this Table is being trained already.*an object of its own.*Table\(\.\.\.\)"):
        search(trainable)
    holder.close()
    search(trainable)


def test_a_second_concurrent_search_of_the_same_trainable_is_refused() -> None:
    trainable, refused = Table(), []

    def other() -> None:
        try:
            search(trainable)
        except UsageError as error:
            refused.append(str(error))

    def callback(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    search(trainable, callbacks=[callback])
    assert len(refused) == 4
    assert "is being trained already" in refused[0]


@pytest.mark.ci
def test_a_trainable_has_its_original_attributes_after_its_adapter_is_deleted() -> None:
    trainable = Table()
    before = dict(vars(trainable))
    advance(fresh(trainable, {**hp_at(0), "scale": 1.0}), 0, 0).state_dict()
    gc.collect()
    assert vars(trainable) == before


# --- frozen dataclasses, and hyperparameters that are written to ------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen(Small):
    width: int = 4
    make_optimizer: Any = dataclasses.field(default=None, repr=False)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=hp["momentum"])


def test_a_frozen_dataclass_is_trained_like_any_other_trainable() -> None:
    frozen: Any = fresh(Frozen())
    assert outcome(advance(frozen, 0, 4)) == outcome(advance(fresh(Small()), 0, 4))


class Defaulting(Small):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        hp.setdefault("width", 3)  # type: ignore[attr-defined]
        return super().model(hp)


class Dropping(Small):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.hp.pop("seed", None)  # type: ignore[attr-defined]
        return super().loss(model, batch)


class Replacing(Small):
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.hp = {**self.hp, "lr": 0.0}
        return super().evaluate(model)


@pytest.mark.parametrize(
    ("kind", "who"), [(Defaulting, "model"), (Dropping, r"update\(\) or loss"), (Replacing, "evaluate")]
)
def test_a_method_that_changes_self_hp_is_refused_with_the_remedy(kind: type[Small], who: str) -> None:
    with pytest.raises(UsageError, match=rf"{kind.__name__}\.{who}\(\).* has changed self\.hp from .*dict\(hp\).*get"):
        advance(fresh(kind()), 0, 1).evaluate()


def test_hyperparameters_that_a_plain_object_changes_are_reset_at_the_next_step() -> None:
    seen = []

    class Writing(Plain):
        def setup(self, hp: Any) -> None:
            hp.setdefault("scale", 1.0)
            super().setup(hp)

        def train(self, step: int, hp: Any) -> None:
            seen.append(copy.copy(hp))
            hp["lr"] = 7.0

    trainable = as_trainable(Writing())
    values = {"lr": 0.1}
    trainable.setup(values)
    trainable.train(0, values)
    trainable.train(1, values)
    assert seen == [{"lr": 0.1}, {"lr": 0.1}]


class Refers(Small):
    """Refers weakly to an object of setup for a while, and drops it later."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [Small()]
        self.referring: Any = None

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        self.referring = weakref.ref(self.kept[0]) if self.kept and self.referring is None else None
        if self.referring is None:
            self.kept.clear()
        return super().update(model, optimizer, batch)


def test_an_object_is_dropped_freely_once_no_weak_reference_to_it_is_left() -> None:
    trainable = fresh(Refers())
    for step in range(3):
        advance(trainable, step, step + 1).state_dict()
