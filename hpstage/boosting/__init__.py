"""Gradient boosting as trainables: a step is a boosting round, and trials share trees as long as their schedules agree.

::

    trainable = hpstage.boosting.LightGBM((X, y), (X_valid, y_valid), {"objective": "binary", "metric": "auc"})

    def space(trial):
        rate = s.multistep(0.1, [trial.suggest_int("at", 100, 300, step=50)], gamma=0.1)
        return {"num_leaves": trial.suggest_int("num_leaves", 7, 63, log=True), "learning_rate": rate}

    hpstage.optimize(study, trainable, space, metric="auc", steps=400)

Needs ``pip install hpstage[lightgbm]`` or ``hpstage[xgboost]``.
"""

from __future__ import annotations

from hpstage.boosting.lightgbm import LightGBM
from hpstage.boosting.xgboost import XGBoost

__all__ = ["LightGBM", "XGBoost"]


def __dir__() -> list[str]:
    return __all__
