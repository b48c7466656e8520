"""StageTreeSampler of hpstage, as a package of OptunaHub."""

from hpstage.optuna import StageTreeSampler

__all__ = ["StageTreeSampler"]
