"""Reads the plan's record of earlier searches of a study, to continue or extend them. Changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from optuna.trial import FrozenTrial, TrialState

from hpstage.driver.places import default_plans
from hpstage.errors import UsageError
from hpstage.optuna.ledger import Ledger
from hpstage.plan.facts import SearchStarted, TrialAdded, TrialId, TrialProposed, number_of
from hpstage.plan.plan import SearchPlan
from hpstage.plan.same_workload import differing
from hpstage.plan.searches import SearchRecord
from hpstage.schedule import Plateau, Schedule
from hpstage.schedule.space import Rejected, Space, describe, grown
from hpstage.search.plateaus import Observed

logger = logging.getLogger("hpstage")

# User attribute of a trial: the id of its plan. One study may be searched on several plans.
PLAN = "hpstage:plan"


def check_metric(record: SearchRecord, now: SearchStarted, ledger: Ledger) -> None:
    """Raise :class:`UsageError` if the last search of the study has given its trials values of another metric."""
    last, numbers = record.started, {proposed.number for proposed in record.proposed}
    searched = (trial for trial in ledger.trials() if trial.number in numbers)
    if last.metric != now.metric and any(trial.values or trial.intermediate_values for trial in searched):
        raise UsageError(
            f"the last search of study {ledger.name!r} was for metric {', '.join(last.metric)}, and this one is for "
            f"{', '.join(now.metric)}; a study compares values of one metric. Use another study: on the same store, "
            f"both share training"
        )


def check_extension(last: SearchStarted, now: SearchStarted) -> None:
    if last.steps > now.steps:
        raise UsageError(
            f"extend=True with steps={now.steps}, but the study's trials have {last.steps} steps already; extend them "
            f"to as many or more"
        )


def lengthened(
    plan: SearchPlan,
    ledger: Ledger,
    space: Space,
    steps: int,
    observed: Observed,
    catch: tuple[type[Exception], ...],
    trials: Sequence[tuple[TrialProposed, FrozenTrial]],
) -> list[TrialAdded]:
    """Return the trials of an earlier search with the schedules and lengths that the space gives them now, under the
    new maximum of ``steps``. Trials that it rejects now stay unchanged.

    Raises:
        UsageError: the space now gives a trial fewer steps, or other schedules in the steps that it had.
    """
    longer: dict[TrialId, TrialAdded] = {}
    origins: dict[TrialId, TrialId] = {}
    for proposed, frozen in trials:
        planned = plan.trials.get(proposed.trial or TrialId(""))
        if planned is None:
            continue  # a fork that could not be made
        origins[planned.id] = planned.id if proposed.extends is None else origins[proposed.extends]
        schedules, length, keep_at = dict(planned.schedules), planned.steps, planned.keep_at
        plateaus = dict(planned.plateaus)
        if length < steps:
            try:
                first = number_of(origins[planned.id])
                described = describe(space, ledger.stand_in(frozen, first), steps, catch=catch)
                described = observed.by(described, f"trial {frozen.number}")
            except UsageError:
                raise
            except Rejected as rejected:
                logger.warning("Trial %d is not extended: the space rejects it (%r)", first, rejected.cause)
                longer[planned.id] = TrialAdded(planned.id, schedules, length, keep_at, plateaus)
                continue
            except ValueError as error:  # raised by Optuna about the parameters
                raise UsageError(
                    f"trial {frozen.number} cannot be extended: the space suggests other parameters than those it was "
                    f"proposed with ({error}); extend a search with its own space"
                ) from error
            schedules, length, keep_at = dict(described.schedules), described.steps, described.keep_at
            plateaus = dict(described.plateaus)
            if length < planned.steps:
                raise UsageError(
                    f"trial {frozen.number} had {planned.steps} steps, and the space now gives it {length}; an "
                    f"extension cannot be shorter. Let space() return at least {planned.steps} steps"
                )
            for name, plateau in plateaus.items():
                if _without_end(planned.plateaus.get(name)) == _without_end(plateau):
                    schedules[name] = _held(planned.schedules[name], length)
                elif plateau.looks(planned.steps):
                    raise _another(frozen.number, name, planned.steps)  # the two plateaus may decide differently
            if proposed.fork is not None:
                schedules = grown(longer[proposed.fork.donor].schedules, proposed.fork.step, schedules)
            for name, before in planned.schedules.items():
                if name not in schedules or schedules[name].until(planned.steps) != before:
                    raise _another(frozen.number, name, planned.steps)
        longer[planned.id] = TrialAdded(planned.id, schedules, length, keep_at, plateaus)
    return list(longer.values())


def continued(now: SearchStarted, record: SearchRecord | None, ledger: Ledger) -> SearchStarted:
    """Return the call ``now``, as a continuation if it continues the earlier search ``record``. It continues any search
    that it extends, and an interrupted search that differs in ``n_trials`` and ``defaults`` at most. A continuation has
    the number of workers of the earlier search.

    If ``n_trials`` is smaller than in the earlier search, ``n_trials`` more trials finish, unfinished ones first, as in
    ``study.optimize``.
    """
    if record is None or (record.ended and not now.extends):
        return now
    before = record.started
    if now.extends:
        return msgspec.structs.replace(now, workers=before.workers)
    if set(now.differs(before)) - {"n_trials", "extends", "defaults"}:
        return now
    now = msgspec.structs.replace(now, extends=before.extends, workers=before.workers)
    called = before.n_trials if before.given is None else before.given
    if now.n_trials == called:
        now = msgspec.structs.replace(now, n_trials=before.n_trials, given=before.given)
        return now if now.same_call(before) else msgspec.structs.replace(now, continues=True)
    fewer = now.n_trials is not None and (before.n_trials is None or now.n_trials < before.n_trials)
    if not fewer:
        logger.warning(
            "The interrupted search of study %r continues with n_trials=%s instead of %s",
            now.study,
            now.n_trials,
            before.n_trials,
        )
        return msgspec.structs.replace(now, continues=True)
    assert now.n_trials is not None
    finished, open = _counted(record, ledger)
    more = max(now.n_trials, open)
    logger.warning(
        "The interrupted search of study %r continues with n_trials=%d: %d of its trials have finished, and %d more "
        "will (%d open, %d new)",
        now.study,
        now.n_trials,
        finished,
        more,
        open,
        more - open,
    )
    return msgspec.structs.replace(now, n_trials=finished + more, given=now.n_trials, continues=True)


def _counted(record: SearchRecord, ledger: Ledger) -> tuple[int, int]:
    """Return how many of a search's trials proposed by the sampler are finished, and how many are unfinished."""
    numbers: dict[TrialId | None, int] = {}
    for proposed in record.proposed:
        if proposed.fork is None and proposed.number is not None:
            numbers.pop(proposed.extends, None)
            numbers[proposed.trial] = proposed.number
    trials, recorded = ledger.trials(), {proposed.number for proposed in record.proposed}
    finished = {trial.number for trial in trials if trial.state.is_finished()} & {*numbers.values()}
    cut_off = [
        trial
        for trial in trials
        if trial.state == TrialState.RUNNING
        and trial.number not in recorded
        and trial.user_attrs.get("hpstage:search") == record.started.study
        and "hpstage:donor" not in trial.user_attrs
    ]
    return len(finished), len(numbers) - len(finished) + len(cut_off)


def _arguments(call: SearchStarted, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={getattr(call, name)}" for name in names)


def _another(trial: int, name: str, steps: int) -> UsageError:
    return UsageError(
        f"trial {trial} had another schedule of {name!r} in its first {steps} steps; an extension continues what was "
        f"trained: let space() return the same schedules up to there"
    )


def _without_end(plateau: Plateau | None) -> Plateau | None:
    return None if plateau is None else msgspec.structs.replace(plateau, length=None)


def _held(decided: Schedule, steps: int) -> Schedule:
    """Return the schedule, continued to ``steps`` with its last value, since a metric has yet to decide the rest."""
    length = decided.length
    assert length is not None
    return decided.then(decided.value(length - 1)).until(steps)


def warn_of_what_is_left(
    plan: SearchPlan, ledger: Ledger, record: SearchRecord | None, now: SearchStarted, *, listed: bool
) -> None:
    """Warn about earlier trials that a new search does not continue or reuse.

    Args:
        listed: the space lists its trials. Longer ones are then new trials, which start from saved states.
    """
    name = now.study
    if record is not None and not record.ended and record.open:
        before = record.started
        other = [name for name in before.differs(now) if name not in ("extends", "identity")]
        logger.warning(
            "Study %r has an interrupted search with %s (now %s); its unfinished trials stay as they are. Repeat its "
            "call to continue it, or add extend=True to continue its trials in this search.",
            name,
            _arguments(before, other),
            _arguments(now, other),
        )
    elif record is not None and record.started.steps < now.steps and not listed:
        logger.warning(
            "The last search of study %r had %d steps; this one proposes new trials of %d steps. Add extend=True to "
            "continue the existing trials.",
            name,
            record.started.steps,
            now.steps,
        )
    for trial in reversed(ledger.trials()):
        searched = "hpstage:search" in trial.user_attrs and trial.state not in (TrialState.FAIL, TrialState.WAITING)
        if searched and trial.user_attrs.get(PLAN) != plan.id:
            logger.warning(
                "Study %r holds trials of another plan%s: they are not reused, and the best trial of the study may be "
                "one of them. To resume them, use their store and their code; to keep them separate, use another "
                "study_name.",
                name,
                _about(trial.user_attrs.get(PLAN), plan.id),
            )
            return


def _about(other: str | None, own: str) -> str:
    """Describe another plan by its folder and its differences, if both plans are in ``.hpstage``."""
    plans = default_plans()
    if other not in plans or own not in plans:
        return " (other code, data, environment or store)"
    (folder, there), (_, here) = plans[other], plans[own]
    changes = differing(there.described, there.loaded, here.described, here.loaded)
    return f" in {folder} ({'; '.join(changes) or 'another store'})"
