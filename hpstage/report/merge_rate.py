"""The picture of the merge rate as the search went on: steps asked, distinct, and trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from hpstage.events import NodeId, TrialId
from hpstage.report import style
from hpstage.report.account import began
from hpstage.report.book import Book

_POINTS = 1000  # of a curve: more cannot be told apart
_HEIGHT = 3.4
_STEEP = 8.0  # a merge rate that was ever so many times what it came to is drawn on a logarithmic axis


class Moment(msgspec.Struct, frozen=True, gc=False):
    """What had been asked of a book's trials, and trained for them, ``seconds`` after the first stage began."""

    seconds: float
    asked: int
    distinct: int
    trained: int

    @property
    def rate(self) -> float:
        return self.asked / self.distinct if self.distinct else 1.0


def moments(book: Book) -> list[Moment]:
    """The book's history: what had come to pass at each time when something was asked, or a stage was done.

    ``distinct`` counts the steps among ``asked`` that differ, whoever trains them, so that the rate at the end is the
    search's merge rate; ``trained`` those that the book's trials paid for, repetitions included. Requests have no time
    of their own: each is put at the latest time of a worker that the journal told before it.
    """
    first = min((began(charge.fact) for charge in book.charges), default=None)
    if first is None:
        first = min((ask.at for ask in book.account.asks if ask.at is not None), default=0.0)
    # (time, trial, step asked of it, steps trained)
    changes: list[tuple[float, TrialId | None, int, int]] = []
    now = first
    for ask in book.account.asks:
        # Never back: a host's clock may be wrong, and requests stay in their order.
        now = now if ask.at is None else max(now, ask.at)
        if book.is_mine(ask.trial):
            changes.append((now, ask.trial, ask.step, 0))
    changes += [(charge.fact.at, None, 0, charge.fact.step - charge.fact.start) for charge in book.charges]
    changes.sort(key=lambda change: change[0])  # stable
    reach: dict[NodeId, int] = {}
    reached: dict[TrialId, int] = {}
    asked = distinct = trained = 0
    found: list[Moment] = []
    for at, trial, step, steps in changes:
        if trial is not None:
            before = reached.get(trial, 0)
            for node, start, stop in book.trials[trial].legs(step):
                fresh = stop - reach.get(node.id, start)
                if fresh > 0:
                    distinct += fresh
                    reach[node.id] = stop
            asked += step - before
            reached[trial] = step
        trained += steps
        moment = Moment(at - first, asked, distinct, trained)
        if found and found[-1].seconds == moment.seconds:
            found[-1] = moment
        else:
            found.append(moment)
    return found


def draw_merge_rate(book: Book) -> Figure:
    """Above the merge rate (steps asked / distinct steps), below the steps, against time."""
    found = moments(book)
    if not found or not found[-1].asked:
        return style.nothing("No trial was asked for: there is no merge rate.")
    last = found[-1]
    drawn = _thinned(found)
    unit, name = style.time_unit(last.seconds)
    x = [moment.seconds / unit for moment in drawn]
    figure = style.blank(_HEIGHT)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, 1.5])
    for axes in (above, below):
        style.tidy(axes)
        axes.grid(color=style.TRACK, linewidth=0.5)
        axes.tick_params(axis="y", length=0)
    above.plot(x, [moment.rate for moment in drawn], color=style.VERMILION, drawstyle="steps-post", linewidth=1.2)
    highest = max(moment.rate for moment in drawn)
    if highest > _STEEP * last.rate:
        above.set_yscale("log")
        above.tick_params(axis="y", which="minor", length=0)
        above.yaxis.set_minor_formatter(NullFormatter())
        above.set_ylim(0.9, 1.3 * highest)
    else:
        above.set_ylim(0.0, 1.08 * highest)
    above.yaxis.set_major_formatter("{x:,.10g}")
    style.label(above, y="merge rate")
    style.title(above, f"Merge rate {last.rate:.2f}: {last.asked:,} steps asked, {last.distinct:,} distinct")
    # Wider below, for where curves are one; what is trained between two reports grows all the time.
    curves: list[tuple[str, str, float, Literal["steps-post", "default"], list[int]]] = [
        ("asked", style.ORANGE, 2.0, "steps-post", [moment.asked for moment in drawn]),
        ("distinct", style.BLUE, 1.2, "steps-post", [moment.distinct for moment in drawn]),
        ("trained", style.INK, 0.9, "default", [moment.trained for moment in drawn]),
    ]
    for label, colour, width, kind, y in curves:
        below.plot(x, y, color=colour, linewidth=width, drawstyle=kind, label=label)
    style.legend(below, [Line2D([], [], color=colour, linewidth=1.5, label=label) for label, colour, *_ in curves])
    below.set_ylim(bottom=0.0)
    style.counts(below.yaxis)
    below.set_xlim(0.0, max(x[-1], 1e-9))
    style.label(below, x=f"{name} since the first stage began", y="steps")
    return figure


def _thinned(found: Sequence[Moment]) -> list[Moment]:
    """The last of each thousandth of the time: counts only grow, and so lose nothing that could be seen."""
    if len(found) <= _POINTS:
        return list(found)
    span = max(found[-1].seconds, 1e-9)
    return list({int(_POINTS * moment.seconds / span): moment for moment in found}.values())
