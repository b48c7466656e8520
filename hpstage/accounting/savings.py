"""The cost of a search, and that of its trials without sharing. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

from hpstage.accounting.accounting import Accounting
from hpstage.accounting.audits import audited
from hpstage.accounting.bound import ONE_CHAIN, Speeds, lower_bound, measured_speeds, tree_work
from hpstage.accounting.pauses import Pauses
from hpstage.accounting.payments import rounded
from hpstage.accounting.sums import Merged
from hpstage.errors.text import aligned, allocated_time, count_of, duration, rate, size
from hpstage.plan.facts import NodeId
from hpstage.plan.nodes import PlannedTrial, first_walked
from hpstage.plan.plan import SearchPlan


@dataclass(frozen=True, slots=True)
class Savings:
    """The cost of a search, with and without sharing. Seconds are worker seconds.

    ``worker_seconds_alone`` is an estimate from the same run: all steps of each trial at the mean measured seconds per
    step of the nodes on its path, and one mean evaluation per target. It excludes loading and saving, so that
    ``saved_seconds`` is conservative.
    """

    trials: int
    steps_asked: int
    """Steps that the algorithm requested, over all trials."""
    steps_unique: int
    """Unique steps among those requested: the steps that a perfect stage tree trains."""
    steps_trained: int
    """Steps trained for this search (fewer than unique if others had trained some, or if it was interrupted)."""
    steps_shared: int
    """Unique steps that were trained before this search, or for other searches."""
    steps_wasted: int
    failed: int
    """Number of failed trials."""
    merge_rate: float
    """The merge rate of this search's trials (:func:`hpstage.accounting.sums.merge_rate`). Status, page, metrics and
    reports show that of all the study's searches, which differs if there were several."""
    cost_weighted_merge_rate: float
    worker_seconds: float
    worker_seconds_alone: float
    paid_seconds: float
    """Seconds for which workers were present, idle or not (:mod:`hpstage.accounting.presence`)."""
    train_seconds: float
    evaluate_seconds: float
    load_seconds: float
    save_seconds: float
    wasted_seconds: float
    fused_seconds: float
    """Saved by training siblings side by side on a worker (``numerics = "stacked"``); part of the time saved."""
    exchange_seconds: float
    """Additional training time because several workers trained a trial together; part of the time used."""
    critical_path_seconds: float
    """Training and evaluation time of the longest trial, which more workers cannot shorten."""
    lower_bound_seconds: float | None
    """Lower bound on the makespan of the same work (:mod:`hpstage.accounting.bound`). ``None`` for a call that resumed
    an interrupted one or found states in the store, since it had less to do."""
    kept: int
    """Number of checkpoints of the whole plan at the end of the search."""
    kept_bytes: int
    """Size of these checkpoints."""
    makespan: float
    """Seconds from the start of the first stage to the last report, on the workers' clock. For a search that was
    interrupted and resumed, over all its calls, without the pauses in between."""
    workers: int
    frozen_batches: int = 0
    """Batches of all trials to which frozen layers were to be applied (:class:`hpstage.plan.facts.FrozenWork`)."""
    frozen_skipped: int = 0
    """Batches of these for which a sibling or an earlier step had computed the result."""
    frozen_seconds: float = 0.0
    """Estimated seconds that this saved. Those saved by siblings are in ``fused_seconds``, too; the others are in no
    other figure, since the seconds without sharing are measured in the same run."""
    audited_share: float = 0.0
    """Fraction of the whole plan's trained steps that audits have trained again."""
    audit_seconds: float = 0.0
    """Worker seconds of these audits, which are charged to no trial."""
    audit_differences: int = 0
    """Number of these audits that have found a difference."""

    @property
    def less_training(self) -> str:
        """The merge rate as a phrase, ``2.94× less training: 490 of 1,440 steps``; empty if nothing is shared."""
        if self.steps_asked <= self.steps_unique:
            return ""
        return f"{rate(self.merge_rate)}× less training: {self.steps_unique:,} of {self.steps_asked:,} steps"

    @property
    def could_share(self) -> bool:
        """Whether there was anything to share: a single trial without steps trained before has nothing."""
        return self.trials > 1 or self.steps_shared > 0

    @property
    def saved_seconds(self) -> float:
        return self.worker_seconds_alone - self.worker_seconds

    @property
    def gpu_hours_used(self) -> float:
        return self.worker_seconds / 3600

    @property
    def gpu_hours_alone(self) -> float:
        return self.worker_seconds_alone / 3600

    @property
    def gpu_hours_saved(self) -> float:
        return self.saved_seconds / 3600

    def _elsewhere(self) -> str:
        return f" ({self.steps_shared:,} before or for other searches)" if self.steps_shared else ""

    def _made_in(self) -> str:
        if self.worker_seconds and not self.makespan:
            return "none: other searches' workers have trained all of it"
        return f"{duration(self.makespan)} on {count_of(self.workers, 'worker')}"

    def _saved(self) -> str:
        lost = -self.saved_seconds
        if lost <= 0:
            return duration(self.saved_seconds)
        extra = {
            "loading states": self.load_seconds,
            "saving states": self.save_seconds,
            "lost training and verification": self.wasted_seconds,
            "the exchange of workers": self.exchange_seconds,
        }
        most = max(extra, key=extra.__getitem__)
        if not extra[most]:
            return "nothing"
        return f"nothing: {duration(lost)} more; {most} took {duration(extra[most])}"

    def as_dict(self) -> dict[str, float | None]:
        names = [field.name for field in fields(self)]
        return {name: getattr(self, name) for name in [*names, "saved_seconds"]}

    def rows(self) -> list[tuple[str, str]]:
        """Return the names and values that are shown."""
        rows = [
            ("trials", f"{self.trials}"),
            ("steps requested", f"{self.steps_asked:,}"),
            ("unique steps", f"{self.steps_unique:,}"),
            ("steps trained", f"{self.steps_trained:,}{self._elsewhere()}"),
            ("busy worker time", duration(self.worker_seconds)),
            ("checkpoints kept", f"{self.kept} ({size(self.kept_bytes)})"),
            ("makespan", self._made_in()),
        ]
        if self.could_share:
            rows.insert(4, ("merge rate", f"{rate(self.merge_rate)} (by cost {rate(self.cost_weighted_merge_rate)})"))
            rows[6:6] = [("without sharing", duration(self.worker_seconds_alone)), ("saved", self._saved())]
        if self.paid_seconds:
            at = [name for name, _ in rows].index("busy worker time") + 1
            rows.insert(at, ("allocated worker time", allocated_time(self.paid_seconds, self.worker_seconds)))
        if self.fused_seconds:
            rows.insert(-2, ("saved by fusing siblings", duration(self.fused_seconds)))
        if self.audit_seconds:
            rows.insert(-2, ("audited", audited(self.audited_share, self.audit_differences, self.audit_seconds)))
        if self.exchange_seconds:
            rows.insert(-2, ("exchange of workers", duration(self.exchange_seconds)))
        if skipped := skipped_work(self.frozen_batches, self.frozen_skipped, self.frozen_seconds):
            rows.insert(-2, ("frozen layers skipped", skipped))
        if self.failed:
            rows.insert(1, ("failed", f"{self.failed}"))
        return rows

    def __str__(self) -> str:
        return aligned(self.rows())


def skipped_work(batches: int, skipped: int, seconds: float) -> str:
    """Return text such as ``1,234 of 2,000 batches (61.7%), about 34.1 s``; empty if no layer is frozen."""
    if not batches:
        return ""
    return f"{skipped:,} of {batches:,} batches ({skipped / batches:.1%}), about {duration(seconds)}"


def answered_steps(planned: PlannedTrial) -> list[int]:
    """Return the trial's targets that have a result, in order."""
    found = []
    for step in sorted(planned.targets):
        state = planned.node_at(step).state(step)
        if state is not None and state.metrics is not None:
            found.append(step)
    return found


def seconds_alone(plan: SearchPlan, planned: PlannedTrial, answered: Sequence[int] | None = None) -> float:
    """Estimate the trial's worker seconds without sharing, as far as known: see :class:`Savings`. O(segments).

    A trial that failed or is still running counts up to its last answered target.

    Args:
        answered: its :func:`answered_steps`, if already known.
    """
    if answered is None:
        answered = answered_steps(planned)
    if not answered:
        return 0.0
    own = 0.0
    for node, start, stop in planned.path_to(answered[-1]):
        own += (stop - start) * plan.step_seconds(node)
    return own + plan.totals.average_evaluate_seconds * len(answered)


def shortest_makespan(
    plan: SearchPlan,
    trials: Iterable[PlannedTrial],
    workers: int,
    fleet: Speeds = ONE_CHAIN,
    *,
    sharing: bool = True,
) -> float:
    """Return a lower bound on the makespan of these trials up to their last results, at the plan's measured seconds.

    ``sharing=False``: as if each trial were trained by itself.
    """
    answered = [(trial, steps) for trial in trials if (steps := answered_steps(trial))]
    trees = [answered] if sharing else [[trial] for trial in answered]
    evaluate_seconds = plan.totals.average_evaluate_seconds
    work = (tree_work(tree, plan.step_seconds, evaluate_seconds, fleet) for tree in trees)
    return lower_bound(chain.from_iterable(work), workers)


def savings_of(accounting: Accounting, study: str | None = None, *, latest: bool = False) -> Savings:
    """Return the savings of a study, or of all studies of a plan, over all their calls.

    A study is charged for what its trials requested first, and so not for steps that another study had already trained;
    ``steps_trained`` counts the steps that it is charged for.

    Args:
        latest: only count the study's last search: what was charged to its trials since it began.
    """
    plan = accounting.plan
    tally = None if study is None else accounting.tallies[study]
    took = accounting.whole() if tally is None else tally.sums
    allocated, drivers = accounting.presence.seconds(study), accounting.presence.drivers_of(study)
    if study is not None and tally is not None and latest:
        took, allocated = took.since(tally.before), allocated - tally.allocated_before
        drivers -= tally.drivers_before
        proposed = plan.searches[study].proposed
        # A trial that another one extends counts as part of that one.
        ids = {fact.trial for fact in proposed if fact.trial is not None} - {fact.extends for fact in proposed}
    else:
        ids = {id for id in (*plan.trials, *plan.ended) if study is None or plan.study_of(id) == study}
    trials = [trial for id, trial in plan.trials.items() if id in ids]
    owns = [rounded(seconds_alone(plan, trial)) for trial in trials]
    together = merged(plan, trials)
    workers = accounting.presence.most(None if study is None else drivers)
    calls = [call for driver, call in accounting.calls.items() if study is None or driver in drivers]
    first, last = min((call.first for call in calls), default=0.0), max((call.last for call in calls), default=0.0)
    fleet = measured_speeds(accounting, workers)
    return Savings(
        trials=len(trials),
        failed=sum(id in plan.ended and plan.ended[id].state == "FAIL" for id in ids),
        lower_bound_seconds=shortest_makespan(plan, trials, max(1, workers), fleet)
        if took.steps_trained >= together.steps_unique > 0 and _is_whole(accounting, study, len(drivers), latest=latest)
        else None,
        steps_asked=together.steps_asked,
        steps_unique=together.steps_unique,
        steps_trained=took.steps_trained,
        steps_shared=max(0, together.steps_done - took.steps_trained),
        steps_wasted=took.steps_wasted,
        merge_rate=together.rate,
        cost_weighted_merge_rate=together.cost_weighted_rate,
        worker_seconds=took.worker_seconds,
        worker_seconds_alone=math.fsum(owns),
        paid_seconds=allocated,
        train_seconds=took.train_seconds,
        evaluate_seconds=took.evaluate_seconds,
        load_seconds=took.load_seconds,
        save_seconds=took.save_seconds,
        wasted_seconds=took.wasted_seconds,
        fused_seconds=took.fused_seconds,
        exchange_seconds=took.exchange_seconds,
        critical_path_seconds=max(owns, default=0.0),
        kept=len(plan.kept),
        kept_bytes=plan.kept_bytes,
        makespan=Pauses((call.first, call.last) for call in calls).elapsed(first, last),
        workers=workers,
        frozen_batches=took.frozen_batches,
        frozen_skipped=took.frozen_skipped,
        frozen_seconds=took.frozen_seconds,
        audited_share=accounting.audits.share(plan),
        audit_seconds=accounting.audits.seconds,
        audit_differences=accounting.audits.differences,
    )


def _is_whole(accounting: Accounting, study: str | None, drivers: int, *, latest: bool) -> bool:
    """Whether all the work was done from the beginning, in one call of a search: then no schedule of it is shorter than
    the bound."""
    if latest:
        return drivers == 1
    plan = accounting.plan
    studies = {*map(plan.study_of, plan.trials), *plan.searches} if study is None else {study}
    return len(studies) == 1 and not any(accounting.tallies[name].before.steps_trained for name in studies)


def merged(plan: SearchPlan, trials: Iterable[PlannedTrial] | None = None) -> Merged:
    """Return the training that these trials (by default all) request, with and without repetitions. O(their segments
    and the states on these)."""
    found, reach = Merged(), dict[NodeId, int]()
    for trial in plan.trials.values() if trials is None else trials:
        path = trial.path_to(trial.requested)
        for node, start, stop in path:
            found.steps_asked += stop - start
            found.seconds_requested += (stop - start) * plan.step_seconds(node)
        for node, start, stop in first_walked(path, reach):
            found.steps_unique += stop - start
            found.seconds_unique += (stop - start) * plan.step_seconds(node)
            done = max((step for step, state in node.states.items() if state.is_known), default=0)
            found.steps_done += max(0, min(stop, done) - start)
    return found
