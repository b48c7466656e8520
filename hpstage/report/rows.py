"""The figures behind a report, as rows: trials, and stages trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optuna.trial import FrozenTrial, TrialState

from hpstage.events import Fact, NodeId, SearchStarted, StateReached, WorkerId
from hpstage.nodes import PlannedTrial
from hpstage.report.account import began, values_of
from hpstage.schedule import Scalar

if TYPE_CHECKING:
    from hpstage.result import Result


@dataclass(frozen=True, slots=True)
class SearchFacts:
    """A search as the journal tells it: how it was started, and all that happened from there on.

    On a plan that several searches use at the same time, what the others did meanwhile is among the facts, as it is
    among the savings: stages belong to no single search.
    """

    started: SearchStarted | None
    facts: tuple[Fact, ...]


def search_of(result: Result) -> SearchFacts:
    """The study's latest search; the whole journal if it holds none (a plan that was driven without a study)."""
    journal = result.journal
    for position in reversed(range(len(journal))):
        fact = journal[position]
        if isinstance(fact, SearchStarted) and fact.study == (result.search or result.study.study_name):
            return SearchFacts(fact, journal[position:])
    return SearchFacts(None, journal)


def best_of(result: Result) -> FrozenTrial | None:
    """The study's best trial, if any has been completed; none of a study with several objectives."""
    if len(result.study.directions) > 1:
        return None
    completed = result.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return result.study.best_trial if completed else None


def planned(result: Result) -> dict[int, PlannedTrial]:
    """The study's trials that are in the plan, by their number."""
    found = {}
    for trial in result.study.get_trials(deepcopy=False):
        known = result.plan.trials.get(result.trial_id(trial.number))
        if known is not None:
            found[trial.number] = known
    return found


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial of the study. Of the steps that were asked of it, ``steps_shared`` had been asked of another trial
    before, and ``steps_new`` had not: summed over all trials of a plan, they are its unique steps."""

    number: int
    state: str
    values: tuple[float, ...] | None
    steps_asked: int
    steps_shared: int
    steps_new: int
    params: Mapping[str, object]

    def as_dict(self) -> dict[str, object]:
        values = self.values or (None,)
        # Named as in Optuna's trials_dataframe().
        names = ["value"] if len(values) == 1 else [f"values_{i}" for i in range(len(values))]
        figures = {
            "number": self.number,
            "state": self.state,
            **dict(zip(names, values, strict=True)),
            "steps_asked": self.steps_asked,
            "steps_shared": self.steps_shared,
            "steps_new": self.steps_new,
        }
        return figures | {f"params_{name}": value for name, value in self.params.items()}


def trial_rows(result: Result) -> list[TrialRow]:
    """A row per trial of the study, in the order of their numbers."""
    known = planned(result)
    rows = []
    for trial in result.study.get_trials(deepcopy=False):
        mine = known.get(trial.number)
        rows.append(
            TrialRow(
                number=trial.number,
                state=trial.state.name,
                values=None if trial.values is None else tuple(trial.values),
                steps_asked=0 if mine is None else mine.asked,
                steps_shared=0 if mine is None else mine.shared,
                steps_new=0 if mine is None else mine.asked - mine.shared,
                params=dict(trial.params),
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class StageRow:
    """Steps ``[start, stop)`` of a node as one worker trained them, and what was done at ``stop``.

    ``began`` counts seconds from the first stage's beginning. A row without steps is a kept state that was evaluated.
    ``values`` are the hyper-parameters at ``start``.
    """

    node: NodeId
    parent: NodeId | None
    start: int
    stop: int
    steps: int
    seconds_per_step: float | None
    train_seconds: float
    load_seconds: float
    evaluate_seconds: float
    save_seconds: float
    began: float
    worker: WorkerId
    source: str | None
    values: Mapping[str, Scalar]

    def as_dict(self) -> dict[str, object]:
        figures = {name: getattr(self, name) for name in self.__slots__ if name != "values"}
        return figures | {f"hp_{name}": value for name, value in self.values.items()}


def stage_rows(result: Result, search: SearchFacts) -> list[StageRow]:
    """A row per stage that the search trained, in the order of the journal: its sums are the search's totals."""
    return list(_stages(result, [fact for fact in search.facts if isinstance(fact, StateReached)]))


def _stages(result: Result, reached: list[StateReached]) -> Iterator[StageRow]:
    first = min((began(fact) for fact in reached), default=0.0)
    for fact in reached:
        node = result.plan.nodes[fact.node]
        steps = fact.step - fact.start
        yield StageRow(
            node=node.id,
            parent=None if node.parent is None else node.parent.id,
            start=fact.start,
            stop=fact.step,
            steps=steps,
            seconds_per_step=fact.train_seconds / steps if steps else None,
            train_seconds=fact.train_seconds,
            load_seconds=fact.load_seconds,
            evaluate_seconds=fact.evaluate_seconds,
            save_seconds=fact.save_seconds,
            began=began(fact) - first,
            worker=fact.worker,
            source=fact.source,
            values=values_of(node, fact),
        )
