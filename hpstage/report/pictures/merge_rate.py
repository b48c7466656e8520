"""The picture of the merge rate as the search went on: steps asked, distinct, and trained."""

from __future__ import annotations

from typing import Literal

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from hpstage.report.pictures import style
from hpstage.report.views.merge_rate import MergeRateView

_HEIGHT = 3.4
_STEEP = 8.0  # a merge rate that was ever so many times what it came to is drawn on a logarithmic axis


@style.in_our_style
def draw(view: MergeRateView) -> Figure:
    """See :func:`hpstage.report.draw_merge_rate`."""
    drawn = view.moments
    if not drawn:
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
    without = ", without the pauses between calls" if view.pauses else ""
    style.label(below, x=f"{name} since the first stage began{without}", y="steps")
    return figure
