"""JAX through the five methods: arrays and keys are state, forked bit for bit. Run by test_jax_and_keras.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import clone, digest, reread
from hpstage.errors import StateError
from hpstage.testing import TrainableContract
from hpstage.testing.trainable import fresh, trained
from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable

jax = pytest.importorskip("jax", reason="pip install jax")
pytest.importorskip("sklearn")
Digits: Any = pytest.importorskip("scripts.example_jax").Digits
jnp = jax.numpy


def hp_at(step: int) -> dict[str, Any]:
    return {"lr": 0.1 if step < 3 else 0.01, "noise": 0 if step < 1 else 0.2, "seed": 1}


@pytest.mark.slow  # to compile; the search below forks, too
class TestDigitsInJAX(TrainableContract):
    steps, fork = 5, 2

    @pytest.fixture
    def make_trainable(self) -> Callable[[], object]:
        return Digits

    @pytest.fixture
    def values_at(self) -> Callable[[int], dict[str, Any]]:
        return hp_at


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: jnp.arange(6.0).reshape(2, 3),
        lambda: jnp.ones((2, 3), jnp.bfloat16) / 3,
        lambda: jnp.zeros((0, 4), jnp.int8),
        lambda: jnp.asarray([1 + 2j, float("nan")]),
        lambda: jnp.asarray(0.1),  # a weak dtype
        lambda: jnp.asarray(True),
        lambda: jax.random.key(3),
        lambda: jax.random.split(jax.random.key(3, impl="rbg"), 2),
    ],
)
@pytest.mark.parametrize("through", [clone, reread])
def test_jax_arrays_and_keys_are_restored_with_their_type_and_bytes(
    make: Callable[[], Any], through: Callable[[object], Any]
) -> None:
    value = make()
    found = through({"value": value})["value"]
    assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
    assert getattr(found, "weak_type", False) == getattr(value, "weak_type", False)
    assert digest(found) == digest(value)
    plain = jax.random.key_data if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else lambda array: array
    assert np.asarray(plain(found)).tobytes() == np.asarray(plain(value)).tobytes()


def test_a_copied_state_remains_readable_after_its_jax_array_is_donated() -> None:
    array = jnp.ones(3)
    copy = clone([array])
    array.delete()
    assert np.asarray(copy[0]).tolist() == [1, 1, 1]  # type: ignore[index]


def test_digests_of_jax_arrays_differ_by_dtype_weak_type_and_kind_of_key() -> None:
    data = jax.random.key_data(jax.random.key(0))
    states = [
        jnp.asarray(1.0),
        jnp.asarray(1.0, jnp.float32),
        np.float32(1.0),
        jnp.zeros(1, jnp.uint16),
        jnp.zeros(1, jnp.bfloat16),
        data,
        jax.random.wrap_key_data(data),
    ]
    assert len({*map(digest, states)}) == len(states)


def donated(array: Any) -> Any:
    array.delete()
    return array


class Constant(Digits):  # type: ignore[misc]
    """Holds what no state could, and does not change it."""

    def __init__(self) -> None:
        self.held = [jnp.ones(2, jnp.float8_e4m3fn), jnp.broadcast_to(jnp.asarray(1.0), (3,)), donated(jnp.ones(2))]


def test_a_trainable_may_hold_unchanged_jax_arrays_that_no_state_can_hold() -> None:
    trained(fresh(Constant(), hp_at), hp_at, 0, 2)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: jnp.broadcast_to(jnp.asarray(1.0), (3,)),
            r"a JAX array with a weak dtype \(float32\): fix its dtype",
        ),
        (lambda: jnp.ones(2, jnp.float8_e4m3fn), "a JAX array of dtype float8_e4m3fn"),
        (lambda: donated(jnp.ones(2)), "a JAX array that was donated"),
    ],
)
def test_a_jax_array_that_cannot_be_restored_is_refused_by_its_path_in_the_state(
    make: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(StateError, match=rf"state\['velocity'\] is {reason}"):
        clone({"velocity": make()})


def test_the_jax_device_and_jax_settings_are_part_of_the_key() -> None:
    found = describe(as_trainable(Digits())).described
    assert found["jax"] == jax.__version__
    assert found["jax device"].startswith(jax.default_backend())
    with jax.enable_x64(True):
        assert describe(as_trainable(Digits())).described["jax settings"] != found["jax settings"]


class Forgetful(Digits):  # type: ignore[misc]
    """Its arrays are changed by training and by no state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parameters, self.key = state["parameters"], state["key"]


class Traced(Digits):  # type: ignore[misc]
    """A function that reads a hyperparameter while it is traced, which is once, in the first step."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        super().setup(hp)
        self.now = dict(hp)
        self.scale = jax.jit(lambda x: x * self.now["lr"])

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.now = dict(hp)
        super().train(step, {**hp, "lr": float(self.scale(1.0))})


def test_a_hyperparameter_read_only_while_jax_traces_a_function_is_found(tmp_path: Path) -> None:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"late": [0.01, 0.02]}, seed=0))

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": s.piecewise({0: 0.1, 6: trial.suggest_categorical("late", [0.01, 0.02])}), "noise": 0.1}

    with pytest.raises(StateError, match="differs from training straight"):
        hpstage.optimize(
            study, Traced(), space, metric="accuracy", steps=12, executor=hpstage.InlineExecutor(), store=tmp_path
        )


def test_a_jax_array_missing_from_the_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"self\.velocity\['b1'\]"):
        hpstage.optimize(
            optuna.create_study(),
            Forgetful(),
            lambda trial: {"lr": 0.1, "noise": 0.1},
            metric="accuracy",
            steps=3,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=tmp_path,
        )
