"""The stage tree for print: the layout and the colours of the interactive one."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpstage.plan.facts import TrialId
from hpstage.report.book import Book
from hpstage.report.names import plain, trial_name
from hpstage.report.pictures import style
from hpstage.report.tree.colours import BEST, FAILED, SHADES, UNMEASURED
from hpstage.report.tree.layout import ROOT, ROWS, Folded, Layout, Placed, lay_out
from hpstage.text import count_of

PALETTE = ListedColormap(colormaps["viridis"].colors[SHADES])  # type: ignore[attr-defined]

_ROW = 0.16  # inches, as long as there is room
_LOWEST = 2.0  # inches: room for the colour bar and what is written beside it
_FEWEST = 4  # rows laid out at least, so that few rows stay close together
_ABOVE, _BELOW, _LEFT, _RIGHT = 0.3, 0.45, 0.08, 1.2  # inches around the rows; the colour bar is on the right
_BAR = 2.4  # inches, length of the colour bar at most
_TICKS = 5  # of the colour bar
_NAMED = 3  # trials named at the end of a branch
_SHORTEST = 8  # characters of a label that is cut
_FARTHEST = 60.0  # points from where lines part to the label that tells of it
_GAP = 3.0  # points between a line and what is written beside it
_ALPHA = 0.5  # of the band
_EM = 0.55  # width of a character in font sizes, on average

Segment = tuple[tuple[float, float], tuple[float, float]]


@style.in_our_style
def draw_stage_tree(book: Book) -> Figure:
    """Draw each node as a line from its start to where the book's trials leave it, the best trial's path as a band.

    Labels tell what changes where lines part. Colour ranks the best metric on a line or below it; width is the number
    of trials that share the training. Of a tree of more rows than a page has, the lines with the most trials are drawn,
    and the best among equals; what is folded away is counted where it hangs.
    """
    if not book.lanes:
        return style.nothing("No trial was asked for: there is no stage tree.")
    layout = lay_out(book)
    shown = layout.fitted(ROWS)
    count = max(_FEWEST, shown.count)
    height = min(style.TALLEST, max(_LOWEST, _ABOVE + _BELOW + _ROW * count))
    figure = style.blank(height, layout=None)
    width = style.WIDTH - _LEFT - _RIGHT
    axes = figure.add_axes((_LEFT / style.WIDTH, _BELOW / height, width / style.WIDTH, 1 - (_ABOVE + _BELOW) / height))
    draw_tree(axes, layout, shown, points=72 * width, pitch=72 * (height - _ABOVE - _BELOW) / count)
    middle = (shown.count - 1) / 2
    axes.set_ylim(middle + count / 2, middle - count / 2)
    trials, nodes = count_of(len(book.trials), "trial"), count_of(len(layout.branches), "node")
    style.title(axes, f"{trials} in {nodes}" + (" (the wider, the more trials)" if len(book.trials) > 1 else ""))
    style.legend(axes, legend_of(layout, shown))
    if any(branch.rank is not None for branch in layout.branches):
        length = min(_BAR, height - _ABOVE - _BELOW)
        place = (1 - (_RIGHT - 0.15) / style.WIDTH, 1 - (_ABOVE + length) / height, 0.1 / style.WIDTH, length / height)
        draw_scale(figure.add_axes(place), layout)
    return figure


def draw_tree(axes: Axes, layout: Layout, shown: Placed, *, points: float, pitch: float) -> None:
    """Draw the branches that are shown on axes that are ``points`` wide, with rows ``pitch`` points high."""
    style.tidy(axes)
    rows, branches = shown.rows, layout.branches
    most = math.log(max(2, *(branches[i].lane.trials for i in rows)))
    thin = min(0.9, 0.12 * pitch)
    widths = {i: thin * (1 + 2.8 * math.log(branches[i].lane.trials) / most) for i in rows}
    _draw_best(axes, layout, rows, max(widths.values()) + 2.5)
    # The best on top where connectors overlap.
    ranked = sorted((i for i in rows if branches[i].parent != ROOT), key=lambda i: branches[i].rank or 0.0)
    ups: list[Segment] = [
        ((branches[i].lane.node.start, rows[branches[i].parent]), (branches[i].lane.node.start, rows[i]))
        for i in ranked
    ]
    ups += [((start, rows[s.branch]), (start, s.row)) for s in shown.stubs if s.branch != ROOT
            for start in [branches[s.branch].lane.node.start]]  # fmt: skip
    tints = [colour_of(branches[i].rank) for i in ranked] + [UNMEASURED] * (len(ups) - len(ranked))
    axes.add_collection(LineCollection(ups, colors=tints, linewidths=0.6 * thin, zorder=2))
    lines: list[Segment] = [
        ((branches[i].lane.node.start, row), (branches[i].lane.reach, row)) for i, row in rows.items()
    ]
    colours = [colour_of(branches[i].rank) for i in rows]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=[*widths.values()], zorder=3, capstyle="butt"))
    failed = _failed(layout, rows)
    if failed:
        steps, places = zip(*failed, strict=True)
        axes.scatter(steps, places, marker="x", s=0.35 * pitch**2, linewidths=1.2, color=FAILED, zorder=4)
    axes.set_yticks([])
    axes.grid(axis="x", color=style.TRACK, linewidth=0.5)
    style.counts(axes.xaxis)
    style.label(axes, x="training step")
    _write(axes, layout, shown, widths, points, min(style.TINY, 0.6 * pitch))


def colour_of(rank: float | None) -> style.Colour:
    return UNMEASURED if rank is None else PALETTE(rank)


def legend_of(layout: Layout, shown: Placed) -> list[Line2D]:
    found, book = [], layout.book
    if book.best is not None:
        label = f"best: trial {trial_name(book, book.best)}"
        found.append(Line2D([], [], color=BEST, alpha=_ALPHA, linewidth=5, label=label))
    if _failed(layout, shown.rows):
        found.append(Line2D([], [], color=FAILED, linestyle="", marker="x", markersize=4, label="failed"))
    return found


def _draw_best(axes: Axes, layout: Layout, rows: Mapping[int, int], width: float) -> None:
    book = layout.book
    if book.best is None:
        return
    trial = book.trials[book.best]
    path = [(step, rows[layout.place[n.id]]) for n, start, stop in trial.path_to(trial.asked) for step in (start, stop)]
    axes.plot(*zip(*path, strict=True), color=BEST, alpha=_ALPHA, linewidth=width, solid_capstyle="butt", zorder=1)


def _failed(layout: Layout, rows: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return where training failed first on each of the branches."""
    found: dict[int, int] = {}
    for failure in layout.book.account.failures():
        i = layout.place.get(failure.node)
        if i is not None and i in rows:
            found[i] = min(found.get(i, layout.branches[i].lane.reach), failure.step)
    return [(step, rows[i]) for i, step in found.items()]


def _write(axes: Axes, layout: Layout, shown: Placed, widths: Mapping[int, float], points: float, size: float) -> None:
    """Write what changes above the beginning of each branch and, beside the end of each row, what ends there."""
    branches = layout.branches
    most = int(0.4 * points / (size * _EM))
    labels: dict[int, list[tuple[int, str, float]]] = {row: [] for row in range(shown.count)}
    for i, row in shown.rows.items():
        labels[row].append((branches[i].lane.node.start, plain(branches[i].label, most), widths[i] / 2 + 0.8))
    ends = {row: (x, plain(text, most)) for x, row, text in _ends(layout, shown)}
    last = max(branch.lane.reach for branch in branches)
    right = float(last)  # farther, so that all that is written fits onto the axes
    for row, (x, text) in ends.items():
        width = _width(text, size) + _GAP
        right = max(right, x / (1 - width / points))
        for start, label, _ in labels[row][-1:]:
            right = max(right, start / (1 - (width + _width(label, size) + 2 * _GAP) / points))
    axes.set_xlim(-0.004 * right, right)
    axes.set_xticks([at for at in axes.xaxis.get_major_locator().tick_values(0, last) if 0 <= at <= last])
    axes.spines["bottom"].set_bounds(0, last)
    scale = points / right
    for row, changes in labels.items():
        free = 0.0  # points from the left
        for start, label, lift in changes:
            at = max(start * scale + 2, free)
            text = _cut(label, points - at, size)
            if text and at - start * scale < _FARTHEST:
                _note(axes, (start, row), text, (at - start * scale, lift), size)
                free = at + _width(text, size) + _GAP
        if row in ends:
            x, text = ends[row]
            _note(axes, (x, row), text, (max(x * scale + _GAP, free) - x * scale, 0), size)


def _note(axes: Axes, place: tuple[float, float], text: str, offset: tuple[float, float], size: float) -> None:
    axes.annotate(
        text,
        place,
        xytext=offset,
        textcoords="offset points",
        va="baseline" if offset[1] else "center_baseline",
        fontsize=size,
        color=style.INK,
        parse_math=False,
        zorder=5,
        annotation_clip=False,
    )


def _ends(layout: Layout, shown: Placed) -> list[tuple[float, int, str]]:
    """Return what is written beside the end of each row: the trials that end there, and what is folded away."""
    book, branches = layout.book, layout.branches
    ending: dict[int, list[TrialId]] = {}
    for id, leaf in layout.leaves.items():
        ending.setdefault(leaf, []).append(id)
    # Numbers of the trials of several studies would be ambiguous.
    numbered = len({book.account.plan.study_of(id) for id in book.trials}) <= 1
    found: list[tuple[float, int, str]] = []
    folded = layout.folded(shown.rows)
    continued = {branches[i].parent for i, row in shown.rows.items() if shown.rows.get(branches[i].parent) == row}
    stubs = {stub.branch for stub in shown.stubs}
    for i, row in shown.rows.items():
        parts = []
        trials = ending.get(i, [])
        if trials:
            parts.append(
                _listed([trial_name(book, id) for id in trials]) if numbered else count_of(len(trials), "trial")
            )
            values = {None if value is None else f"{value:.4g}" for value in map(layout.value_of, trials)}
            parts += [value for value in values if value is not None and len(values) == 1]
        if i in folded and i not in stubs:
            parts.append(_folded(folded[i]))
        if parts and i not in continued:
            found.append((branches[i].lane.reach, row, "  ".join(parts)))
    for stub in shown.stubs:
        found.append(
            (0 if stub.branch == ROOT else branches[stub.branch].lane.node.start, stub.row, _folded(stub.folded))
        )
    return found


def _folded(count: Folded) -> str:
    return f"+ {count_of(count.nodes, 'node')}, {count_of(count.trials, 'trial')}"


def _listed(names: Sequence[str]) -> str:
    more = f" + {len(names) - _NAMED:,}" if len(names) > _NAMED else ""
    return f"trial{'' if len(names) == 1 else 's'} {', '.join(names[:_NAMED])}{more}"


def _width(text: str, size: float) -> float:
    """The width of a text in points, about."""
    return size * sum(1.0 if unicodedata.east_asian_width(c) in "WF" else _EM for c in text)


def _cut(text: str, room: float, size: float) -> str:
    """Cut a text to ``room`` points; ``""`` where there is too little."""
    if _width(text, size) + _GAP <= room:
        return text
    kept, used = "", _GAP + size
    for c in text:
        used += _width(c, size)
        if used > room:
            break
        kept += c
    return f"{kept}\N{HORIZONTAL ELLIPSIS}" if len(kept) >= _SHORTEST else ""


def draw_scale(axes: Axes, layout: Layout) -> None:
    """Draw the colour bar: ranks, beside which stand the values that have them."""
    values = {b.rank: layout.book.measured[b.lane.node.id].value for b in layout.branches if b.rank is not None}
    ranks = sorted(values)
    last = len(ranks) - 1
    at = sorted({ranks[round(i * last / (_TICKS - 1))] for i in range(_TICKS)})
    bar = axes.figure.colorbar(ScalarMappable(Normalize(0, 1), PALETTE), cax=axes)
    bar.set_ticks(at, labels=[f"{values[rank]:.4g}" for rank in at], parse_math=False)
    bar.set_label(
        f"{plain(layout.book.metric, 24)}\nbest from here on, by rank",
        fontsize=style.SMALL,
        color=style.INK,
        parse_math=False,
    )
    axes.tick_params(labelsize=style.SMALL, labelcolor=style.INK, width=0.6, length=3)
    bar.outline.set_visible(False)
