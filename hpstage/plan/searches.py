"""The searches of studies, as recorded in the journal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hpstage.errors import InternalError
from hpstage.plan.facts import SearchEnded, SearchStarted, TrialEnded, TrialId, TrialProposed
from hpstage.plan.tally import StudyTotals


@dataclass(slots=True)
class SearchRecord:
    """The recorded progress of a search, from which an interrupted call resumes."""

    started: SearchStarted
    before: StudyTotals  # the study's totals when the search began
    paid_before: float  # seconds of its workers until then
    proposed: list[TrialProposed] = field(default_factory=list)
    open: dict[TrialId, None] = field(default_factory=dict)  # unfinished trials, in order
    ended: bool = False


class Searches(Mapping[str, SearchRecord]):
    """The latest search of each study, by the study's name."""

    def __init__(self) -> None:
        self._latest: dict[str, SearchRecord] = {}
        self.proposed: dict[TrialId, TrialProposed] = {}  # of all searches

    def begin(self, fact: SearchStarted, totals: StudyTotals, paid: float) -> None:
        record = SearchRecord(fact, totals.copy(), paid)
        last = self._of(fact.study) if fact.extends else record
        self._latest[fact.study] = record
        if fact.extends:
            record.proposed, record.open = list(last.proposed), dict(last.open)

    def propose(self, fact: TrialProposed) -> None:
        record = self._of(fact.study)
        record.proposed.append(fact)
        if fact.trial is not None:
            record.open[fact.trial] = None
            self.proposed[fact.trial] = fact

    def finish(self, fact: TrialEnded) -> None:
        self._of(fact.study).open.pop(fact.trial, None)

    def end(self, fact: SearchEnded) -> None:
        record = self._of(fact.study)
        record.ended = True
        record.open.clear()

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
