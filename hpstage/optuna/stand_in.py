"""Trials proposed in a study in memory, to inspect a space without the user's own study or messages of Optuna."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import optuna
from optuna.trial import Trial, TrialState

from hpstage.errors import UsageError
from hpstage.optuna.ledger import Ledger
from hpstage.schedule.space import Described, Rejected, Space, describe, points_of


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Suppress log messages below warnings, such as that a study was created."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


# Number of trials that a space may reject for each requested one.
_PATIENCE = 100
# A space that raises for each of this many trials, and has described or pruned none, is considered faulty.
_WRONG = 8


def described_trials(
    study: optuna.Study,
    space: Space,
    steps: int,
    most: int,
    *,
    cut: bool = True,
    catch: tuple[type[Exception], ...] = (),
) -> Iterator[tuple[Trial, Described]]:
    """Yield up to ``most`` trials that the space does not reject, proposed by the sampler of a study in memory.

    Args:
        steps, cut, catch: as for :func:`hpstage.schedule.space.describe`.

    Raises:
        UsageError: the space rejects nearly all trials.
        Exception: the space raises an exception of ``catch`` for each of the first trials. The last of them is raised.
    """
    ledger, points = Ledger(study), points_of(space)
    given = rejected = 0
    works = False
    while given < min(most, len(points) or most):
        with ledger.optimize_loop():  # samplers and spaces may stop the study
            if points:
                study.enqueue_trial(points[given])
            elif ledger.exhausted():
                return
            trial = study.ask()
            try:
                described = describe(space, trial, steps, cut=cut, catch=catch)
            except Rejected as error:
                ledger.finish(trial.number, None, TrialState.PRUNED)
                rejected += 1
                works |= isinstance(error.cause, optuna.TrialPruned)
                if not works and rejected == _WRONG:
                    raise error.cause from None
                if rejected >= _PATIENCE * most:
                    raise UsageError(f"the space rejects {rejected} trials: {error}") from error
                continue
        given += 1
        works = True
        yield trial, described
