"""Queued trials that two processes want at the same time, or one that dies as it takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

import hpstage
from hpstage.optuna.ledger import Ledger
from hpstage.testing.toys import Tape

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Halting(JournalStorage):
    """Does something else first before a trial is set running, or after."""

    def __init__(self, folder: Path, before: Callable[[], object], after: Callable[[], object]) -> None:
        super().__init__(JournalFileBackend(str(folder / "optuna.log")))
        self.before, self.after = before, after

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: object = None) -> bool:
        if state == TrialState.RUNNING:
            self.before()
        done = super().set_trial_state_values(trial_id, state, values)  # type: ignore[arg-type]
        if state == TrialState.RUNNING:
            self.after()
        return done


def nothing() -> None:
    pass


def load(folder: Path, before: Callable[[], object] = nothing, after: Callable[[], object] = nothing) -> optuna.Study:
    return optuna.create_study(study_name="x", storage=Halting(folder, before, after), load_if_exists=True)


ONE, OTHER = ({"hpstage:search": "x", "hpstage:plan": name} for name in ("one", "other"))


def attributes(trial: FrozenTrial) -> dict[str, object]:
    """A journal cannot remove any: they become ``None``."""
    return {name: value for name, value in trial.user_attrs.items() if value is not None}


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_queued_trial_has_the_attributes_of_the_process_that_runs_it(moment: str, tmp_path: Path) -> None:
    load(tmp_path).enqueue_trial({"a": 1}, user_attrs={"hpstage:failure": "of an earlier trial"})
    other = Ledger(load(tmp_path))
    found = []

    def propose() -> None:
        if not found:
            found.append(None)
            found.append(other.propose(OTHER))

    ledger = Ledger(load(tmp_path, **{moment: propose}))  # type: ignore[arg-type]
    mine = ledger.propose(ONE)
    theirs = found[1]
    assert theirs is not None and {mine.number, theirs.number} == {0, 1}
    trials = load(tmp_path).trials
    assert attributes(trials[mine.number]) == ONE and attributes(trials[theirs.number]) == OTHER


def test_a_queued_trial_is_not_lost_if_a_process_dies_while_it_takes_the_trial(tmp_path: Path) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    def search(study: optuna.Study) -> None:
        options = {"metric": "score", "steps": 2, "n_trials": 1, "executor": hpstage.InlineExecutor()}
        hpstage.optimize(study, Tape(), lambda trial: {"a": trial.suggest_int("a", 1, 9)}, store=tmp_path, **options)

    load(tmp_path).enqueue_trial({"a": 3}, user_attrs={"hpstage:failure": "of an earlier trial"})
    with pytest.raises(KeyboardInterrupt):
        search(load(tmp_path, after=die))
    search(load(tmp_path))
    (trial,) = load(tmp_path).trials
    assert trial.params == {"a": 3} and trial.state == TrialState.COMPLETE
    assert "hpstage:failure" not in attributes(trial)
