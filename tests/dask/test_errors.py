"""Errors of the user's code on a worker, as the process that searches sees them."""

from __future__ import annotations

import optuna
import pytest
from distributed import Client

import hpstage
from hpstage.errors import TrainingError
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing


@pytest.mark.ci
def test_an_error_in_user_code_on_a_worker_is_raised_with_its_builtin_exception_type(client: Client) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    options = {"metric": "score", "steps": 6, "n_trials": 1, "store": MemoryJournal(), "executor": client}
    with pytest.raises(ZeroDivisionError, match="the user's own error at step") as raised:
        hpstage.optimize(study, Failing(), lambda trial: {"a": 7}, catch=(), **options)
    assert isinstance(raised.value, TrainingError) and raised.value.__cause__ is None
