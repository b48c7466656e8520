"""scikit-learn's partial_fit on a stage tree: any object with five methods can be trained.

.venv/bin/python scripts/example_sklearn.py
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import optuna
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving


class LinearDigits:
    """A linear classifier; a step is one pass over the training images, in an order that hangs on the step alone."""

    def setup(self, hp: Mapping[str, object]) -> None:
        images, labels = load_digits(return_X_y=True)
        self.x, self.y = images / 16, labels
        self.classifier = SGDClassifier(learning_rate="constant", eta0=hp["eta0"], alpha=hp["alpha"])

    def train(self, step: int, hp: Mapping[str, object]) -> None:
        self.classifier.set_params(eta0=hp["eta0"], alpha=hp["alpha"])
        # hpstage keys NumPy's global generator from the step, and random_state=None uses that generator.
        order = np.random.permutation(1437)
        self.classifier.partial_fit(self.x[order], self.y[order], classes=np.arange(10))

    def evaluate(self) -> dict[str, float]:
        return {"accuracy": self.classifier.score(self.x[1437:], self.y[1437:])}

    def state_dict(self) -> dict[str, object]:
        return {name: getattr(self.classifier, name) for name in ("coef_", "intercept_", "t_") if self.fitted}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self.classifier, name, np.copy(value) if isinstance(value, np.ndarray) else value)
        self.classifier.classes_ = np.arange(10)

    @property
    def fitted(self) -> bool:
        return hasattr(self.classifier, "coef_")


def space(trial: optuna.Trial) -> dict[str, object]:
    start = trial.suggest_categorical("eta0", [0.1, 0.03])
    drop = trial.suggest_categorical("drop_at", [10, 20, 30])
    return {
        "eta0": s.multistep(start, milestones=[drop], gamma=trial.suggest_categorical("gamma", [0.1, 0.3])),
        "alpha": trial.suggest_categorical("alpha", [1e-4, 1e-3]),
    }


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        LinearDigits(),
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
