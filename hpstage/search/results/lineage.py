"""Everything needed to continue a trial: its configuration, its plan and its trainable."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpstage.checkpoints import CheckpointStore
from hpstage.errors import UsageError
from hpstage.plan.facts import ForkedFrom
from hpstage.schedule import Plateau, Schedule
from hpstage.store import Journal

RUNS = "runs"
"""The study of trials that belong to no search."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run to be trained: schedules that all end at ``steps``, and the trial that it branches from, if any."""

    schedules: Mapping[str, Schedule | Plateau]
    steps: int
    branch_of: ForkedFrom | None = None


@dataclass(frozen=True, slots=True)
class Lineage:
    """The origin of trials, and the means to train further ones there.

    ``train`` is :func:`hpstage.search.train.train_all`, passed in since that module imports this package.
    """

    trainable: object
    """``None`` if the plan was opened without it."""
    store: str | os.PathLike[str] | Journal
    checkpoints: str | os.PathLike[str] | CheckpointStore | None
    train: Callable[..., list[Any]]

    def of(self, trainable: object) -> object:
        """Return the trainable that is given, else its own."""
        if trainable is None and self.trainable is None:
            raise UsageError("the store holds no training code; give it with trainable=, as to hpstage.optimize")
        return self.trainable if trainable is None else trainable
