"""``audit="winner"``: retrains the best trial without sharing before ``optimize`` returns, and compares it."""

from __future__ import annotations

import logging

import optuna
from optuna.trial import FrozenTrial

from hpstage.checking.audit import audit, outcome_text
from hpstage.cluster.script import this_script
from hpstage.driver.driver import Driver
from hpstage.errors import StateError
from hpstage.execution.inline import InlineExecutor
from hpstage.plan.facts import Audited, AuditOutcome, PlanCreated, StateDiffers, TrialId, WorkerId
from hpstage.plan.log import read_header
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.segments import whole
from hpstage.search.call import Call
from hpstage.search.session import Session

logger = logging.getLogger("hpstage")

_HERE = WorkerId("driver")


def audit_winner(call: Call, driver: Driver, session: Session) -> None:
    """Retrain the best trial without sharing, in a fresh process of this host, after its result is stored.

    If it cannot be retrained (its data are gone, this host differs from the workers), log a warning.

    Raises:
        StateError: the retrained trial differs.
    """
    planned = _winner(call, driver, session)
    if planned is None:
        logger.warning("audit='winner': no trial of this search has a result, so nothing is trained again")
        return
    header: PlanCreated = read_header(driver.log.journal)
    segment = whole(planned)
    executor = call.executor
    if isinstance(executor, InlineExecutor):
        executor.put_back()  # the trainable that is sent to the fresh process must be as before training
    found = audit(
        call.request.trainable,
        segment,
        call.places.checkpoints,
        header.described,
        header.loaded,
        script={} if isinstance(executor, InlineExecutor) else this_script(),
        waiting=lambda: not call.interruption.requested,
    )
    if found.problem is not None and call.interruption.requested:
        logger.warning(
            "audit='winner' was interrupted: the result is safe, and `hpstage audit STORE --trial %s` compares it",
            planned.id,
        )
        call.interruption.check()
    text = outcome_text(segment, found, planned.id)
    at, node = call.executor.clock(), planned.node_at(segment.stop).id
    outcome: AuditOutcome = "differs" if found.apart is not None else "equal" if found.problem is None else "failed"
    audited = Audited(
        of="winner",
        worker=_HERE,
        node=node,
        start=0,
        step=segment.stop,
        at=at,
        seconds=found.seconds,
        outcome=outcome,
        compared=found.states,
        waited=found.seconds,
        message="" if found.problem is None else found.problem.text,
    )
    if found.apart is None:
        driver.log.write([audited])
        logger.log(logging.INFO if found.equal else logging.WARNING, "audit='winner': %s", text)
        return
    apart = found.apart
    ways = "as a part of the search", "alone, from scratch, in a fresh process, to audit it"
    differs = StateDiffers(planned.node_at(apart.step).id, apart.step, _HERE, at, apart.what, ways)
    driver.log.write([audited, differs])
    raise StateError(f"{text}. The result is safe in study and store, but do not build on it")


def _winner(call: Call, driver: Driver, session: Session) -> PlannedTrial | None:
    """Return the study's best trial as planned; with several objectives, the first of those that no other dominates."""
    study = call.request.study
    best = study.best_trials if len(study.directions) > 1 else _best_of_one(study)
    for trial in best:
        planned = driver.plan.trials.get(TrialId(f"{session.name}/{trial.number}"))
        if planned is not None and planned.answered:
            return planned
    return None


def _best_of_one(study: optuna.Study) -> list[FrozenTrial]:
    try:
        return [study.best_trial]
    except ValueError:  # there is no completed trial
        return []
