"""What a search is expected to train, before anything is trained."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, Hyperband, MedianStopping, PopulationBasedTraining, SuccessiveHalving
from hpstage.search.numerics import branches_at_a_time, steps_in_all
from hpstage.search.request import Request

STEPS, N_TRIALS = 81, 27


def expected(algorithm: Algorithm, **values: Any) -> float:
    """How many steps all trials are expected to take; they have nothing in common."""

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": trial.suggest_float("lr", 0.1, 0.2), **values}

    request = Request(
        study=optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)),
        trainable=None,
        space=space,
        metrics=("loss",),
        steps=STEPS,
        n_trials=N_TRIALS,
        algorithm=algorithm,
        timeout=None,
        callbacks=(),
        catch=(),
        constraints=None,
        extend=False,
        sharing=True,
        evaluate_every=None,
        checkpoint_every=None,
        checkpoint_budget=None,
        verify="off",
        audit="off",
        audit_budget=0.0,
    )
    branches = branches_at_a_time(request)
    assert branches is not None
    return steps_in_all(request, branches)


def test_expected_steps_account_for_trials_that_the_algorithm_stops() -> None:
    assert expected(FullTraining()) == STEPS * N_TRIALS
    rungs = 27 * 3 + 9 * (9 - 3) + 3 * (27 - 9) + 1 * (81 - 27)
    assert expected(SuccessiveHalving(min_steps=3, reduction_factor=3)) == rungs
    assert expected(ASHA(min_steps=3, reduction_factor=3)) < 0.6 * STEPS * N_TRIALS
    late = s.piecewise({0: 1, 60: 2})  # most are stopped before
    assert expected(SuccessiveHalving(min_steps=3, reduction_factor=3), late=late) == rungs


def test_expected_steps_follow_the_length_that_the_space_gives_a_trial() -> None:
    assert expected(FullTraining(), steps=40) == 40 * N_TRIALS


@pytest.mark.parametrize(
    "algorithm", [Hyperband(min_steps=3), MedianStopping(interval=9), PopulationBasedTraining(interval=9)], ids=repr
)
def test_expected_steps_can_be_estimated_for_every_algorithm(algorithm: Algorithm) -> None:
    assert 0 < expected(algorithm) <= STEPS * N_TRIALS
