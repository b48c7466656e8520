"""Savings: a waterfall by cause, from the time without sharing (100 %) to the busy time, and how workers spent it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hpstage.accounting.book import Book
from hpstage.accounting.causes import Causes, causes_of
from hpstage.accounting.timeline import EVALUATE, LOAD, SAVE, TRAIN, WASTED
from hpstage.errors.text import rate
from hpstage.report.pictures import style
from hpstage.report.pictures.timeline import COLOURS

_ROW = 0.21  # inches per cause
_BELOW = 1.1  # inches of the lower panel
_AROUND = 0.75  # inches above and below the causes
_LEAST = 0.0005  # share of the whole below which a cause is left out, since it would read 0.0%

# Distinct from the colours of the activities in the panel below.
_SUM, _SAVED, _SPENT = "#4D4D4D", style.SKY, style.VERMILION


@style.in_our_style
def draw_savings(book: Book) -> Figure:
    """Draw worker time by cause (assumptions: :mod:`hpstage.accounting.causes`) above the split by activity."""
    found = causes_of(book)
    if not found.alone and not found.used:
        return style.nothing("No trial has a result: there is nothing to compare.")
    most = max(found.alone, found.used)
    falls = [fall for fall in steps(found) if fall.total or abs(fall.seconds) > _LEAST * most]
    early = bool(found.early_stopping)
    figure = style.blank(_AROUND + _ROW * (len(falls) + early) + _BELOW)
    # Two subfigures: in one, the names of the causes would make the lower panel narrower.
    heights = [_AROUND + _ROW * (len(falls) + early), _BELOW]
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=heights).flat
    above, below = upper.subplots(), lower.subplots()
    style.tidy(above)
    style.tidy(below)
    _waterfall(above, falls, most, found.early_stopping)
    unit, name = style.time_unit(most)
    used, alone = (f"{seconds / unit:,.{_decimals(most / unit)}f}" for seconds in (found.used, found.alone))
    ratio = f": {rate(found.alone / found.used)}× less worker time" if found.used and found.alone > found.used else ""
    style.title(above, f"{used} busy worker-{name}, {alone} without sharing{ratio}")
    _split(below, found)
    return figure


def _waterfall(axes: Axes, falls: list[Step], most: float, early: float) -> None:
    """Draw a row for each step of the waterfall. ``early``: seconds saved by early stopping, which are not part of the
    requested 100 % and have a row of their own at the top."""
    unit, name = style.time_unit(most)
    decimals = _decimals(most / unit)
    level = 0.0
    reference = falls[0].seconds or most
    for row, fall in enumerate(falls):
        before = 0.0 if fall.total else level
        level = fall.seconds if fall.total else level + fall.seconds
        left, right = sorted((before, level))
        colour = _SUM if fall.total else _SAVED if fall.seconds < 0 else _SPENT
        axes.barh(row, (right - left) / unit, left=left / unit, height=0.68, color=colour, linewidth=0)
        sign = "" if fall.total else "\N{MINUS SIGN}" if fall.seconds < 0 else "+"
        text = f"{sign}{abs(fall.seconds) / unit:,.{decimals}f}  {_percent(abs(fall.seconds) / reference)}"
        axes.annotate(
            text,
            (right / unit, row),
            xytext=(3, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=style.SMALL,
            color=style.INK,
        )
        if row + 1 < len(falls):
            axes.plot([level / unit] * 2, [row, row + 1], color=style.FAINT, linewidth=0.6, zorder=0.5)
    places, labels = list(range(len(falls))), [fall.label for fall in falls]
    if early:
        places.append(-1)
        labels.append("stopped early")
        text = f"{early / unit:,.{decimals}f} more if trained to the end"
        axes.annotate(
            text,
            (0.0, -1),
            xytext=(3, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=style.SMALL,
            color=style.GREY,
        )
    axes.set_yticks(places, labels=labels)
    for place, tick in zip(places, axes.get_yticklabels(), strict=True):
        tick.set_fontweight("bold" if place >= 0 and falls[place].total else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(falls) - 0.5, -1.6 if early else -0.6)
    axes.set_xlim(0.0, 1.25 * most / unit)  # room for the figures next to the longest bar
    axes.grid(axis="x", color=style.TRACK, linewidth=0.5)
    style.label(axes, x=f"worker-{name}")


def _split(axes: Axes, found: Causes) -> None:
    """Draw the shares of the workers' activities, and of idle time between stages."""
    parts = [
        (TRAIN, found.train),
        (EVALUATE, found.evaluate),
        (LOAD, found.load),
        (SAVE, found.save),
        (WASTED, found.wasted),
        ("idle between stages", found.idle),
    ]
    whole = found.used + found.idle
    at, handles = 0.0, []
    for activity, seconds in parts:
        share = 100 * seconds / whole if whole else 0.0
        if share < 100 * _LEAST:
            continue
        colour = COLOURS.get(activity, style.TRACK)
        axes.barh(0, share, left=at, height=0.7, color=colour, linewidth=0)
        handles.append(Patch(color=colour, label=f"{activity} {_percent(share / 100)}"))
        at += share
    axes.set_xlim(0.0, 100.0)
    axes.set_ylim(0.5, -0.4)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter("{x:.0f}%")
    style.label(axes, x="share of the workers' time")
    style.legend(axes, handles, on_a_line=3)


def _decimals(most: float) -> int:
    return 2 if most < 100 else 1 if most < 1000 else 0


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


@dataclass(frozen=True, slots=True)
class Step:
    """A bar of the waterfall, in seconds: a ``total``, or a change from the bar before it."""

    label: str
    seconds: float
    total: bool = False


def steps(found: Causes) -> Iterator[Step]:
    """Yield the bars of the waterfall. The changes add up exactly to the difference of the totals; changes of zero
    seconds are omitted."""
    yield Step("without sharing, as requested", found.alone, total=True)
    changes = [
        Step("shared with a trial of the study", -found.shared_prefix),
        Step("shared with another study", -found.other_study),
        Step("trained side by side", -found.fused),
        Step("several workers per trial", found.exchange),
        Step("loading, if all from disk", found.from_disk),
        Step("live states instead of disk", -found.live),
        Step("saving", found.save),
        Step("discarded", found.wasted),
        Step("trained again", found.again),
        Step("trained without a result", found.unanswered),
        Step("measured instead of mean times", found.estimates),
    ]
    yield from (change for change in changes if change.seconds)
    yield Step("busy", found.used, total=True)
