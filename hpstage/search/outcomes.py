"""How a trial ends: its final state, metrics and figures in the study, and the warnings logged about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from typing import Literal

from optuna.trial import FrozenTrial, TrialState

from hpstage.accounting.failures import origin
from hpstage.driver.driver import Driver
from hpstage.errors.text import clean_lines
from hpstage.optuna.ledger import Ledger
from hpstage.optuna.private import is_feasible
from hpstage.plan.facts import SearchStarted, TrainingEnded, TrialEnded, UserFailure, to_metric
from hpstage.search.costs import NOISY
from hpstage.search.trials import SessionTrial

logger = logging.getLogger("hpstage")

_STATES: dict[TrialState, Literal["COMPLETE", "PRUNED", "FAIL"]] = {
    TrialState.COMPLETE: "COMPLETE",
    TrialState.PRUNED: "PRUNED",
    TrialState.FAIL: "FAIL",
}


class Outcomes:
    """Writes the ends of trials to the study and the plan, and logs those that the user did not request.

    Args:
        noisy: metrics that also depend on the machine, such as durations.
        known: names of the metrics that trials had before.
    """

    def __init__(
        self, ledger: Ledger, driver: Driver, started: SearchStarted, *, noisy: tuple[str, ...], known: Set[str]
    ) -> None:
        self._ledger = ledger
        self._driver = driver
        self._started = started
        self._noisy = noisy
        self._known = {*known}
        self._warned: dict[object, int] = {}  # the first trial that failed, or was pruned, for each reason
        self._repeated: set[object] = set()  # the reasons for which further trials are no longer logged
        self._shadowed: set[str] = set()  # metrics whose names the space uses for attributes

    def end(self, trial: SessionTrial, state: TrialState, measured: Set[str]) -> FrozenTrial | None:
        """Write the end of a trial to the study and the plan, and return the study's trial. A trial that was pruned at
        its last step is complete. A trial that somebody has set to WAITING is left as it is; return ``None`` then.

        Args:
            measured: names of the metrics that trials have.
        """
        ended = self._ledger.trial(trial.storage_id)
        if ended.state == TrialState.WAITING:
            if trial.state != TrialState.WAITING:
                logger.warning(
                    "Trial %d was set to WAITING while it was trained. It stays in the queue, for the next call; what "
                    "was trained is kept",
                    trial.number,
                )
            trial.state = TrialState.WAITING
            return None
        self._ledger.note(trial.storage_id, trial.attrs)
        planned = self._driver.plan.trials.get(trial.id)
        if planned is not None:
            # An earlier session may have requested more than it reported, and this one decided otherwise.
            steps = trial.last_reported if state != TrialState.FAIL and trial.last_reported else planned.requested
            ending = self._driver.plan.ending_on(trial.id, planned.steps)
            if ending is not None and ending.last == planned.requested:
                steps = ending.last  # training has ended itself, after the last value reported or with it
            if state == TrialState.PRUNED and trial.values is not None and trial.last_reported == planned.steps:
                state = TrialState.COMPLETE  # the algorithm had further steps in mind, but the trial has none
            shared, saved = self._driver.accounting.shared_until(planned, steps)
            attrs = {
                "hpstage:steps": steps,
                "hpstage:steps_shared": shared,
                "hpstage:gpu_seconds_saved": round(saved, 3),
            }
            self._ledger.note(trial.storage_id, attrs)
        if ended.state.is_finished():  # by somebody else: the study's values count
            trial.values = None if ended.values is None else tuple(ended.values)
        self._note_metrics(trial, measured)
        if trial.metrics is not None:
            self._ledger.constrain(trial.storage_id, trial.metrics)
        frozen = self._ledger.finish(trial.number, trial.values if state == TrialState.COMPLETE else None, state)
        trial.state = frozen.state
        self.note(trial)
        return frozen

    def note(self, trial: SessionTrial) -> None:
        """Record the end of a trial in the plan, as the study has it."""
        planned = self._driver.plan.trials.get(trial.id)
        values, frozen = trial.values, self._ledger.trial(trial.storage_id)
        if values is None and trial.state == TrialState.COMPLETE:  # reported in an earlier session
            values = tuple(frozen.values)
        self._driver.log.note(
            TrialEnded(
                study=self._started.study,
                trial=trial.id,
                state=_STATES[trial.state],
                values=None if values is None else tuple(map(to_metric, values)),
                step=0 if planned is None else planned.requested,
                at=time.time(),
                feasible=is_feasible(frozen),
            )
        )

    def _note_metrics(self, trial: SessionTrial, measured: Set[str]) -> None:
        """Write the last metrics to the trial's user attributes. An attribute of the same name stays if the space has
        set it, but not if the trial had it in the queue, since it was measured elsewhere."""
        metrics = trial.metrics or {}
        self._known |= metrics.keys() | measured
        brought = self._ledger.trial(trial.storage_id).user_attrs.keys()
        self._ledger.drop(trial.storage_id, brought & self._known - metrics.keys() - trial.noted)
        for name in sorted(trial.noted & metrics.keys() - self._shadowed):
            self._shadowed.add(name)
            logger.warning(
                "The space sets the user attribute %r, and there is a metric of the same name: the study shows the "
                "space's value (the metric is in result.trial(%d).metrics)",
                name,
                trial.number,
            )
        self._ledger.note(trial.storage_id, {name: v for name, v in metrics.items() if name not in trial.noted})
        if noisy := [name for name in metrics if name in self._noisy or name in NOISY]:
            self._ledger.note(trial.storage_id, {"hpstage:noisy": ", ".join(noisy)[:1000]})

    def warn(self, trial: SessionTrial, failure: UserFailure) -> bool:
        """Log a failure, but only the first of each exception and line of code, since one fault may fail a thousand
        trials. Return whether earlier trials failed in the same way."""
        text, cause = clean_lines(f"{failure.summary}\n{failure.traceback}"), origin(failure)
        self._warn_once(cause, trial, f"failed: {text}", "failed as trial {} did; no more of these failures are")
        return cause in self._repeated

    def warn_pruned(self, trial: SessionTrial, ending: TrainingEnded) -> None:
        """Warn that a trial was pruned because its training diverged."""
        if ending.diverged:
            text = f"is pruned: {clean_lines(ending.message)}"
            self._warn_once("diverged", trial, text, "is pruned, too, as trial {} was; no more divergences are")

    def _warn_once(self, cause: object, trial: SessionTrial, text: str, again: str) -> None:
        """Log the first trial of each cause; at the second, log that further ones are not."""
        first = self._warned.get(cause)
        if first is None:
            self._warned[cause] = trial.number
            logger.warning("Trial %d %s", trial.number, text)
        elif trial.number != first and cause not in self._repeated:
            self._repeated.add(cause)
            logger.warning("Trial %d %s logged", trial.number, again.format(first))
