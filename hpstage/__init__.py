"""hpstage: hyperparameter search that never trains the same thing twice.

Importing it is light: the parts that need torch, dask or optuna load when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpstage import algos, boosting, checkpoints, cluster, errors, optuna, report, schedule, store, testing, torch
    from hpstage.checking import CheckReport, check
    from hpstage.cluster import local_cluster
    from hpstage.errors import StopTraining
    from hpstage.execution.inline import InlineExecutor
    from hpstage.executor import Executor
    from hpstage.rehearsal.preflight import Preflight, preflight
    from hpstage.schedule import Schedule
    from hpstage.search.open import open
    from hpstage.search.optimize import optimize
    from hpstage.search.results import LoadedState, MicroAnneals, Soup, StoredPlan, TrainedTrial, TrialDiff
    from hpstage.search.results.result import Result
    from hpstage.search.train import train
    from hpstage.training.pickles import pickled
    from hpstage.training.run import Run
    from hpstage.training.step_log import log

__version__ = "0.3.0"

__all__ = [
    "CheckReport",
    "Executor",
    "InlineExecutor",
    "LoadedState",
    "MicroAnneals",
    "Preflight",
    "Result",
    "Run",
    "Schedule",
    "Soup",
    "StopTraining",
    "StoredPlan",
    "TrainedTrial",
    "TrialDiff",
    "algos",
    "boosting",
    "check",
    "checkpoints",
    "cluster",
    "errors",
    "local_cluster",
    "log",
    "open",
    "optimize",
    "optuna",
    "pickled",
    "preflight",
    "report",
    "schedule",
    "store",
    "testing",
    "torch",
    "train",
]

_HOMES = {
    "CheckReport": "hpstage.checking",
    "Executor": "hpstage.executor",
    "InlineExecutor": "hpstage.execution.inline",
    "LoadedState": "hpstage.search.results",
    "MicroAnneals": "hpstage.search.results",
    "Preflight": "hpstage.rehearsal.preflight",
    "Result": "hpstage.search.results.result",
    "Run": "hpstage.training.run",
    "Schedule": "hpstage.schedule",
    "Soup": "hpstage.search.results",
    "StopTraining": "hpstage.errors",
    "StoredPlan": "hpstage.search.results",
    "TrainedTrial": "hpstage.search.results",
    "TrialDiff": "hpstage.search.results",
    "check": "hpstage.checking",
    "local_cluster": "hpstage.cluster",
    "log": "hpstage.training.step_log",
    "open": "hpstage.search.open",
    "optimize": "hpstage.search.optimize",
    "pickled": "hpstage.training.pickles",
    "preflight": "hpstage.rehearsal.preflight",
    "train": "hpstage.search.train",
}
_MODULES = set(__all__) - _HOMES.keys()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        # Bound as a module attribute, so that the next access does not call this function.
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
    if name in _MODULES:
        return importlib.import_module(f"hpstage.{name}")
    raise AttributeError(f"module 'hpstage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
