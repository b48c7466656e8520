"""Prometheus metrics of the plans that drivers report to a scheduler, on Dask's ``/metrics``.

Dask serves the registry of the process, which has one collector for all schedulers of the process. A plan that several
schedulers know is exported once. All numbers are maintained while records are folded: the cost of a scrape does not
depend on the size of a plan.

Counters keep their values when a scheduler is restarted, since they are computed from the journal. A plan is exported
only after all its records were received once: Prometheus would take the growth of a counter during reading for new
events.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, get_args

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hpstage.accounting.branch_states import PIECE_STATES
from hpstage.accounting.sums import Sums
from hpstage.cluster.dashboard.board import Board, PlanView
from hpstage.cluster.dashboard.study import ACTIVITIES, Activity, StudyView
from hpstage.plan.facts import ChainOutcome, Departure, StateLoss, WorkerId

_MOST_STUDIES = 50
"""Maximum number of studies exported: the latest started. Studies with an active driver are exported in addition."""
_PLAN_LABEL = 12
"""Number of characters of a plan's name that form its label."""
_OUTCOMES: tuple[Departure | ChainOutcome, ...] = (*get_args(Departure), *get_args(ChainOutcome))
"""Outcomes of lost chains. All are exported from the start, as 0, so that the first loss is an increase."""
_LOSSES: tuple[StateLoss, ...] = get_args(StateLoss)
_FAILING: tuple[Activity, ...] = ("train", "evaluate")

_GAUGES = {
    "hpstage_stages": "Stages of the study's trials by state; reused: another study requested them first.",
    "hpstage_trials": "Trials of the study by state; open: unfinished, but the search has ended; rejected: by the "
    "space.",
    "hpstage_merge_rate": "Requested steps / unique steps.",
    "hpstage_alone_worker_seconds": "Estimated worker-seconds for the results so far without sharing.",
    "hpstage_saved_worker_seconds": "Estimated worker-seconds saved so far: without sharing - busy.",
    "hpstage_training_workers": "Workers that train for the study now.",
    "hpstage_study_drivers": "Drivers of the study; 0: it has ended, or was interrupted.",
    "hpstage_plan_merge_rate": "Requested steps / unique steps, over all studies.",
    "hpstage_plan_checkpoints": "Checkpoints that are kept.",
    "hpstage_plan_checkpoint_bytes": "Bytes of the checkpoints that are kept.",
    "hpstage_plan_drivers": "Drivers that have joined the plan and not left.",
    "hpstage_scheduler_workers": "Workers of the Dask scheduler; busy: one of the plans trains on it.",
}
_COUNTERS = {
    "hpstage_steps_asked": "Steps requested, summed over the study's trials.",
    "hpstage_steps_distinct": "Unique steps among those requested.",
    "hpstage_steps_trained": "Trained steps that the study's trials requested first.",
    "hpstage_steps_wasted": "Steps trained whose results were discarded, not counted as trained.",
    "hpstage_worker_seconds": "Busy worker-seconds (GPU-seconds) for steps that the study's trials requested first, by "
    "activity.",
    "hpstage_chains_lost": "Chains charged to the study that were lost or discarded training, by outcome.",
    "hpstage_plan_steps_asked": "Steps requested, summed over the plan's trials.",
    "hpstage_plan_steps_distinct": "Unique steps among those requested.",
    "hpstage_plan_steps_trained": "Steps trained.",
    "hpstage_plan_steps_wasted": "Steps trained whose results were discarded, not counted as trained.",
    "hpstage_plan_worker_seconds": "Busy worker-seconds (GPU-seconds) of the plan, by activity.",
    "hpstage_plan_checkpoints_lost": "Checkpoints removed, by reason: evicted under a budget, or missing or damaged "
    "when they were loaded.",
    "hpstage_plan_failures": "Exceptions in the user's code, by activity; stages given up because their workers died "
    "count as training.",
    "hpstage_plan_audits": "Audits by outcome; stopped: their workers were needed for training.",
    "hpstage_plan_audit_worker_seconds": "Worker-seconds of audits, which are charged to no trial.",
    "hpstage_plan_audited_steps": "Steps that audits have trained again.",
    "hpstage_plan_drivers_lost": "Drivers declared dead, since their lease had expired.",
    "hpstage_plan_drivers_rejoined": "Drivers that joined again after they had been declared dead.",
    "hpstage_plan_records": "Records of the journal that were received.",
}
_LABELS = {
    "hpstage_stages": "state",
    "hpstage_trials": "state",
    "hpstage_worker_seconds": "activity",
    "hpstage_chains_lost": "outcome",
    "hpstage_plan_worker_seconds": "activity",
    "hpstage_plan_checkpoints_lost": "reason",
    "hpstage_plan_failures": "activity",
    "hpstage_plan_audits": "outcome",
    "hpstage_scheduler_workers": "state",
}
"""The label of a family in addition to its study, plan or scheduler."""


def _labels(name: str) -> tuple[str, ...]:
    kind = name.split("_")[1]
    of = (kind,) if kind in ("plan", "scheduler") else ("plan", "study")
    return (*of, _LABELS[name]) if name in _LABELS else of


_Family = tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str, tuple[str, ...]]

FAMILIES: Mapping[str, _Family] = {
    **{name: (GaugeMetricFamily, text, _labels(name)) for name, text in _GAUGES.items()},
    **{name: (CounterMetricFamily, text, _labels(name)) for name, text in _COUNTERS.items()},
}
"""Kind, help and labels by name. Names of counters do not have the suffix ``_total``."""

_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()


def export(scheduler: Any, board: Board) -> None:
    """Export the plans of ``board`` as long as ``scheduler`` is alive."""
    _boards[scheduler] = board
    _COLLECTOR.register()


class _Collector(Collector):
    def __init__(self) -> None:
        self._registered = False

    def register(self) -> None:
        if not self._registered:
            self._registered = True
            REGISTRY.register(self)

    def describe(self) -> Iterable[Metric]:
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        sheet = _Sheet()
        found = [(scheduler, board) for scheduler, board in list(_boards.items()) if scheduler.status.name == "running"]
        with ExitStack() as held:
            for board in sorted({board for _, board in found}, key=id):
                held.enter_context(board.lock)
            plans: dict[str, PlanView] = {}
            for _, board in found:
                for plan, view in board.plans.items():
                    known = plans.get(plan)
                    if view.has_end and not view.problem and (known is None or known.position < view.position):
                        plans[plan] = view
            for name, view in plans.items():
                sheet.plan(name[:_PLAN_LABEL], view)
            busy = {plan: view.workers() for plan, view in plans.items()}
            driven = {plan: view.driven() for plan, view in plans.items()}
            for plan, study in _chosen(plans, driven):
                workers = len(busy[plan].get(study.name, ()))
                view, label = plans[plan], plan[:_PLAN_LABEL]
                sheet.study(label, view, study, workers, driven[plan][study.name])
            for scheduler, _ in found:
                sheet.workers(scheduler, plans.values())
        return sheet.families.values()


_COLLECTOR = _Collector()


def _families() -> dict[str, Metric]:
    return {name: kind(name, text, labels=labels) for name, (kind, text, labels) in FAMILIES.items()}


def _chosen(plans: Mapping[str, PlanView], driven: Mapping[str, Counter[str]]) -> list[tuple[str, StudyView]]:
    """Return the studies to export, with their plans."""
    found = [(plan, study) for plan, view in plans.items() for study in view.studies.values()]
    found.sort(key=lambda one: one[1].started.at, reverse=True)
    return found[:_MOST_STUDIES] + [one for one in found[_MOST_STUDIES:] if one[1].name in driven[one[0]]]


class _Sheet:
    """The families of one scrape, while they are being filled."""

    def __init__(self) -> None:
        self.families = _families()

    def _add(self, name: str, value: float, *labels: str) -> None:
        # JSON can contain half a surrogate pair, which UTF-8 cannot encode: one such name would break the whole scrape.
        self.families[name].add_metric([label.encode("utf-8", "replace").decode() for label in labels], value)  # type: ignore[attr-defined]

    def _sums(self, prefix: str, sums: Sums, *labels: str) -> None:
        for name in ("steps_asked", "steps_trained", "steps_wasted", "merge_rate"):
            self._add(f"{prefix}_{name}", getattr(sums, name), *labels)
        self._add(f"{prefix}_steps_distinct", sums.steps_unique, *labels)
        for activity in ACTIVITIES:
            self._add(f"{prefix}_worker_seconds", getattr(sums, f"{activity}_seconds"), *labels, activity)

    def plan(self, plan: str, view: PlanView) -> None:
        self._sums("hpstage_plan", view.whole(), plan)
        self._add("hpstage_plan_checkpoints", len(view.plan.kept), plan)
        self._add("hpstage_plan_checkpoint_bytes", view.plan.kept_bytes, plan)
        for reason in _LOSSES:
            self._add("hpstage_plan_checkpoints_lost", view.states_lost[reason], plan, reason)
        for activity in _FAILING:
            self._add("hpstage_plan_failures", view.failed[activity], plan, activity)
        for outcome, count in view.audits.outcomes().items():
            self._add("hpstage_plan_audits", count, plan, outcome)
        self._add("hpstage_plan_audit_worker_seconds", view.audits.seconds, plan)
        self._add("hpstage_plan_audited_steps", view.audits.steps, plan)
        self._add("hpstage_plan_drivers", len(view.plan.drivers), plan)
        self._add("hpstage_plan_drivers_lost", view.drivers_lost, plan)
        self._add("hpstage_plan_drivers_rejoined", view.drivers_rejoined, plan)
        self._add("hpstage_plan_records", view.position, plan)

    def study(self, plan: str, view: PlanView, study: StudyView, workers: int, drivers: int) -> None:
        labels = (plan, study.name)
        for state in PIECE_STATES:
            self._add("hpstage_stages", study.stages[state], *labels, state)
        unfinished = study.trials_by_end[None]
        trials = {"running": 0, "open": 0, "complete": 0, "pruned": 0, "fail": 0, "rejected": 0}
        trials |= {end.lower(): count for end, count in study.trials_by_end.items() if end is not None}
        trials["open" if study.ended else "running"] = unfinished
        for end, count in trials.items():
            self._add("hpstage_trials", count, *labels, end)
        self._sums("hpstage", study.totals, *labels)
        self._add("hpstage_alone_worker_seconds", view.alone_seconds(study.name), *labels)
        self._add("hpstage_saved_worker_seconds", view.saved_seconds(study.name), *labels)
        self._add("hpstage_training_workers", workers, *labels)
        self._add("hpstage_study_drivers", drivers, *labels)
        for outcome in dict.fromkeys((*_OUTCOMES, *study.chains_lost)):
            self._add("hpstage_chains_lost", study.chains_lost[outcome], *labels, outcome)

    def workers(self, scheduler: Any, plans: Iterable[PlanView]) -> None:
        known = set(scheduler.workers)
        busy: set[WorkerId] = set()
        for view in plans:
            for chain in view.plan.chains.values():
                driver = view.plan.drivers.get(chain.driver)
                if driver is not None and driver.pool == scheduler.id and chain.worker in known:
                    busy.add(chain.worker)
        self._add("hpstage_scheduler_workers", len(busy), scheduler.address, "busy")
        self._add("hpstage_scheduler_workers", len(known) - len(busy), scheduler.address, "idle")
