"""Results of a check: the ways that reach the same states, and the first difference in each of the others."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from hpstage.checking.ways import AGAIN
from hpstage.errors.text import count_of, table

Verdict = Literal["equal", "differs", "refused", "failed", "unreadable", "not tried"]
_WIDTH = 116
_PLURAL = {
    "differs": "differ",
    "refused": "are refused",
    "failed": "fail",
    "unreadable": "are unreadable",
    "not tried": "were not tried",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference in one way of training, or why that way could not be completed.

    Attributes:
        way: name of the way of training.
        verdict: "differs"; "refused" by hpstage; "failed" in the user's code.
        step: number of steps trained when it was first seen.
        fork: the step at which the way begins; 0 if it begins afresh.
        what: path of the value that differs: a tensor, a field, a metric.
        straight: content of this value straight through: a plain value, or the form and a digest.
        found: content of this value in this way.
        others: paths of other differences at that step.
        cause: the likely cause; if refused or failed, the message.
        remedy: what to do.
    """

    way: str
    verdict: Verdict
    step: int
    fork: int = 0
    what: str = ""
    straight: str = ""
    found: str = ""
    others: tuple[str, ...] = ()
    cause: str = ""
    remedy: str = ""

    @property
    def where(self) -> str:
        begun = f"begun at step {self.fork}, " if self.fork else ""
        if self.verdict == "differs" and self.step == self.fork == 0:
            return "before the first step"
        if self.verdict == "differs":
            return f"{begun}after step {self.step}"
        return f"{begun}{count_of(self.step, 'step')} trained"

    def __str__(self) -> str:
        if self.verdict != "differs":
            who = "refused by hpstage" if self.verdict == "refused" else "your code failed"
            lines = [f"{self.way}: {who} ({self.where})", *_indented(self.cause)]
            return "\n".join([*lines, *_indented(self.remedy)] if self.remedy else lines)
        lines = [f"{self.way}: first differs {self.where}", f"  {self.what}"]
        lines += [f"    {'straight through':<18}{self.straight}", f"    {'this way':<18}{self.found}"]
        if self.others:
            more = f" and {len(self.others) - 3:,} more" if len(self.others) > 3 else ""
            lines.append(f"    {'with it':<18}{', '.join(self.others[:3])}{more}")
        lines += _labelled("likely cause", self.cause) + _labelled("remedy", self.remedy)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Way:
    """One comparison, for which ``steps`` were trained in ``seconds``."""

    name: str
    verdict: Verdict
    steps: int
    seconds: float

    def cells(self) -> tuple[str, ...]:
        tried = self.verdict != "not tried"
        took = (count_of(self.steps, "step"), f"{self.seconds:.1f} s") if tried else ("", "")
        return (self.name, self.verdict, *took)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The outcome of :func:`hpstage.check`. Its string form is meant for reading.

    Attributes:
        subject: the trainable's name.
        values: values of the trial's hyperparameters at step 0.
        steps: number of steps trained straight through.
        forks: steps at which forks were made.
        compared: number of objects compared after each step.
        ways: all comparisons.
        differences: findings of the ways that are not equal; the likely cause of the others comes first.
        seconds: duration of the check.
        beside_eager: how the first steps of another numerics class than ``"eager"`` compare with eager ones.
    """

    subject: str
    values: Mapping[str, object]
    steps: int
    forks: tuple[int, ...]
    compared: int
    ways: tuple[Way, ...]
    differences: tuple[Finding, ...]
    seconds: float
    beside_eager: str = ""

    @property
    def ok(self) -> bool:
        """Whether every comparison was completed and found equal bits."""
        return not self.differences

    def as_dict(self) -> dict[str, object]:
        """Return the report as a dict for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def as_text(self, width: int | None = None) -> str:
        """Return the report as a terminal of ``width`` columns shows it."""
        lines = [table([way.cells() for way in self.ways], left=2, width=width)]
        lines += ["", self.beside_eager] if self.beside_eager else []
        compared = sum(way.steps for way in self.ways)
        end = f"{count_of(compared, 'step')} compared in {self.seconds:.0f} s"
        if self.ok:
            verdict = (
                f"{self.subject} is exact: all ways lead to the same bits, in all of {self.compared:,} values that "
                f"were compared after each step, and in all metrics."
            )
            return "\n".join([*lines, "", verdict, end])
        shown = [self.differences[0]]
        for finding in self.differences[1:]:
            if not any(_follows(finding, other) for other in shown):
                shown.append(finding)
        lines += ["", "\n\n".join(map(str, shown))]
        if len(shown) < len(self.differences):
            lines += ["", "The other differences probably have the same cause."]
        verdict = f"{self.subject} is NOT exact: {'; '.join(_counts(self.ways))}."
        return "\n".join([*lines, "", verdict, end])

    __str__ = as_text


def _follows(finding: Finding, other: Finding) -> bool:
    """Return whether a finding probably has the same cause as another, which ranks before it."""
    if finding.verdict != "differs" or other.verdict != "differs":
        return finding.cause == other.cause
    return other.way == AGAIN or finding.what == other.what or finding.cause == other.cause


def _counts(ways: tuple[Way, ...]) -> list[str]:
    counts = Counter(way.verdict for way in ways)
    return [
        f"{count} of {len(ways)} ways {_PLURAL[verdict]}" for verdict, count in counts.items() if verdict != "equal"
    ]


def _indented(text: str) -> list[str]:
    return [f"  {line}" for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH) or [""]]


def _labelled(label: str, text: str) -> list[str]:
    first, *rest = textwrap.wrap(text, _WIDTH - 22) or [""]
    return [f"    {label:<18}{first}", *(f"{'':<22}{line}" for line in rest)]
