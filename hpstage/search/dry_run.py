"""Tries out a space before any worker is started, and before the study has a trial."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping
from contextlib import suppress

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState

from hpstage.errors import UsageError
from hpstage.optuna.ledger import Ledger
from hpstage.optuna.patient_storage import patient
from hpstage.optuna.stand_in import described_trials, quiet_optuna
from hpstage.schedule.space import Described, Rejected, check_forkable, describe, points_of
from hpstage.search.request import Request
from hpstage.training.randomness import generators_restored
from hpstage.training.run import Run
from hpstage.training.warned import warn_once

logger = logging.getLogger("hpstage")

_DRAWN = 8


def try_out_space(request: Request) -> bool:
    """Call the space with a few trials of a study in memory, proposed by a copy of the study's sampler. Return whether
    the space described or pruned at least one of them.

    Other exceptions of the space are ignored, since the study in memory has no history and no attributes; the study's
    own trials will show whether they are errors.

    Raises:
        UsageError: the schedules or lengths of a trial contradict each other. The message names its parameters.
    """
    # Spaces and samplers may draw from the global generators.
    with quiet_optuna(), warnings.catch_warnings(), generators_restored():
        warnings.simplefilter("ignore")  # about the study in memory
        study = optuna.create_study(sampler=_copied(request.study.sampler), directions=request.study.directions)
        ledger, points, works, observed = Ledger(study), points_of(request.space), False, request.observed
        distributions: dict[str, BaseDistribution] = {}
        unreached: dict[str, int] = {}
        with ledger.optimize_loop():
            for number in range(min(_DRAWN, len(points) or _DRAWN)):
                if works and number == request.n_trials:
                    break
                if points:
                    study.enqueue_trial(points[number])
                elif ledger.exhausted():
                    break
                trial = study.ask()
                try:
                    described = describe(request.space, trial, request.steps)
                    observed.by(described, f"trial {trial.number}")
                    if request.algorithm.forks:
                        check_forkable(described, request.steps, trial.number)
                    distributions |= trial.distributions
                    unreached |= described.unreached
                    works = True
                    continue
                except Rejected:  # the space pruned it
                    works = True
                except UsageError as error:
                    raise type(error)(f"{error} (tried out with {trial.params})") from error.__cause__
                except AttributeError as error:
                    if error.obj is trial and (error.name in vars(Run) or error.name in ("hp", "step", "wants_report")):
                        raise UsageError(
                            f"space was given a trial and used .{error.name}, which only a run has: are the "
                            f"arguments swapped? It is optimize(study, trainable, space, ...)"
                        ) from error
                except Exception:  # left to the study's own trials
                    logger.debug("The space was tried out with %s and raised", trial.params, exc_info=True)
                ledger.finish(trial.number, None, TrialState.FAIL)
    with patient(request.study):
        Ledger(request.study).check_compatible(distributions)
    if not request.extend:  # else a later call may extend trials to these steps
        warn_of_unreached(unreached, request.steps)
    return works


def warn_of_unreached(changes: Mapping[str, int], steps: int) -> None:
    """Warn once about each schedule that changes only after ``steps``, the maximum number of steps of a trial.

    Args:
        changes: the step of the change, by hyperparameter.
    """
    for name, step in changes.items():
        warn_once(
            f"The schedule of {name!r} changes at step {step}, which no trial reaches: they have at most {steps} steps."
            f" Raise steps, or leave the change out"
        )


def drawn(request: Request, most: int) -> list[Described]:
    """Return up to ``most`` trials that a copy of the study's sampler proposes to a study in memory, before the first
    that fails."""
    with quiet_optuna(), warnings.catch_warnings(), generators_restored():
        warnings.simplefilter("ignore")
        study = optuna.create_study(sampler=_copied(request.study.sampler), directions=request.study.directions)
        found = []
        with suppress(Exception):  # left to the study's own trials
            for _, described in described_trials(study, request.space, request.steps, most, catch=request.catch):
                found.append(described)
    return found


def _copied(sampler: optuna.samplers.BaseSampler) -> optuna.samplers.BaseSampler:
    try:
        return copy.deepcopy(sampler)
    except Exception:  # the user's own sampler may hold objects that cannot be copied
        return optuna.samplers.RandomSampler(seed=0)
