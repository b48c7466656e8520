"""Trying out a space before any worker is started, and before the study has a trial."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import optuna

from hpstage.errors import UsageError
from hpstage.optuna.ledger import Ledger
from hpstage.optuna.quiet import quiet_optuna
from hpstage.schedule.space import Described, check_forkable, describe, points_of
from hpstage.search.request import Request
from hpstage.training.randomness import generators_restored
from hpstage.training.run import Run

_DRAWN = 8


def try_out_space(request: Request) -> None:
    """Describe some trials that a copy of the study's sampler proposes to a study in memory.

    What else the space may raise is left to the study's own trials: the one in memory has no history and no attributes.

    Raises:
        UsageError: the schedules or lengths of a trial contradict each other; names its parameters.
    """
    # Spaces and samplers may draw from the global generators.
    with quiet_optuna(), warnings.catch_warnings(), generators_restored():
        warnings.simplefilter("ignore")  # about the study in memory
        study = optuna.create_study(sampler=_copied(request.study.sampler), directions=request.study.directions)
        ledger, points = Ledger(study), points_of(request.space)
        with ledger.optimize_loop():
            for number in range(min(_DRAWN, len(points) or _DRAWN, request.n_trials or _DRAWN)):
                if points:
                    study.enqueue_trial(points[number])
                elif ledger.exhausted():
                    return
                trial = study.ask()
                try:
                    described = describe(request.space, trial, request.steps)
                    request.observed.by(described, f"trial {trial.number}")
                    if request.algorithm.forks:
                        check_forkable(described, request.steps, trial.number)
                except UsageError as error:
                    raise type(error)(f"{error} (tried out with {trial.params})") from error.__cause__
                except AttributeError as error:
                    if error.obj is trial and (error.name in vars(Run) or error.name in ("hp", "step", "wants_report")):
                        raise UsageError(
                            f"space was given a trial and asked it for .{error.name}, which a run has: are the "
                            f"arguments swapped? It is optimize(study, trainable, space, ...)"
                        ) from error
                    return
                except Exception:  # see above
                    return


def drawn(request: Request, most: int) -> Iterator[Described]:
    """Yield trials that a copy of the study's sampler proposes to a study in memory, up to the first that fails."""
    study = optuna.create_study(sampler=_copied(request.study.sampler), directions=request.study.directions)
    ledger, points = Ledger(study), points_of(request.space)
    for number in range(min(most, len(points) or most)):
        with quiet_optuna(), warnings.catch_warnings(), generators_restored(), ledger.optimize_loop():
            warnings.simplefilter("ignore")
            if points:
                study.enqueue_trial(points[number])
            elif ledger.exhausted():
                return
            try:
                described = describe(request.space, study.ask(), request.steps, cut=True)
            except Exception:  # see above
                return
        yield described


def _copied(sampler: optuna.samplers.BaseSampler) -> optuna.samplers.BaseSampler:
    try:
        return copy.deepcopy(sampler)
    except Exception:  # whatever the user's own sampler holds
        return optuna.samplers.RandomSampler(seed=0)
