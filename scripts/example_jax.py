"""JAX on a stage tree: any object with five methods can be trained, and JAX arrays can be its state.

.venv/bin/python scripts/example_jax.py        (needs jax and scikit-learn: pip install jax)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optuna
from sklearn.datasets import load_digits

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving

Parameters = dict[str, Any]


def logits(parameters: Parameters, x: Any) -> Any:
    return jax.nn.relu(x @ parameters["w1"] + parameters["b1"]) @ parameters["w2"] + parameters["b2"]


def loss(parameters: Parameters, x: Any, y: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(logits(parameters, x))[jnp.arange(len(y)), y])


@jax.jit
def update(parameters: Parameters, velocity: Parameters, x: Any, y: Any, lr: Any) -> tuple[Parameters, Parameters]:
    gradients = jax.grad(loss)(parameters, x, y)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - lr * v, parameters, velocity), velocity


class Digits:
    """A small network; a step is one pass over the training images, with noise that training adds to them."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        images, labels = load_digits(return_X_y=True)
        self.x, self.y = jnp.asarray(images / 16, dtype=jnp.float32), jnp.asarray(labels)
        first, second, self.key = jax.random.split(jax.random.key(hp.get("seed", 0)), 3)
        self.parameters = {
            "w1": 0.1 * jax.random.normal(first, (64, 32)),
            "b1": jnp.zeros(32),
            "w2": 0.1 * jax.random.normal(second, (32, 10)),
            "b2": jnp.zeros(10),
        }
        self.velocity = jax.tree.map(jnp.zeros_like, self.parameters)

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        # hpstage keys NumPy's global generator from the step. JAX has none: its keys are values, in the state.
        for rows in np.array_split(np.random.permutation(1437), 12):
            self.key, key = jax.random.split(self.key)
            # A schedule's value is an int where it is whole, which JAX compiles for separately.
            x = self.x[rows] + float(hp["noise"]) * jax.random.normal(key, (len(rows), 64))
            self.parameters, self.velocity = update(self.parameters, self.velocity, x, self.y[rows], float(hp["lr"]))

    def evaluate(self) -> dict[str, float]:
        found = logits(self.parameters, self.x[1437:]).argmax(axis=1)
        return {"accuracy": float((found == self.y[1437:]).mean())}

    def state_dict(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "velocity": self.velocity, "key": self.key}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parameters, self.velocity, self.key = state["parameters"], state["velocity"], state["key"]


def space(trial: optuna.Trial) -> dict[str, object]:
    start = trial.suggest_categorical("lr", [0.1, 0.03])
    drop = trial.suggest_categorical("drop_at", [10, 20, 30])
    return {
        "lr": s.multistep(start, milestones=[drop], gamma=trial.suggest_categorical("gamma", [0.1, 0.3])),
        "noise": trial.suggest_categorical("noise", [0.0, 0.2]),
    }


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        Digits(),
        space,
        metric="accuracy",
        steps=40,
        n_trials=24,
        algorithm=SuccessiveHalving(min_steps=8, reduction_factor=2),
        executor=hpstage.InlineExecutor(),
    )
    print(f"accuracy {result.best_value:.4f} with {result.best_params}")
    print(result.savings)


if __name__ == "__main__":
    main()
