"""Plots for optuna-dashboard, saved with the study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpstage.errors import UsageError
from hpstage.report.book import Book, open_book
from hpstage.report.lanes import Lane, foremost, rows
from hpstage.text import shortened

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from hpstage.search.results.result import Result

STAGE_TREE = "hpstage-stage-tree"
"""Id of the plot within the study; saving it again replaces it."""

# A storage holds a plot in pieces of 2 kB: this many lanes take about 400 kB.
_MOST = 1500
_ROW = 14  # pixels


def save_stage_tree(result: Result) -> None:
    """Save the stage tree with the study of a search, for optuna-dashboard to show on the study's page.

    Can be called again after a further search: the plot is replaced. Needs optuna-dashboard and plotly (``pip install
    "hpstage[optuna-dashboard]"``).

    Raises:
        UsageError: optuna-dashboard or plotly is not installed.
    """
    try:
        import plotly  # noqa: F401  only to check that it is installed
        from optuna_dashboard import save_plotly_graph_object
    except ImportError as error:
        raise UsageError(
            f'{error.name} is not installed: pip install "hpstage[optuna-dashboard]", and save the plot again'
        ) from None
    book = open_book(result)
    save_plotly_graph_object(result.study, stage_tree(book), graph_object_id=STAGE_TREE)


def stage_tree(book: Book) -> go.Figure:
    """Return the stage tree as a plotly figure: a line per lane, and dots for measured values, coloured by value.

    If the tree has too many lanes, those used by the most trials are drawn.
    """
    import plotly.graph_objects as go

    found, measured = book.lanes, book.measured
    lanes = foremost(found, book.ranking, _MOST)
    place = rows(lanes)
    x: list[float | None] = []
    y: list[float | None] = []
    for lane in lanes:
        row, parent = place[lane.node.id], lane.node.parent
        if parent is not None:
            x += [lane.node.start, lane.node.start]
            y += [place[parent.id], row]
        else:
            x.append(lane.node.start)
            y.append(row)
        x += [lane.reach, None]
        y += [row, None]
    dots = [
        (step, place[lane.node.id], value, _told(lane, book.metric or "", step, value))
        for lane in lanes
        for step, value in measured[lane.node.id].points
    ]
    hidden = len(found) - len(lanes)
    title = f"Stage tree: {len(book.trials):,} trials in {len(found):,} nodes"
    figure = go.Figure(
        [
            go.Scatter(x=x, y=y, mode="lines", line={"color": "#888888", "width": 1.5}, hoverinfo="skip"),
            go.Scatter(
                x=[step for step, _, _, _ in dots],
                y=[row for _, row, _, _ in dots],
                mode="markers",
                marker={
                    "size": 7,
                    "color": [value for _, _, value, _ in dots],
                    "colorscale": "Viridis",
                    "reversescale": book.maximize,  # as in the report: dark is good
                    "colorbar": {"title": {"text": _plain(book.metric or "")}},
                },
                text=[text for _, _, _, text in dots],
                hovertemplate="%{text}<extra></extra>",
            ),
        ]
    )
    figure.update_layout(
        title={"text": title + (f" ({hidden:,} with the fewest trials are left out)" if hidden else "")},
        xaxis={"title": {"text": "step"}},
        yaxis={"visible": False, "autorange": "reversed"},
        showlegend=False,
        height=max(360, 120 + _ROW * (1 + max(place.values(), default=0))),
        plot_bgcolor="white",
    )
    return figure


def _told(lane: Lane, metric: str, step: int, value: float) -> str:
    """Return the text of a dot: the value, and the hyper-parameters of the last step before it."""
    values = lane.node.hyperparameters(max(lane.node.start, step - 1))
    lines = [f"{_plain(name)} {_plain(shortened(own))}" for name, own in sorted(values.items())]
    return "<br>".join([f"step {step:,}: {_plain(metric)} {value:.6g}", *lines])


def _plain(text: str) -> str:
    """Escape text so that plotly takes it neither for its markup nor (``$``) for LaTeX."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")
