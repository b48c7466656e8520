"""Integration with Optuna: a sampler that shares early training, plots for optuna-dashboard, and the state of samplers
for resumed searches."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpstage.optuna.saved_plots import save_stage_tree
    from hpstage.optuna.stage_tree_sampler import StageTreeSampler

__all__ = ["StageTreeSampler", "save_stage_tree"]

_HOMES = {"StageTreeSampler": "stage_tree_sampler", "save_stage_tree": "saved_plots"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hpstage.optuna.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hpstage.optuna' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
