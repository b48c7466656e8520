"""The page on Flax: an NNX model and optax through the five methods, forked bit for bit.

Run by test_jax_and_keras.py."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.testing import TrainableContract
from hpstage.testing.trainable import fresh, trained

flax = pytest.importorskip("flax", reason="pip install flax")
import jax  # noqa: E402
import optax  # noqa: E402
from flax import linen  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

PAGE = Path(hpstage.__file__).parent.parent / "notebooks" / "flax.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    code = tmp_path_factory.mktemp("page") / "flax_page.py"
    (written,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    code.write_text(written)
    found = importlib.util.spec_from_file_location("flax_page", code)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def hp_at(step: int) -> dict[str, Any]:
    return {"lr": 3e-3 if step < 3 else 3e-4, "seed": 1}


@pytest.mark.slow  # to compile; what follows forks, too
class TestNNX(TrainableContract):
    steps, fork = 5, 2

    @pytest.fixture
    def make_trainable(self, page: ModuleType) -> Callable[[], object]:
        return page.Digits  # type: ignore[no-any-return]

    @pytest.fixture
    def values_at(self) -> Callable[[int], dict[str, Any]]:
        return hp_at


def test_a_fork_at_every_step_equals_training_straight_through(page: ModuleType) -> None:
    states, straight = [], fresh(page.Digits(), hp_at)
    for step in range(5):
        states.append(clone(straight.state_dict()))
        trained(straight, hp_at, step, step + 1)
        straight.evaluate()
    forked = fresh(page.Digits(), hp_at)
    for step, state in enumerate(states):
        forked.load_state_dict(state)
        trained(forked, hp_at, step, 5)
        assert digest(forked.state_dict()) == digest(straight.state_dict())
        assert forked.evaluate() == straight.evaluate()


def test_a_search_gives_each_trial_the_metrics_of_a_separate_run(page: ModuleType, tmp_path: Path) -> None:
    drops = optuna.samplers.GridSampler({"drop_at": [4, 6, 8]})
    study = optuna.create_study(sampler=drops, direction="maximize")
    result = hpstage.optimize(
        study,
        page.Digits(),
        page.space,
        metric="accuracy",
        steps=10,
        n_trials=3,
        executor=hpstage.InlineExecutor(),
        store=tmp_path,
    )
    assert result.savings.steps_trained == 10 + 4 + 6
    for trial in result.study.trials:
        space = page.space(optuna.trial.FixedTrial(trial.params))
        own_at = lambda step, space=space: {"lr": space["lr"].value(step), "seed": 0}  # noqa: E731
        own = trained(fresh(page.Digits(), own_at), own_at, 0, 10)
        assert dict(own.evaluate()) == result.load(trial.number).metrics


class Linen:
    """As the guides of Flax Linen train: a TrainState, whose functions are those of a module that setup() makes."""

    version = "1"

    def setup(self, hp: Any) -> None:
        net = linen.Dense(3)
        parameters = net.init(jax.random.key(0), X)["params"]
        self.state = TrainState.create(apply_fn=net.apply, params=parameters, tx=optax.sgd(1.0, momentum=0.9))

    def train(self, step: int, hp: Any) -> None:
        def loss(parameters: Any) -> Any:
            return ((self.state.apply_fn({"params": parameters}, X) - 1) ** 2).mean() * hp["lr"]

        self.state = self.state.apply_gradients(grads=jax.grad(loss)(self.state.params))

    def evaluate(self) -> dict[str, float]:
        return {"size": float(jax.numpy.abs(self.state.params["kernel"]).sum())}

    def state_dict(self) -> Any:
        return flax.serialization.to_state_dict(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.state = flax.serialization.from_state_dict(self.state, state)


X = jax.numpy.arange(12.0).reshape(4, 3) / 12


def test_a_linen_module_may_be_created_in_setup_of_each_trial(tmp_path: Path) -> None:
    """Each has another number in a process, which training does not depend on."""
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [2, 3]}, seed=0))

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": schedule.multistep(0.1, [trial.suggest_categorical("drop", [2, 3])], gamma=0.1)}

    result = hpstage.optimize(
        study, Linen(), space, metric="size", steps=5, executor=hpstage.InlineExecutor(), store=tmp_path
    )
    assert result.savings.steps_trained < 10


def error(weights: Any, noise: Any) -> Any:
    return ((X @ weights["w"] + noise - 1) ** 2).mean()


def fitted(run: hpstage.Run) -> None:
    """Arrays, a key, and the state of an optimizer of optax, as local variables that each step replaces."""
    weights, key, momentum = {"w": jax.numpy.zeros((3, 3))}, jax.random.key(3), optax.adam(0.1)
    state = momentum.init(weights)
    run.attach()
    for _ in run.steps():
        key, now = jax.random.split(key)
        noise = jax.random.normal(now, (3,))
        gradient = jax.grad(error)(weights, noise)
        updates, state = momentum.update(gradient, state)
        weights = jax.tree.map(lambda w, u: w + run.hp["lr"] * u, weights, updates)
        if run.wants_report:
            run.report(size=float(jax.numpy.abs(weights["w"]).sum()))


def test_a_training_function_of_jax_forks_bit_for_bit(tmp_path: Path) -> None:
    def values(drops: list[int]) -> dict[int, float]:
        study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": drops}, seed=0))
        result = hpstage.optimize(
            study,
            fitted,
            lambda trial: {"lr": schedule.multistep(1.0, [trial.suggest_categorical("drop", drops)], gamma=0.1)},
            metric="size",
            steps=8,
            executor=hpstage.InlineExecutor(),
            store=tmp_path / str(drops),
        )
        assert result.savings.steps_trained == max(drops) + sum(8 - drop for drop in drops)
        return {trial.params["drop"]: trial.value for trial in study.trials}

    assert values([2, 4, 6]) == values([2]) | values([4]) | values([6])
