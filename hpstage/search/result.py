"""The result of ``optimize``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpstage.errors import UsageError
from hpstage.plan.facts import Fact, TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.plan.savings import Savings
from hpstage.schedule import Schedule

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    import optuna
    from optuna.trial import FrozenTrial


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a call of ``optimize``."""

    study: optuna.Study
    savings: Savings
    store: Path | None
    """The folder of the journal and checkpoints."""
    plan: SearchPlan
    """The search plan at the end of this call."""
    journal: tuple[Fact, ...]
    """The facts that the plan is folded from."""
    search: str = ""
    """The study's name in the plan, if it differs from its own."""

    @property
    def name(self) -> str:
        """The study's name in the plan."""
        return self.search or self.study.study_name

    def trial_id(self, number: int) -> TrialId:
        """Return a trial's id in the plan."""
        return TrialId(f"{self.name}/{number}")

    def write_report(self, folder: str | PathLike[str]) -> Path:
        """Write the report into a folder (created if needed) and return its first page."""
        from hpstage.report import write_report

        return write_report(folder, self)

    @property
    def best_trial(self) -> FrozenTrial:
        return self.study.best_trial

    @property
    def best_trials(self) -> list[FrozenTrial]:
        """The Pareto front of a study with several objectives."""
        return self.study.best_trials

    def schedules(self, trial: FrozenTrial | int) -> dict[str, Schedule]:
        """Return the schedules of a trial: a space that returns them retrains it bit for bit.

        Use this to replay a trial of population based training, whose parameters describe only its last segment.

        Raises:
            UsageError: the trial is not on this plan.
        """
        number = trial if isinstance(trial, int) else trial.number
        planned = self.plan.trials.get(self.trial_id(number))
        if planned is None:
            raise UsageError(f"study {self.study.study_name!r} has trained no trial {number} on this store")
        return dict(planned.schedules)

    @property
    def best_value(self) -> float:
        return self.study.best_value

    @property
    def best_params(self) -> dict[str, object]:
        return self.study.best_params
