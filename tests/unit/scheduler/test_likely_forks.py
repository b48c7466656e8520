"""States are kept where trials that nobody knows yet are likely to part, if that is cheaper than training again."""

from __future__ import annotations

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, Hyperband, MedianStopping
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.store import MemoryJournal

optuna.logging.set_verbosity(optuna.logging.ERROR)


def space(trial: optuna.Trial) -> dict[str, object]:
    drops = [trial.suggest_categorical("first", [9, 27, 54]), trial.suggest_categorical("second", [60, 72])]
    return {
        "lr": s.multistep(trial.suggest_categorical("lr", [0.4, 0.2, 0.1]), milestones=drops, gamma=0.2),
        "batch": s.piecewise({0: 16, trial.suggest_categorical("grow", [18, 36, 63]): 128}),
    }


def search(seed: int, algorithm: Algorithm, **costs: float) -> hpstage.Result:
    executor = SimulatedExecutor(
        4, evaluate_seconds=0.1, measure=lambda key, step: {"loss": int(key[:6], 16) / step}, **costs
    )
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    return hpstage.optimize(
        study,
        object(),
        space,
        metric="loss",
        steps=81,
        n_trials=40,
        algorithm=algorithm,
        executor=executor,
        store=MemoryJournal(),
    )


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("algorithm", [FullTraining(), Hyperband(3, 3), MedianStopping(9, 9)], ids=repr)
def test_trials_proposed_while_other_trials_run_train_no_step_again(seed: int, algorithm: Algorithm) -> None:
    result = search(seed, algorithm, step_seconds=1.0, save_seconds=0.2, load_seconds=0.2)
    assert result.savings.steps_trained == result.savings.steps_unique < result.savings.steps_asked


@pytest.mark.ci
def test_fewer_states_are_saved_if_saving_costs_more_than_training_again() -> None:
    dear = search(0, FullTraining(), step_seconds=0.01, save_seconds=2.0)
    cheap = search(0, FullTraining(), step_seconds=1.0, save_seconds=0.2)
    assert dear.plan.totals.saves < cheap.plan.totals.saves
    assert dear.savings.steps_trained > dear.savings.steps_unique
