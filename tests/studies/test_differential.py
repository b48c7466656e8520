"""Every sampler and pruner of Optuna's gives the study that it gives in Optuna's own loop.

With one trial open at a time, under spaces of many kinds, in one go or interrupted at any moment and resumed: the same
trials with the same parameters, states, values, intermediate values, constraints and user attributes.
"""

from __future__ import annotations

import random
from math import isnan
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from hpstage.errors import UsageError
from tests.studies.differential import KINDS, PRUNERS, SAMPLERS, TRIALS, Case, Interruption, journal, record

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.sampled(16),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:.constraints_func. has been deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Constraints have been set, but CmaEsSampler will not use them"),
    pytest.mark.filterwarnings("ignore:The best trial has no intermediate values so WilcoxonPruner cannot prune"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

SAMPLED = [(kind, sampler, None) for kind in KINDS for sampler in SAMPLERS]
SINGLE = [kind for kind in KINDS if kind != "objectives"]
PRUNED = [(kind, sampler, pruner) for kind in SINGLE for sampler in ("random", "tpe-group") for pruner in PRUNERS]
cases = pytest.mark.parametrize(("kind", "sampler", "pruner"), SAMPLED + PRUNED)


def expected(case: Case) -> optuna.Study:
    """Return the study of Optuna's own loop. Skip where that fails, and see that hpstage does as well."""
    try:
        return case.in_optuna()
    except Exception as refused:  # a sampler that is not made for such a study
        with pytest.raises(type(refused)):
            Case(case.kind, case.sampler, case.pruner).in_hpstage()
        pytest.skip(f"refused by Optuna: {refused}")


@cases
@pytest.mark.one_in(10)
@pytest.mark.ci_one_in(2)
def test_a_study_of_hpstage_equals_that_of_optunas_own_loop(kind: str, sampler: str, pruner: str | None) -> None:
    mine, plain = Case(kind, sampler, pruner), Case(kind, sampler, pruner)
    study = expected(plain)
    assert record(mine.in_hpstage()) == record(study)
    assert mine.seen == plain.seen
    assert len(study.trials) >= TRIALS


@cases
@pytest.mark.one_in(17)
@pytest.mark.ci_one_in(2)
def test_an_interrupted_and_resumed_study_equals_that_of_optunas_own_loop(
    kind: str, sampler: str, pruner: str | None, tmp_path: Path
) -> None:
    study = expected(Case(kind, sampler, pruner))
    dice = random.Random(f"{kind}/{sampler}/{pruner}")
    place = dice.choice(["before", "after", "train", "callback"])
    first = Case(kind, sampler, pruner, interruption=Interruption(place, dice.randrange(1, TRIALS - 1)))
    try:
        found = first.in_hpstage(journal(tmp_path), tmp_path / "plan")
    except KeyboardInterrupt:
        found = Case(kind, sampler, pruner).in_hpstage(journal(tmp_path), tmp_path / "plan")
    else:
        assert place == "train"  # of steps that were all trained before
    assert record(found) == record(study), (place, first.interruption.number)


@pytest.mark.parametrize("pruner", ["median", "threshold", "nop"])
def test_a_pruner_decides_about_intermediate_nan_as_in_optuna(pruner: str) -> None:
    study = Case("nan", "random", pruner).in_hpstage()
    assert record(study) == record(Case("nan", "random", pruner).in_optuna())
    found = {trial.state for trial in study.trials for value in trial.intermediate_values.values() if isnan(value)}
    assert (TrialState.PRUNED if pruner == "threshold" else TrialState.COMPLETE) in found


def resumed(kind: str, sampler: str, interruption: Interruption, folder: Path) -> optuna.Study:
    """Return the study of a search that is interrupted, and run again by another process."""
    with pytest.raises(KeyboardInterrupt):
        Case(kind, sampler, interruption=interruption).in_hpstage(journal(folder), folder / "plan")
    return Case(kind, sampler).in_hpstage(journal(folder), folder / "plan")


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("number", [6, 10])
@pytest.mark.parametrize("sampler", ["brute-force", "gp", "qmc-sobol", "nsga-ii", "grid", "own", "noting"])
@pytest.mark.one_in(3)
@pytest.mark.ci_one_in(2)
def test_an_interrupted_proposal_is_made_again_as_in_an_uninterrupted_study(
    place: str, number: int, sampler: str, tmp_path: Path
) -> None:
    study = expected(Case("constraints", sampler))
    assert record(resumed("constraints", sampler, Interruption(place, number), tmp_path)) == record(study)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.one_in(3)
def test_an_interrupted_queued_trial_is_made_again_as_in_an_uninterrupted_study(
    place: str, number: int, tmp_path: Path
) -> None:
    study = expected(Case("enqueue", "random"))
    assert record(resumed("enqueue", "random", Interruption(place, number), tmp_path)) == record(study)


class Mortal(JournalStorage):
    """A journal whose process dies as the ``at``-th trial is pruned."""

    def __init__(self, folder: Path, at: int = 0) -> None:
        super().__init__(JournalFileBackend(str(folder / "optuna.log")))
        self.left = at

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Any = None) -> bool:
        self.left -= state == TrialState.PRUNED
        if state == TrialState.PRUNED and not self.left:
            raise KeyboardInterrupt
        return super().set_trial_state_values(trial_id, state, values)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("pruner", ["halving", "hyperband"])
def test_a_decision_to_prune_survives_the_death_of_the_process(pruner: str, at: int, tmp_path: Path) -> None:
    study = Case("conditional", "random", pruner).in_optuna()
    with pytest.raises(KeyboardInterrupt):
        Case("conditional", "random", pruner).in_hpstage(Mortal(tmp_path, at), tmp_path / "plan")
    assert record(Case("conditional", "random", pruner).in_hpstage(Mortal(tmp_path), tmp_path / "plan")) == record(
        study
    )


@pytest.mark.parametrize("kind", ["grid", "conditional", "constraints", "objectives"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.one_in(13)
def test_a_sampler_proposes_as_in_optunas_ask_and_tell_with_several_unfinished_trials(kind: str, sampler: str) -> None:
    study = expected(Case(kind, sampler, window=3))
    assert record(Case(kind, sampler, window=3).in_hpstage()) == record(study)


def test_optuna_and_hpstage_both_refuse_to_prune_with_several_objectives() -> None:
    with pytest.raises(NotImplementedError):
        Case("objectives", "random", "median").in_optuna()
    with pytest.raises(UsageError, match="OptunaPruner compares trials by one value"):
        Case("objectives", "random", "median").in_hpstage()
