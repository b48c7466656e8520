"""Keras on a stage tree, by the five methods, on whichever backend it has.

.venv/bin/python scripts/example_keras.py        (needs keras and scikit-learn: pip install keras)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # before keras is imported

import keras
import numpy as np
import optuna
from sklearn.datasets import load_digits

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving


class Digits:
    """A small network; a step is one pass over the training images."""

    # Keras finds its variables by their addresses.
    stateless = ("self.model._functional._nodes", "self.model.optimizer._trainable_variables_indices")

    def setup(self, hp: Mapping[str, Any]) -> None:
        images, labels = load_digits(return_X_y=True)
        self.x, self.y = (images / 16).astype("float32"), labels
        keras.backend.clear_session()  # which counts the layers of a process for their names
        keras.utils.set_random_seed(int(hp.get("seed", 0)))
        self.model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dropout(0.2, seed=1),  # a generator of its own, which is a variable of the model
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer=keras.optimizers.Adam(hp["lr"]), loss=loss)
        self.model.optimizer.build(self.model.trainable_variables)  # else it has no variables before the first batch

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.model.optimizer.learning_rate = float(hp["lr"])
        # hpstage keys NumPy's global generator from the step.
        for rows in np.array_split(np.random.permutation(1437), 12):
            self.model.train_on_batch(self.x[rows], self.y[rows])

    def evaluate(self) -> dict[str, float]:
        logits = keras.ops.convert_to_numpy(self.model(self.x[1437:], training=False))
        return {"accuracy": float((logits.argmax(axis=1) == self.y[1437:]).mean())}

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{index}": keras.ops.convert_to_numpy(variable.value) for index, variable in enumerate(self._variables())
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, variable in enumerate(self._variables()):
            variable.assign(state[f"{index}"])

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.model.optimizer.variables]


def space(trial: optuna.Trial) -> dict[str, object]:
    start = trial.suggest_categorical("lr", [0.01, 0.003])
    drop = trial.suggest_categorical("drop_at", [10, 20, 30])
    return {"lr": s.multistep(start, milestones=[drop], gamma=trial.suggest_categorical("gamma", [0.1, 0.3]))}


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        Digits(),
        space,
        metric="accuracy",
        steps=40,
        n_trials=16,
        algorithm=SuccessiveHalving(min_steps=8, reduction_factor=2),
        executor=hpstage.InlineExecutor(),
    )
    print(f"accuracy {result.best_value:.4f} with {result.best_params}")
    print(result.savings)


if __name__ == "__main__":
    main()
