"""Figures of audits, folded from the journal; the plan itself does not hold them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hpstage.accounting.pauses import united
from hpstage.errors.text import count_of, duration
from hpstage.plan.facts import Audited, AuditOutcome, Fact, NodeId, StateDiffers
from hpstage.plan.plan import SearchPlan


@dataclass(slots=True)
class AuditFigures:
    """The audits of a plan: of all studies, calls and drivers."""

    found: list[Audited] = field(default_factory=list)
    """The finished audits, in the order in which they ended: they have compared states, or found a difference."""
    stopped: int = 0
    """Number of audits that gave way to training."""
    failed: list[Audited] = field(default_factory=list)
    """The audits that could not retrain, for the reason in ``message``."""
    seconds: float = 0.0
    """Worker seconds of all audits, which are charged to no trial."""
    waited: float = 0.0
    """Part of these seconds, spent after the search had nothing left to train; the rest was idle time."""
    _spans: dict[NodeId, list[tuple[int, int]]] = field(default_factory=dict, repr=False)

    def add(self, fact: Audited, plan: SearchPlan) -> None:
        """Add an audit, whose states are in the plan."""
        self.seconds += fact.seconds
        self.waited += fact.waited
        if fact.outcome == "stopped":
            self.stopped += 1
        elif fact.outcome == "failed":
            self.failed.append(fact)
        else:
            self.found.append(fact)
            stop = fact.step
            for node in reversed(plan.nodes[fact.node].ancestry()):
                start = max(node.start, fact.start)
                if start < stop:
                    self._spans[node.id] = united([*self._spans.get(node.id, ()), (start, stop)])
                stop = node.start

    @property
    def steps(self) -> int:
        """Number of steps that were trained again, each counted once."""
        return sum(stop - start for spans in self._spans.values() for start, stop in spans)

    def share(self, plan: SearchPlan) -> float:
        """Return the fraction of the trained steps that audits have trained again."""
        return self.steps / plan.totals.steps_trained if plan.totals.steps_trained else 0.0

    @property
    def differences(self) -> int:
        return sum(fact.outcome == "differs" for fact in self.found)

    def outcomes(self) -> dict[AuditOutcome, int]:
        equal = len(self.found) - self.differences
        return {"equal": equal, "differs": self.differences, "stopped": self.stopped, "failed": len(self.failed)}

    def __bool__(self) -> bool:
        """Whether any audit was started."""
        return bool(self.found or self.stopped or self.failed)

    def line(self, plan: SearchPlan) -> str:
        """Return a line that summarizes the audits; empty without any."""
        if not self:
            return ""
        of = {"segment": 0, "trial": 0, "winner": 0}
        for fact in self.found:
            of[fact.of] += 1
        parts = [count_of(of[kind], noun) for kind, noun in _NOUNS.items() if of[kind]]
        if self.stopped:
            parts.append(f"{self.stopped:,} gave way to training")
        if self.failed:
            parts.append(f"{len(self.failed):,} failed")
        return f"{audited(self.share(plan), self.differences, self.seconds)}: {', '.join(parts)}"


_NOUNS = {"segment": "segment", "trial": "whole trial", "winner": "winner"}


def audited(share: float, differences: int, seconds: float) -> str:
    """Return text such as ``14 % of the steps in 0.0120 h, 0 differences``."""
    part = f"{100 * share:.0f} %" if not 0 < share < 0.005 else "less than 1 %"
    return f"{part} of the steps in {duration(seconds)}, {count_of(differences, 'difference')}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The outcomes of a plan's audits.

    Attributes:
        figures: numbers, and the audits themselves.
        differences: the states that differ when they are trained again, with the ways in which each was trained.
    """

    figures: AuditFigures
    differences: tuple[StateDiffers, ...]
    line: str
    """A one-line summary; empty if nothing was audited."""

    def __str__(self) -> str:
        return f"audited {self.line}" if self.line else "nothing was audited; `hpstage audit` does it at any time"


def audits_of(plan: SearchPlan, facts: Iterable[Fact]) -> AuditReport:
    """Return the outcomes of the audits in a plan's journal."""
    figures = AuditFigures()
    differences: list[StateDiffers] = []
    last: Audited | None = None
    for fact in facts:
        if isinstance(fact, Audited):
            figures.add(fact, plan)
            last = fact
        elif isinstance(fact, StateDiffers) and last is not None and (last.at, last.worker) == (fact.at, fact.worker):
            differences.append(fact)
    return AuditReport(figures, tuple(differences), figures.line(plan))
