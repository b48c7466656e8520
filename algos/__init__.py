"""Algorithms that propose how far each trial is trained. One file each, behind ``hpstage.algorithm``."""

from hpstage.algos.full_training import FullTraining
from hpstage.algos.successive_halving import SuccessiveHalving

__all__ = ["FullTraining", "SuccessiveHalving"]
