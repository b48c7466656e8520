"""Runs a call of ``optimize`` to its result, with one driver after another if one loses its plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optuna.trial import TrialState

from hpstage.accounting.savings import savings_of
from hpstage.driver.driver import Driver
from hpstage.errors import HistoryChanged, LeaseLost
from hpstage.errors.text import clean, count_of
from hpstage.optuna.ledger import Ledger
from hpstage.plan.facts import WorkerId
from hpstage.plan.log import Facts
from hpstage.plan.plan import SearchPlan
from hpstage.search.call import Call, open_call
from hpstage.search.dry_run import try_out_space
from hpstage.search.given import Given
from hpstage.search.request import Request
from hpstage.search.results.branching import Lineage
from hpstage.search.results.result import Result
from hpstage.search.session import Session
from hpstage.search.signals import Interruption
from hpstage.search.winner import audit_winner
from hpstage.store.opening import address_of

logger = logging.getLogger("hpstage")


def searched(request: Request, interruption: Interruption, train: Callable[..., list[Any]]) -> Result:
    """Try out the space, then run the search. ``train`` trains the branches that users make of the result's trials."""
    request = replace(request, space_works=try_out_space(request))
    display = None
    if request.show_progress_bar:
        from hpstage.search.progress.displays import display_on_standard_error  # heavy: rich

        display = display_on_standard_error()
    with interruption, open_call(request, display, interruption) as call:
        result = run(call)
    place = result.store if request.store is None else request.store
    assert place is not None
    return replace(result, lineage=Lineage(request.trainable, place, request.checkpoints, train))


def run(call: Call) -> Result:
    """Run the search to its end, rejoining the plan if other drivers declared this one dead."""
    workers: list[WorkerId] = []
    while True:
        driver: Driver | None = None
        try:
            with call.join(workers) as driver:
                session = call.session(driver)
                try:
                    with call.ledger.optimize_loop():
                        session.run(call.request.workers)
                finally:
                    call.follow(session, driver, last=True)
                if driver.plan.searches[session.name].ended:
                    if call.request.audit == "winner":
                        audit_winner(call, driver, session)
                    call.interruption.completed()
                call.eviction.settle(driver.log)
                call.interruption.check()
            break
        except LeaseLost:
            logger.warning(
                "This process was suspended, or cut off from the store, for so long that others took over its "
                "work. It rejoins and continues where the search is now."
            )
        except HistoryChanged as error:
            logger.warning("%s. This process restarts the search now; you need not run it again.", error)
        if driver is not None:
            workers = driver.abandon()
    result = _result(call, driver, session)
    if not isinstance(call.request.space, Given):  # its configurations may all have results already
        _warn_of_nothing(session, call.ledger, call.request.n_trials)
    if call.deadline is not None and not result.savings.steps_trained and not driver.plan.searches[session.name].ended:
        timeout = call.request.timeout
        logger.warning("Nothing was trained before timeout=%g seconds were over; the same call continues", timeout)
    elif not result.savings.steps_trained:
        _explain_known(driver.plan, session, call.ledger, call.request.steps)
    call.progress.finish(session, driver, result.savings)
    return result


def _warn_of_nothing(session: Session, ledger: Ledger, n_trials: int | None) -> None:
    """Warn once at the end, after the failures themselves, if no trial of the search has a value."""
    if not session.trials and session.expected == 0 and n_trials != 0:
        states = [trial.state for trial in ledger.trials()]
        logger.warning(
            "Nothing was trained: study %r already has a trial for every point of its sampler's space (%d complete, %d "
            "failed). To search them again without retraining, use a new study on the same store",
            ledger.name,
            states.count(TrialState.COMPLETE),
            states.count(TrialState.FAIL),
        )
        return
    rejected = [trial.rejected for trial in session.trials if trial.rejected is not None]
    if rejected and len(rejected) == len(session.trials):
        logger.warning(
            "No trial of the search has a value: the space rejected all %d, the first of them with %s",
            len(rejected),
            clean(rejected[0].summary),
        )
        return
    reasons = [ledger.trial(trial.storage_id).user_attrs.get("hpstage:failure") for trial in session.trials]
    if reasons and all(reasons):
        kinds = len({*reasons})
        logger.warning(
            "No trial of the search has a value: all %d failed, %s%s",
            len(reasons),
            "with " if kinds == 1 else f"with {kinds} different errors, the first of them ",
            clean(reasons[0]),
        )


def _explain_known(plan: SearchPlan, session: Session, ledger: Ledger, steps: int) -> None:
    """Log why trials with results needed no training, as a warning if more steps were requested than they have."""
    ids = [trial.id for trial in session.trials]
    trials = [trial for id in ids if (trial := plan.trials.get(id)) is not None and trial.answered]
    if not trials:
        return
    known = f"Nothing was trained: the store already has the results of {count_of(len(trials), 'trial')}"
    last = max(trial.answered for trial in trials)
    if last >= steps and _repeats(session, ledger):
        logger.warning(
            "%s up to step %d, since the sampler proposed the parameters of earlier trials of study %r again: a seeded "
            "sampler starts from its seed in each process. Give it another seed, or none",
            known,
            last,
            ledger.name,
        )
    elif last >= steps:
        logger.info("%s up to step %d", known, last)
    elif any(plan.endings.ending(trial, trial.steps) for trial in trials):
        logger.warning("%s up to step %d, where the training code ended the longest (StopTraining)", known, last)
    else:
        logger.warning(
            "%s. Their schedules end at step %d, before steps=%d: add steps to each of them, as "
            "result.trial(number).then({...}) does",
            known,
            last,
            steps,
        )


def _repeats(session: Session, ledger: Ledger) -> bool:
    """Return whether each trial of the search has the parameters of one that was in the study before it."""
    trials, first = ledger.trials(), min(trial.number for trial in session.trials)
    earlier = {frozenset(trial.params.items()) for trial in trials[:first]}
    return earlier.issuperset(frozenset(trials[trial.number].params.items()) for trial in session.trials)


def _result(call: Call, driver: Driver, session: Session) -> Result:
    plan, name = driver.plan, session.name
    places = call.places
    return Result(
        study=call.request.study,
        savings=savings_of(driver.accounting, name, latest=True),
        store=places.folder,
        plan=plan,
        journal=Facts(places.journal.read()),
        search=name,
        checkpoints=places.checkpoints if places.lasting else None,
        trainable=call.request.trainable,
        address=address_of(places.journal),
    )
