"""Results: the trials of a plan, their saved states, and the models in them."""

from hpstage.search.results.diff import TrialDiff
from hpstage.search.results.loading import LoadedState
from hpstage.search.results.microanneal import MicroAnneals
from hpstage.search.results.soup import Soup
from hpstage.search.results.stored_plan import StoredPlan, open
from hpstage.search.results.trial import TrainedTrial

__all__ = ["LoadedState", "MicroAnneals", "Soup", "StoredPlan", "TrainedTrial", "TrialDiff", "open"]
