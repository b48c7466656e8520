"""Search algorithms, which decide how far each trial is trained. One file each, implementing ``hpstage.algorithm``."""

from hpstage.algos.asha import ASHA
from hpstage.algos.full_training import FullTraining
from hpstage.algos.hyperband import Bracket, Hyperband
from hpstage.algos.median_stopping import MedianStopping
from hpstage.algos.optuna_pruner import OptunaPruner
from hpstage.algos.population_based_training import PopulationBasedTraining
from hpstage.algos.successive_halving import SuccessiveHalving

__all__ = [
    "ASHA",
    "Bracket",
    "FullTraining",
    "Hyperband",
    "MedianStopping",
    "OptunaPruner",
    "PopulationBasedTraining",
    "SuccessiveHalving",
]


def __dir__() -> list[str]:
    return __all__
