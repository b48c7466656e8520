"""What all tests of rehearsals share."""

from __future__ import annotations

import optuna
import pytest

from hpstage.rehearsal.costs import costs_of_plan
from tests.unit.rehearsal.drops import random, search, truth


@pytest.fixture(autouse=True)
def quiet_optuna():
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(verbosity)


@pytest.fixture
def costs():
    """As measured in a search of other trials."""
    return costs_of_plan(search(truth(2), random(99), n_trials=6).plan)
