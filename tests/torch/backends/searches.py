"""A search of two trials, by a step backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna

import hpstage
from hpstage.executor import Executor
from hpstage.store import Journal
from tests.torch.backends.forking import by
from tests.torch.backends.odd_programs import Tiny


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop_at", [2, 3])
    return {"lr": hpstage.schedule.multistep(0.1, milestones=[drop], gamma=0.1), "batch_size": 8, "momentum": 0.9}


def search(
    numerics: str,
    store: Path | Journal | None,
    executor: Executor | None = None,
    *,
    version: str = "1",
    show_progress_bar: bool = False,
) -> hpstage.Result:
    """Search with :class:`Tiny`, whose two trials share two steps; in this process by default."""
    subject = by(numerics, Tiny)()
    subject.version = version
    subject.max_stacked = 2  # measuring more takes longer
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop_at": [2, 3]}, seed=0))
    return hpstage.optimize(
        study,
        subject,
        space,
        metric="loss",
        steps=4,
        n_trials=2,
        executor=hpstage.InlineExecutor() if executor is None else executor,
        store=store,
        show_progress_bar=show_progress_bar,
    )
