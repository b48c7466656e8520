"""The stage tree as a plotly figure for optuna-dashboard, in the layout and colours of the interactive tree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpstage.accounting.book import Book
from hpstage.errors.text import count_of, shortened
from hpstage.report.names import plain, trial_name
from hpstage.report.tree.colours import BEST, FAILED, SHADES, UNMEASURED
from hpstage.report.tree.labels import Written, listed, write
from hpstage.report.tree.layout import LaidBranch, Layout, Placed, lay_out

if TYPE_CHECKING:
    import plotly.graph_objects as go

_HEIGHT = 450  # pixels that optuna-dashboard gives a plot
_ROWS = 22  # number of rows that fit into it
_WIDTH = 460  # approximate width of the axis in pixels: half of a window
_FONT = 10
_INK = "#808080"  # legible on white and on black
_CLEAR = "rgba(0,0,0,0)"
_NAMED = 8  # maximum number of trials named


def plotly_stage_tree(book: Book) -> go.Figure:
    """Return the stage tree as a plotly figure: a line per branch, and dots with measured values.

    The background is transparent, to show that of the page.
    """
    import plotly.graph_objects as go

    layout = lay_out(book)
    title = f"Stage tree: {count_of(len(book.trials), 'trial')} in {len(layout.branches):,} branches"
    figure = go.Figure()
    figure.update_layout(
        title={"text": title},
        xaxis={"title": {"text": "training step"}, "gridcolor": "rgba(128,128,128,0.2)", "zeroline": False},
        yaxis={"visible": False},
        font={"color": _INK},
        showlegend=False,
        hovermode="closest",
        height=_HEIGHT,
        margin={"l": 20, "r": 20, "t": 50, "b": 45},
        modebar={"bgcolor": _CLEAR, "color": _INK},
        paper_bgcolor=_CLEAR,
        plot_bgcolor=_CLEAR,
    )
    if layout.branches:
        shown = layout.fitted(_ROWS)
        written = write(layout, shown, _WIDTH, _FONT)
        figure.add_traces(
            [
                go.Scatter(trace)
                for trace in (
                    *_lines(layout, shown),
                    _crosses(layout.failed(shown)),
                    _dots(layout, shown),
                    _texts(written, ends=False),
                    _texts(written, ends=True),
                )
            ]
        )
        figure.update_layout(
            xaxis={"range": [0, written.end]}, yaxis={"range": [max(_ROWS / 2, shown.count) - 0.3, -1]}
        )
    return figure


def _lines(layout: Layout, shown: Placed) -> list[dict[str, Any]]:
    """Return the traces of the best trial's band, the connectors, and the branches."""
    palette = _palette()
    found = []
    if path := layout.path(shown):
        x, y = zip(*path, strict=True)
        found.append(_line(x, y, BEST, 11) | {"opacity": 0.45})
    for step, top, bottom, rank in layout.joins(shown):
        found.append(_line((step, step), (top, bottom), _colour(palette, rank), 1))
    branches = layout.branches
    most = math.log(max(2, *(branches[i].branch.trials for i in shown.rows)))
    for i, row in shown.rows.items():
        branch = branches[i].branch
        width = 1.5 + 4.5 * math.log(branch.trials) / most
        found.append(_line((branch.node.start, branch.reach), (row, row), _colour(palette, branches[i].rank), width))
    return found


def _line(x: tuple[int, ...], y: tuple[int, ...], colour: str, width: float) -> dict[str, Any]:
    return {"x": x, "y": y, "mode": "lines", "line": {"color": colour, "width": width}, "hoverinfo": "skip"}


def _dots(layout: Layout, shown: Placed) -> dict[str, Any]:
    """Return the trace of dots for measured values, with the colour bar."""
    book, metric = layout.book, _plain(layout.book.metric or "")
    x, y, colours, texts = [], [], [], []
    for i, row in shown.rows.items():
        laid = layout.branches[i]
        names = _trials(layout, i)
        for step, value in book.measured[laid.branch.node.id].points:
            x.append(step)
            y.append(row)
            colours.append(laid.rank)
            texts.append(_label(laid, names, metric, step, value))
    ticks = layout.ticks()
    return {
        "x": x,
        "y": y,
        "mode": "markers",
        "marker": {
            "size": 6,
            "color": colours,
            "colorscale": [[i / 15, colour] for i, colour in enumerate(_palette(16))],
            "cmin": 0,
            "cmax": 1,
            "showscale": bool(ticks),
            "colorbar": {
                "title": {"text": metric},
                "thickness": 10,
                "tickvals": [*ticks],
                "ticktext": [f"{value:.4g}" for value in ticks.values()],
            },
        },
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
    }


def _trials(layout: Layout, i: int) -> str:
    """Return the names of the trials that pass a branch, as text."""
    inside = range(i, layout.branches[i].stop)
    return listed([trial_name(layout.book, id) for id, leaf in layout.leaves.items() if leaf in inside], _NAMED)


def _label(laid: LaidBranch, trials: str, metric: str, step: int, value: float) -> str:
    """Return the text of a dot: the value, the trials, and the hyperparameters of the last trained step."""
    values = laid.branch.node.hyperparameters(max(laid.branch.node.start, step - 1))
    lines = [f"{_plain(name)} {_plain(shortened(own))}" for name, own in sorted(values.items())]
    return "<br>".join([f"step {step:,}: {metric} {value:.6g}", _plain(trials), *lines])


def _crosses(failed: list[tuple[int, int]]) -> dict[str, Any]:
    x, y = zip(*failed, strict=True) if failed else ((), ())
    return {"x": x, "y": y, "mode": "markers", "marker": {"symbol": "x", "size": 9, "color": FAILED},
            "hovertemplate": "failed at step %{x}<extra></extra>"}  # fmt: skip


def _texts(written: Written, *, ends: bool) -> dict[str, Any]:
    notes = [note for note in written.notes if (note.above is None) == ends]
    return {
        "x": [note.step + note.right * written.end / _WIDTH for note in notes],
        "y": [note.row for note in notes],
        "mode": "text",
        "text": [_plain(note.text) for note in notes],
        "textposition": "middle right" if ends else "top right",
        "textfont": {"size": _FONT},
        "hoverinfo": "skip",
    }


def _palette(count: int = 156) -> list[str]:
    """Return ``count`` colours from the worst to the best rank."""
    from plotly.colors import get_colorscale, sample_colorscale

    first, last = SHADES.start / 255, (SHADES.stop - 1) / 255
    at = [first + (last - first) * i / (count - 1) for i in range(count)]
    return list(sample_colorscale(get_colorscale("Viridis"), at))


def _colour(palette: list[str], rank: float | None) -> str:
    return UNMEASURED if rank is None else palette[round(rank * (len(palette) - 1))]


def _plain(text: str) -> str:
    """Escape a text: plotly parses markup, and text between ``$`` as LaTeX."""
    text = plain(text, 200)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")
