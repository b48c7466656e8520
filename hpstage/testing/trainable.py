"""TrainableContract: the obligations of every trainable, in whichever form the user writes it."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.plan.facts import StateKey
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable
from hpstage.training.adapter import checked_metrics
from hpstage.training.trainables import as_trainable

Values = Callable[[int], Mapping[str, Scalar]]
Make = Callable[[], object]


class TrainableContract:
    """Subclass it, name the subclass ``Test...`` and override the fixtures ``make_trainable`` and ``values_at``.

    ``class TestMyTrainable(TrainableContract): ...``. Let values change during training, some of them before ``fork``.
    Bits must agree on a CPU, and on a GPU with deterministic algorithms.
    """

    steps: ClassVar[int] = 12
    """Number of steps. The reference is trained straight through."""
    fork: ClassVar[int] = 6
    """The step at which training is forked."""

    @pytest.fixture
    def make_trainable(self) -> Make:
        """A function that returns a new object to pass to :func:`hpstage.optimize`."""
        raise NotImplementedError("override the fixture make_trainable")

    @pytest.fixture
    def values_at(self) -> Values:
        """A function that returns the value of every hyperparameter at a step."""
        raise NotImplementedError("override the fixture values_at")

    @pytest.fixture
    def straight(self, make_trainable: Make, values_at: Values) -> list[object]:
        """The outcome of training straight through."""
        return outcome(trained(fresh(make_trainable(), values_at), values_at, 0, self.steps))

    @pytest.fixture
    def state(self, make_trainable: Make, values_at: Values) -> object:
        """The state at the fork."""
        state = clone(trained(fresh(make_trainable(), values_at), values_at, 0, self.fork).state_dict())
        _disturb()
        return state

    def test_a_fork_equals_training_straight_through(
        self, make_trainable: Make, values_at: Values, straight: list[object], state: object
    ) -> None:
        assert outcome(self._forked(make_trainable, values_at, state)) == straight

    def test_a_fork_of_a_checkpoint_equals_training_straight_through(
        self, make_trainable: Make, values_at: Values, straight: list[object], state: object, tmp_path: Path
    ) -> None:
        store, key = FolderCheckpoints(tmp_path, "contract"), StateKey("0" * 32)
        store.save(key, state, step=self.fork, parent=None)
        loaded = store.load(key)
        assert digest(loaded) == digest(state)
        assert outcome(self._forked(make_trainable, values_at, loaded)) == straight

    @pytest.mark.parametrize("fork", ["first", "last"])
    def test_the_first_and_the_last_step_may_be_forked(
        self, make_trainable: Make, values_at: Values, straight: list[object], fork: str
    ) -> None:
        step = 1 if fork == "first" else self.steps - 1
        state = clone(trained(fresh(make_trainable(), values_at), values_at, 0, step).state_dict())
        other = fresh(make_trainable(), values_at)
        other.load_state_dict(state)
        assert outcome(trained(other, values_at, step, self.steps)) == straight

    def test_a_fork_into_a_used_trainable_equals_training_straight_through(
        self, make_trainable: Make, values_at: Values, straight: list[object], state: object
    ) -> None:
        trainable = trained(fresh(make_trainable(), values_at), values_at, 0, self.steps)
        trainable.evaluate()
        trainable.setup(values_at(0))
        trainable.load_state_dict(state)
        assert outcome(trained(trainable, values_at, self.fork, self.steps)) == straight

    def test_setup_forgets_all_earlier_training(
        self, make_trainable: Make, values_at: Values, straight: list[object]
    ) -> None:
        trainable = trained(fresh(make_trainable(), values_at), values_at, 0, 3)
        trainable.setup(values_at(0))
        assert outcome(trained(trainable, values_at, 0, self.steps)) == straight

    def test_training_on_from_a_state_leaves_the_state_as_it_was(
        self, make_trainable: Make, values_at: Values, state: object
    ) -> None:
        before = digest(state)
        self._forked(make_trainable, values_at, state)
        assert digest(state) == before

    def test_a_loaded_state_is_the_state_that_was_kept(
        self, make_trainable: Make, values_at: Values, state: object
    ) -> None:
        trainable = fresh(make_trainable(), values_at)
        trainable.load_state_dict(state)
        assert digest(trainable.state_dict()) == digest(state)

    def test_evaluating_at_every_step_changes_nothing(
        self, make_trainable: Make, values_at: Values, straight: list[object]
    ) -> None:
        trainable = fresh(make_trainable(), values_at)
        for step in range(self.steps):
            trained(trainable, values_at, step, step + 1)
            trainable.evaluate()
        assert outcome(trainable) == straight

    def test_evaluating_a_loaded_state_gives_the_metrics_that_it_had(
        self, make_trainable: Make, values_at: Values
    ) -> None:
        here = trained(fresh(make_trainable(), values_at), values_at, 0, self.fork)
        there = fresh(make_trainable(), values_at)
        there.load_state_dict(clone(here.state_dict()))
        assert _bits(here.evaluate()) == _bits(there.evaluate())

    def test_metrics_are_numbers_by_name(self, make_trainable: Make, values_at: Values) -> None:
        metrics = trained(fresh(make_trainable(), values_at), values_at, 0, self.fork).evaluate()
        assert checked_metrics(metrics)

    def _forked(self, make_trainable: Make, values_at: Values, state: object) -> Trainable:
        trainable = fresh(make_trainable(), values_at)
        trainable.load_state_dict(state)
        return trained(trainable, values_at, self.fork, self.steps)


def fresh(subject: object, values_at: Values) -> Trainable:
    """Return a Trainable for ``subject``, after its setup."""
    trainable = as_trainable(subject)
    assert isinstance(trainable, Trainable)
    trainable.setup(values_at(0))
    return trainable


def trained(trainable: Trainable, values_at: Values, start: int, stop: int) -> Trainable:
    """Train steps ``[start, stop)``, while other code draws from the global generators. Return the trainable."""
    for step in range(start, stop):
        _disturb()
        trainable.train(step, values_at(step))
    return trainable


def outcome(trainable: Trainable) -> list[object]:
    """Return everything that must agree: the digest of the state, and the metrics before and after it is captured."""
    metrics = _bits(trainable.evaluate())
    return [digest(trainable.state_dict()), metrics, _bits(trainable.evaluate())]


def _bits(metrics: Mapping[str, float]) -> dict[str, object]:
    """Return metrics in a form that ``==`` compares bit by bit, NaN included."""
    return {name: "nan" if math.isnan(value) else float(value).hex() for name, value in metrics.items()}


def _disturb() -> None:
    """Draw from the global generators, as other code may."""
    random.random()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.rand(3)
    if "torch" in sys.modules:
        sys.modules["torch"].rand(3)
