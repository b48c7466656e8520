"""The Optuna side: a sampler that shares beginnings, and samplers' random states for searches that are interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpstage.optuna.stage_tree_sampler import StageTreeSampler

__all__ = ["StageTreeSampler"]


def __getattr__(name: str) -> Any:
    if name == "StageTreeSampler":
        from hpstage.optuna.stage_tree_sampler import StageTreeSampler

        return StageTreeSampler
    raise AttributeError(f"module 'hpstage.optuna' has no attribute {name!r}")
