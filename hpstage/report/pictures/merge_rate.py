"""The merge rate over the course of the search: steps asked, distinct, and trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from hpstage.plan.facts import NodeId, TrialId
from hpstage.plan.totals import merge_rate
from hpstage.report.book import Book
from hpstage.report.pictures import style
from hpstage.text import rate

_POINTS = 1000  # of a curve: more cannot be distinguished
_HEIGHT = 3.4
_STEEP = 8.0  # the axis is logarithmic if the merge rate ever exceeded its final value by this factor


@style.in_our_style
def draw_merge_rate(book: Book) -> Figure:
    """Draw the merge rate (steps asked / distinct steps) above the steps, against time."""
    drawn = _thinned(moments(book))
    if not drawn or not drawn[-1].asked:
        return style.nothing("No trial was asked for: there is no merge rate.")
    last = drawn[-1]
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
    style.title(above, f"Merge rate {rate(last.rate)}: {last.asked:,} steps asked, {last.distinct:,} distinct")
    # Lower curves are wider, to stay visible where they coincide. Training between two reports progresses continuously.
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
    without = ", without the pauses between calls" if book.pauses.gaps else ""
    style.label(below, x=f"{name} since the first stage began{without}", y="steps")
    return figure


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The steps asked of a book's trials and trained for them ``seconds`` after the first stage began, without the
    pauses between calls."""

    seconds: float
    asked: int
    distinct: int
    trained: int

    @property
    def rate(self) -> float:
        return merge_rate(self.asked, self.distinct)


def moments(book: Book) -> list[Moment]:
    """Return the book's history: its counts at each time when something was asked for or a stage finished.

    ``distinct`` counts the distinct steps among ``asked``, regardless of which study trains them, so that the final
    rate is the book's merge rate. ``trained`` counts the steps that the book's trials were charged, repetitions
    included. Requests have no time; each is placed at the latest worker time recorded in the journal before it.
    """
    first = min(book.began, default=None)
    if first is None:
        first = min((ask.at for ask in book.account.asks if ask.at is not None), default=0.0)
    asked, trained = _asked(book, first), _trained(book, first)
    found: list[Moment] = []
    steps, done = (0, 0), 0
    for seconds in sorted({*asked, *trained}):
        steps, done = asked.get(seconds, steps), trained.get(seconds, done)
        found.append(Moment(seconds, *steps, done))
    return found


def _asked(book: Book, first: float) -> dict[float, tuple[int, int]]:
    """Return the steps asked for, and the distinct ones among them, up to each time of a request."""
    reach: dict[NodeId, int] = {}
    reached: dict[TrialId, int] = {}
    asked = distinct = 0
    found: dict[float, tuple[int, int]] = {}
    now = first
    for ask in book.account.asks:
        # Monotonic: a host's clock may be wrong, and requests keep their order.
        if ask.at is not None and ask.at > now:
            now = ask.at
        trial = book.trials.get(ask.trial)
        if trial is None:
            continue
        step = min(ask.step, trial.asked)  # its training may have ended before
        for node, start, stop in trial.path_to(step):
            fresh = stop - reach.get(node.id, start)
            if fresh > 0:
                distinct += fresh
                reach[node.id] = stop
        asked += step - reached.get(ask.trial, 0)
        reached[ask.trial] = step
        found[now] = asked, distinct
    return dict(zip(book.pauses.all_elapsed(first, found), found.values(), strict=True))


def _trained(book: Book, first: float) -> dict[float, int]:
    """Return the steps trained up to each time when a stage finished."""
    facts = [charge.fact for charge in book.charges]
    times = book.pauses.all_elapsed(first, [fact.at for fact in facts])
    done = sorted(zip(times, [fact.step - fact.start for fact in facts], strict=True))
    found: dict[float, int] = {}
    trained = 0
    for at, steps in done:
        trained += steps
        found[at] = trained
    return found


def _thinned(found: Sequence[Moment]) -> list[Moment]:
    """Return the last moment of each thousandth of the time. Counts only grow, so nothing visible is lost."""
    if len(found) <= _POINTS:
        return list(found)
    span = max(found[-1].seconds, 1e-9)
    return list({int(_POINTS * moment.seconds / span): moment for moment in found}.values())
