"""The searches of studies, as recorded in the journal. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpstage.errors import InternalError
from hpstage.plan.facts import NodeId, SearchEnded, SearchStarted, TrialEnded, TrialId, TrialProposed
from hpstage.plan.nodes import Node


@dataclass(slots=True)
class SearchRecord:
    """The recorded progress of a search, from which an interrupted call resumes."""

    started: SearchStarted
    proposed: list[TrialProposed] = field(default_factory=list)
    open: dict[TrialId, None] = field(default_factory=dict)  # unfinished trials, in order
    paused: dict[TrialId, None] = field(default_factory=dict)  # unfinished trials that have all requested results
    unbegun: Counter[NodeId] = field(default_factory=Counter)  # numbers of queued trials, by their roots
    ended: bool = False

    @property
    def queued(self) -> int:
        """The number of unfinished trials whose first step is not trained, not even for others."""
        return self.unbegun.total()


class Searches(Mapping[str, SearchRecord]):
    """The latest search of each study, by the study's name."""

    def __init__(self) -> None:
        self._latest: dict[str, SearchRecord] = {}
        self.proposed: dict[TrialId, TrialProposed] = {}  # of all searches

    def begin(self, fact: SearchStarted) -> None:
        record, taken_over = SearchRecord(fact), fact.extends or fact.continues
        last = self._of(fact.study) if taken_over else record
        self._latest[fact.study] = record
        if taken_over:
            record.proposed, record.open = list(last.proposed), dict(last.open)
            record.paused, record.unbegun = dict(last.paused), last.unbegun.copy()

    def propose(self, fact: TrialProposed, root: Node | None) -> None:
        """Add a trial; ``root``: the node in which its training begins."""
        record = self._of(fact.study)
        record.proposed.append(fact)
        if fact.trial is not None:
            record.open[fact.trial] = None
            self.proposed[fact.trial] = fact
            if root is not None and not root.trained:
                record.unbegun[root.id] += 1

    def train(self, root: Node) -> None:
        """Record that training from a root has begun."""
        for record in self.values():
            record.unbegun.pop(root.id, None)

    def ask(self, study: str, trial: TrialId) -> None:
        """Record that more steps are requested of a trial than it has."""
        if study in self._latest:
            self._latest[study].paused.pop(trial, None)

    def answer(self, study: str, trial: TrialId) -> None:
        """Record that a trial has all requested results."""
        if study in self._latest and trial in self._latest[study].open:
            self._latest[study].paused[trial] = None

    def finish(self, fact: TrialEnded, root: Node | None) -> None:
        record = self._of(fact.study)
        if fact.trial in record.open:
            del record.open[fact.trial]
            record.paused.pop(fact.trial, None)
            if root is not None and record.unbegun[root.id]:
                record.unbegun[root.id] -= 1

    def end(self, fact: SearchEnded) -> None:
        record = self._of(fact.study)
        record.ended = True
        record.open.clear()
        record.paused.clear()
        record.unbegun.clear()

    @property
    def open(self) -> Iterator[TrialId]:
        """Unfinished trials, which an algorithm may train further. Trials of a search that has ended or was replaced by
        another count as finished."""
        for record in self.values():
            yield from record.open

    def identities(self) -> set[str]:
        """Return the identities of the studies."""
        return {record.started.identity for record in self.values()}

    def _of(self, study: str) -> SearchRecord:
        if study not in self._latest:
            raise InternalError(f"no search was started for study {study!r}")
        return self._latest[study]

    def __getitem__(self, study: str) -> SearchRecord:
        return self._latest[study]

    def __iter__(self) -> Iterator[str]:
        return iter(self._latest)

    def __len__(self) -> int:
        return len(self._latest)
