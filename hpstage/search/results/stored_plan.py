"""``hpstage.open`` without branches: reads a store's studies and trials, without the code that trained them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass

from hpstage.checkpoints import CheckpointStore
from hpstage.driver.places import open_existing
from hpstage.errors import UsageError
from hpstage.errors.arguments import PLACE, checked, optional
from hpstage.plan.facts import TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.plan.winners import best_first
from hpstage.search.results.branching import Lineage
from hpstage.search.results.trial import TrainedTrial, trial_of


@dataclass(frozen=True, slots=True, repr=False)
class StoredPlan:
    """A plan as it was when it was opened. Read-only; searches may continue in the meantime."""

    plan: SearchPlan
    checkpoints: CheckpointStore
    lineage: Lineage | None = None
    """How to train further trials on it."""

    def __repr__(self) -> str:
        return f"StoredPlan(studies={self.studies}, trials={len(self.plan.trials)}, checkpoints={self.checkpoints!r})"

    @property
    def studies(self) -> list[str]:
        """The names of the plan's studies, in the order in which they began."""
        return list(dict.fromkeys(map(self.plan.study_of, self.plan.trials)))

    @property
    def trials(self) -> list[str]:
        """The ids of the plan's trials, ``"<study>/<number>"``, in the order in which they were added."""
        return list(self.plan.trials)

    def trial(self, trial: str | int, study: str | None = None) -> TrainedTrial:
        """Return a trial.

        Args:
            trial: its id, or its number in ``study``.
            study: the name of its study, which can be left out if there is only one.

        Raises:
            UsageError: the plan has no such trial.
        """
        named = isinstance(trial, str) and "/" in trial
        id = TrialId(str(trial) if named else f"{self._study(study)}/{trial}")
        return trial_of(self.plan, self.checkpoints, id, lineage=self.lineage)

    def best_trial(self, study: str | None = None) -> TrainedTrial:
        """Return the completed, feasible trial with the best value of a study.

        Raises:
            UsageError: the plan has no such study, or it has several objectives or no completed trial.
        """
        name = self._study(study)
        record = self.plan.searches.get(name)
        if record is None or len(record.started.metric) != 1:
            raise UsageError(f"study {name!r} does not have one objective, and so no best trial; name the trial")
        values = {
            id: values
            for id, ended in self.plan.ended.items()
            if self.plan.study_of(id) == name and ended.feasible and (values := ended.objectives) is not None
        }
        if not values:
            raise UsageError(f"study {name!r} has no completed trial yet; name a trial")
        return self.trial(best_first(values, record.started)[0])

    def _study(self, study: str | None) -> str:
        known = self.studies
        if study is None and len(known) == 1:
            return known[0]
        if study not in known:
            there = ", ".join(known) or "none"
            problem = (
                "name the study, or a trial as STUDY/NUMBER" if study is None else f"this plan has no study {study!r}"
            )
            raise UsageError(f"{problem}; there are: {there}")
        return study


@checked(store=PLACE, checkpoints=optional(PLACE))
def open(store: str | os.PathLike[str], *, checkpoints: str | os.PathLike[str] | None = None) -> StoredPlan:
    """Open the plan of a store for reading: its studies, trials and saved states.

    Args:
        store: as for :func:`hpstage.optimize`: a folder, or a URL such as ``redis://host:6379?prefix=NAME``.
        checkpoints: where its checkpoints are, if not in the folder.

    Raises:
        StoreError: there is no plan, or it cannot be read.
        UsageError: the URL names no plan, or the plan is on a server and ``checkpoints`` is missing.
    """
    with ExitStack() as closing:
        plan, places = open_existing(store, checkpoints, closing=closing, read_only=True)
    return StoredPlan(plan, places.checkpoints)
