"""What the picture of the savings shows: a waterfall from every trial alone to what was used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpstage.report.causes import Causes


@dataclass(frozen=True, slots=True)
class Step:
    """A bar of the waterfall: a sum (``total``), or what is added to it. Seconds."""

    label: str
    seconds: float
    total: bool = False


def steps(found: Causes) -> Iterator[Step]:
    """The waterfall. What is added leads from each total to the next, exactly; causes of no seconds are left out."""
    if found.early_stopping:
        yield Step("every trial alone, to its end", found.full, total=True)
        yield Step("stopped early", -found.early_stopping)
    yield Step("every trial alone, as asked", found.alone, total=True)
    changes = [
        Step("prefix shared with a trial of the study", -found.shared_prefix),
        Step("shared with another study", -found.other_study),
        Step("loading, were it all from disk", found.from_disk),
        Step("live states instead of disk", -found.live),
        Step("saving", found.save),
        Step("thrown away", found.wasted),
        Step("trained again", found.again),
        Step("trained without a result", found.unanswered),
        Step("measured, not mean times", found.estimates),
    ]
    yield from (change for change in changes if change.seconds)
    yield Step("used", found.used, total=True)
