"""The merge rate during the search, with requested, unique, and trained steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from hpstage.accounting.book import Book
from hpstage.accounting.history import Moment, moments
from hpstage.errors.text import rate
from hpstage.report.pictures import style

_POINTS = 1000  # of a curve: more cannot be distinguished
_HEIGHT = 3.4
_STEEP = 8.0  # the axis is logarithmic if the merge rate was ever this many times its final value


@style.in_our_style
def draw_merge_rate(book: Book) -> Figure:
    """Draw the merge rate (requested steps / unique steps) above the steps, against time."""
    drawn = _thinned(moments(book))
    if not drawn or not drawn[-1].requested:
        return style.nothing("No trial was requested: there is no merge rate.")
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
    style.title(above, f"Merge rate {rate(last.rate)}: {last.requested:,} steps requested, {last.unique:,} unique")
    # Lower curves are wider, to stay visible where they coincide. Training between two reports progresses continuously.
    curves: list[tuple[str, str, float, Literal["steps-post", "default"], list[int]]] = [
        ("requested", style.ORANGE, 2.0, "steps-post", [moment.requested for moment in drawn]),
        ("unique", style.BLUE, 1.2, "steps-post", [moment.unique for moment in drawn]),
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


def _thinned(found: Sequence[Moment]) -> list[Moment]:
    """Return the last moment of each thousandth of the time. Counts only grow, so nothing visible is lost."""
    if len(found) <= _POINTS:
        return list(found)
    span = max(found[-1].seconds, 1e-9)
    return list({int(_POINTS * moment.seconds / span): moment for moment in found}.values())
