"""The page's plots. Each draws one study from the board; text from users is never interpreted as HTML."""

from __future__ import annotations

import html
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from bokeh.models import (
    ColumnDataSource,
    FactorRange,
    HoverTool,
    Range1d,
)
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from distributed.dashboard.components import DashboardComponent

from hpstage.cluster.dashboard.board import Board, Shown
from hpstage.cluster.dashboard.pieces import PieceState
from hpstage.cluster.dashboard.study import curve
from hpstage.cluster.dashboard.tree import draw
from hpstage.cluster.dashboard.work import Work, work_of

Choose = Callable[[], str | None]
"""Returns the key of the study to draw; ``None``: the latest."""
Sizing = Literal["stretch_both", "stretch_width"]

# Okabe and Ito's colours, as in the report. Done pieces are subdued; current activity stands out.
COLOURS: dict[PieceState, str] = {
    "waiting": "#D9D9D9",
    "ready": "#56B4E9",
    "running": "#E69F00",
    "done": "#0072B2",
    "failed": "#D55E00",
    "reused": "#009E73",
}
_INK, _FAINT, _TRACK = "#222222", "#B5B5B5", "#ECECEC"

_SHARE = 0.02
"""Maximum share of the scheduler's time per plot: a slow plot is redrawn less often. All plots together stay below a
twentieth, so that nineteen of twenty messages are not delayed."""
_CURVES = 10
_CURVE_POINTS = 200
_RUNGS = 24
_WORKERS = 48
_WORKER_TEXT = 110


class Plot(DashboardComponent):  # type: ignore[misc]
    """Redraws when something has changed, within its share of the time."""

    def __init__(
        self,
        board: Board,
        scheduler: Any,
        *,
        choose: Choose = lambda: None,
        sizing_mode: Sizing = "stretch_both",
        height: int = 300,
    ) -> None:
        self.board = board
        self.scheduler = scheduler
        self._sizing = sizing_mode
        self.size: dict[str, Any] = {"sizing_mode": sizing_mode, "height": height}
        self._choose = choose
        self._drawn: object = None
        self._due = 0.0
        self.make()

    def update(self) -> None:
        began = time.perf_counter()
        if began < self._due:
            return
        shown = self.board.find(self._choose())
        version = self.version(shown)
        if version != self._drawn:
            self.draw(shown)
            self._drawn = version
            now = time.perf_counter()
            self._due = now + (now - began) / _SHARE

    def version(self, shown: Shown | None) -> object:
        """Return a value that changes when the plot must be redrawn."""
        return None if shown is None else (shown.key, shown.view.position)

    @abstractmethod
    def make(self) -> None:
        """Create ``root`` without content."""

    @abstractmethod
    def draw(self, shown: Shown | None) -> None: ...

    def fit(self, height: int, *, most: int) -> None:
        """Set the height that the rows need, if the layout allows it."""
        if self._sizing == "stretch_width":
            self.root.height = min(height, most)

    def figure(self, title: str, **options: Any) -> Any:
        made: Any = figure(title=title, tools="", toolbar_location=None, **self.size, **options)
        made.title.text_font_size = "13px"
        made.title.text_color = _INK
        made.grid.grid_line_color = _TRACK
        made.axis.axis_line_color = _FAINT
        made.axis.major_tick_line_color = _FAINT
        made.axis.minor_tick_line_color = None
        made.outline_line_color = None
        return made


class StageTree(Plot):
    """The stage tree of the study's trials, coloured by the state of each piece."""

    def make(self) -> None:
        self.source = ColumnDataSource(
            {name: [] for name in ("start", "stop", "row", "state", "colour", "width", "node", "trials", "values")}
        )
        self._joins = ColumnDataSource({"step": [], "top": [], "bottom": []})
        self.root = self.figure("Stage tree", x_axis_label="step", y_range=Range1d(start=1, end=-1))
        self.root.yaxis.visible = False
        self.root.ygrid.visible = False
        self.root.segment("step", "top", "step", "bottom", source=self._joins, line_color=_FAINT, line_width=1)
        pieces = self.root.segment(
            "start", "row", "stop", "row", source=self.source, line_color="colour", line_width="width"
        )
        self.root.add_tools(
            HoverTool(
                renderers=[pieces],
                line_policy="interp",
                tooltips=[
                    ("steps", "@start to @stop, @state"),
                    ("trials", "@trials"),
                    ("node", "@node"),
                    ("with", "@values"),
                ],
            )
        )
        # An invisible point for each state, so that the legend always has all of them.
        for state, colour in COLOURS.items():
            text = "trained for another study" if state == "reused" else state
            self.root.rect([math.nan], [math.nan], 1, 1, color=colour, legend_label=text)
        self.root.legend.orientation = "horizontal"
        self.root.legend.location = "left"
        self.root.legend.background_fill_alpha = 0
        self.root.legend.border_line_color = None
        self.root.legend.padding = 0
        self.root.legend.spacing = 14
        self.root.legend.label_text_font_size = "11px"
        self.root.legend.glyph_height = 12
        self.root.legend.glyph_width = 12
        self.root.add_layout(self.root.legend[0], "above")

    def draw(self, shown: Shown | None) -> None:
        if shown is None:
            return
        tree = draw(shown.view, shown.study)
        thick = max(2.0, min(9.0, 420 / max(1, tree.rows)))
        pieces = tree.pieces
        # Replaced as a whole: a new trial moves the rows of many others, so a patch could keep little.
        self.source.data = {
            "start": [piece.start for piece in pieces],
            "stop": [piece.stop for piece in pieces],
            "row": [piece.row for piece in pieces],
            "state": [piece.state for piece in pieces],
            "colour": [COLOURS[piece.state] for piece in pieces],
            "width": [thick if piece.state != "waiting" else 0.6 * thick for piece in pieces],
            "node": [piece.node for piece in pieces],
            "trials": [piece.trials for piece in pieces],
            "values": [piece.values for piece in pieces],
        }
        self._joins.data = {
            "step": [step for step, _, _ in tree.joins],
            "top": [top for _, top, _ in tree.joins],
            "bottom": [bottom for _, _, bottom in tree.joins],
        }
        self.root.y_range.update(start=tree.rows - 0.3, end=-0.7)
        self.fit(110 + 16 * tree.rows, most=640)
        title = f"Stage tree: {len(shown.study.trials):,} trials in {len(shown.study.lanes):,} nodes"
        if tree.hidden:
            title += f"; {tree.hidden:,} nodes that few trials go along are not drawn"
        self.root.title.text = title


class Workers(Plot):
    """The current training of each worker, for all studies on the cluster."""

    def make(self) -> None:
        self.source = ColumnDataSource({name: [] for name in ("worker", "done", "colour", "text")})
        self.root = self.figure("Workers", y_range=FactorRange(factors=[]), x_range=Range1d(start=0, end=1))
        self.root.xaxis.visible = False
        self.root.yaxis.axis_line_color = None
        self.root.grid.visible = False
        self.root.hbar(y="worker", left=0, right=1, height=0.8, source=self.source, color=_TRACK)
        self.root.hbar(
            y="worker", left=0, right="done", height=0.8, source=self.source, fill_color="colour", line_color=None
        )
        self.root.text(
            x=0.005, y="worker", text="text", source=self.source,
            text_baseline="middle", text_font_size="11px", text_color=_INK,
        )  # fmt: skip

    def version(self, shown: Shown | None) -> object:
        return time.time()  # chains progress between two reports

    def draw(self, shown: Shown | None) -> None:
        works = work_of(self.board, self.scheduler.id, time.time())
        names = {address: str(worker.name) for address, worker in self.scheduler.workers.items()}
        counts = list(names.values())
        busy = [address for address in names if address in works]
        rows = sorted(names, key=lambda address: address not in works)[:_WORKERS]
        rows.sort(key=lambda address: (len(names[address]), names[address]))  # "10" after "9"
        labels = [name if counts.count(name) == 1 else address for address in rows for name in [names[address]]]
        found = [works.get(address) for address in rows]
        self.root.y_range.factors = labels[::-1]
        self.source.data = {
            "worker": labels,
            "done": [0.0 if work is None else work.done for work in found],
            "colour": [COLOURS["running"]] * len(rows),
            "text": [_say(work) for work in found],
        }
        self.fit(40 + 26 * max(1, len(rows)), most=640)
        title = f"Workers: {len(busy)} of {len(names)} train"
        self.root.title.text = title + (f"; {_WORKERS} are shown" if len(names) > _WORKERS else "")


def _say(work: Work | None) -> str:
    if work is None:
        return "idle"
    text = f"{work.study}: step {work.step:,}, to {work.stop:,}; {work.values}"
    return text if len(text) <= _WORKER_TEXT else text[: _WORKER_TEXT - 1] + "…"


class Savings(Plot):
    """Worker-seconds spent for the results so far, compared to those that each trial alone would have taken."""

    def make(self) -> None:
        self.source = ColumnDataSource({"at": [], "alone": [], "spent": [], "top": []})
        self.root = self.figure("Savings", x_axis_label="seconds since the search began", y_axis_label="worker-seconds")
        self.root.varea("at", "spent", "top", source=self.source, color=COLOURS["reused"], alpha=0.15)
        for name, colour, text in (
            ("alone", _FAINT, "each trial alone (estimated)"),
            ("spent", COLOURS["done"], "spent"),
        ):
            self.root.line("at", name, source=self.source, color=colour, line_width=2, legend_label=text)
        self.root.legend.location = "top_left"
        self.root.legend.background_fill_alpha = 0
        self.root.legend.border_line_color = None
        self.root.legend.label_text_font_size = "11px"
        self.root.yaxis.formatter.use_scientific = False

    def draw(self, shown: Shown | None) -> None:
        if shown is None:
            return
        points = shown.study.history.points
        self.source.data = {
            "at": [point[0] for point in points],
            "alone": [point[1] for point in points],
            "spent": [point[2] for point in points],
            "top": [max(point[1], point[2]) for point in points],
        }
        alone, totals = shown.seconds_alone, shown.study.totals
        self.root.title.text = (
            f"Savings: {seconds(alone - totals.worker_seconds)} of {seconds(alone)}, merge rate {totals.merge_rate:.2f}"
        )


class Metrics(Plot):
    """The metric of the best trials by step, over all results."""

    def make(self) -> None:
        self.source = ColumnDataSource({"steps": [], "values": [], "trial": [], "value": [], "colour": []})
        self._results = ColumnDataSource({"step": [], "value": []})
        self.root = self.figure("Metric", x_axis_label="step")
        self.root.scatter("step", "value", source=self._results, size=5, color=_FAINT, line_color=None, alpha=0.6)
        lines = self.root.multi_line(
            "steps", "values", source=self.source, line_color="colour", line_width=2, hover_line_width=4
        )
        self.root.add_tools(HoverTool(renderers=[lines], tooltips=[("trial", "@trial"), ("value", "@value{0.0000}")]))

    def draw(self, shown: Shown | None) -> None:
        if shown is None:
            return
        study, metric = shown.study, shown.study.started.metric[0]
        best = study.best(_CURVES)
        curves = [
            _thinned(curve(shown.view.plan.trials[result.trial], metric, result.step), _CURVE_POINTS) for result in best
        ]
        order = range(len(best) - 1, -1, -1)  # the best last, on top
        self.source.data = {
            "steps": [[step for step, _ in curves[i]] for i in order],
            "values": [[value for _, value in curves[i]] for i in order],
            "trial": [best[i].trial for i in order],
            "value": [best[i].value for i in order],
            "colour": [COLOURS["failed"] if i == 0 else COLOURS["done"] if i < 3 else "#9CC3DE" for i in order],
        }
        self._results.data = {
            "step": [result.step for result in study.results],
            "value": [result.value for result in study.results],
        }
        self.root.yaxis.axis_label = metric
        self.root.title.text = "Metric of the best trials" + (
            f"; best {best[0].value:.5g}, of trial {best[0].trial.rpartition('/')[2]}" if best else ""
        )


def _thinned(points: Sequence[tuple[int, float]], most: int) -> Sequence[tuple[int, float]]:
    if len(points) <= most:
        return points
    return [*points[:: -(-len(points) // (most - 1))], points[-1]]


class Rungs(Plot):
    """The number of trials asked for at each step, and of those evaluated there."""

    def make(self) -> None:
        self.source = ColumnDataSource({name: [] for name in ("step", "asked", "told", "best", "text")})
        self.root = self.figure("Rungs", x_range=FactorRange(factors=[]), x_axis_label="step", y_axis_label="trials")
        self.root.y_range.start = 0
        self.root.xgrid.visible = False
        self.root.vbar(
            "step", top="asked", width=0.7, source=self.source, color=COLOURS["waiting"], legend_label="asked"
        )
        bars = self.root.vbar(
            "step", top="told", width=0.7, source=self.source, color=COLOURS["done"], legend_label="evaluated"
        )
        self.root.legend.border_line_color = None
        self.root.legend.label_text_font_size = "11px"
        self.root.add_tools(
            HoverTool(
                renderers=[bars],
                tooltips=[("step", "@step"), ("evaluated", "@told of @asked"), ("best", "@best")],
            )
        )

    def draw(self, shown: Shown | None) -> None:
        if shown is None:
            return
        rungs = shown.study.rungs
        # For a search without rungs, which may ask at any step, the steps with the most trials asked.
        most = sorted(rungs, key=lambda step: (-rungs[step].asked, step))[:_RUNGS]
        steps = sorted(most)
        self.root.x_range.factors = [str(step) for step in steps]
        best = [rungs[step].best for step in steps]
        self.source.data = {
            "step": [str(step) for step in steps],
            "asked": [rungs[step].asked for step in steps],
            "told": [rungs[step].told for step in steps],
            "best": ["none" if value is None else f"{value:.5g}" for value in best],
            "text": [f"{rungs[step].told:,}" for step in steps],
        }
        hidden = len(rungs) - len(steps)
        self.root.title.text = "Rungs" + (f"; {hidden:,} further ones are not drawn" if hidden else "")


class Summary(Plot):
    """The key figures of the study."""

    def make(self) -> None:
        self.source = None
        self.root = Div(
            text="No search has started yet.",
            disable_math=True,
            sizing_mode="stretch_width",
            styles={"font-size": "14px", "color": _INK},
        )

    def version(self, shown: Shown | None) -> object:
        return None if shown is None else (super().version(shown), shown.view.is_driven(shown.study.name))

    def draw(self, shown: Shown | None) -> None:
        if shown is not None:
            self.root.text = summary(shown)


_NAME = 40
"""Maximum number of characters of a study's name in the summary."""


def summary(shown: Shown) -> str:
    """Return the key figures of the study as HTML."""
    study, view, totals = shown.study, shown.view, shown.study.totals
    trials = len(study.trials)
    over = trials - study.trials_by_end[None]
    failed = study.trials_by_end["FAIL"]
    if view.problem:
        state = "cannot be followed any more: " + view.problem
    elif study.ended:
        state = "ended"
    else:
        state = "running" if view.is_driven(study.name) else "interrupted"
    best = study.best(1)
    facts = [
        ("study", study.name if len(study.name) <= _NAME else study.name[: _NAME - 1] + "…"),
        ("", state),
        ("algorithm", study.started.algorithm),
        ("trials", f"{over:,} of {trials:,} over" + (f", {failed:,} failed" if failed else "")),
        ("best", f"{study.started.metric[0]} {best[0].value:.5g}" if best else "none yet"),
        ("steps", f"{totals.steps_asked:,} asked, {totals.steps_unique:,} distinct, {totals.steps_trained:,} trained"),
        ("merge rate", f"{totals.merge_rate:.2f}"),
        ("spent", seconds(totals.worker_seconds)),
        ("saved so far", seconds(shown.seconds_alone - totals.worker_seconds)),
    ]
    cells = "".join(
        f"<span style='margin-right:1.6em; white-space:nowrap'><span style='color:#777'>{name}</span> "
        f"<b>{html.escape(value)}</b></span> "
        for name, value in facts
    )
    return f"<div style='line-height:1.7'>{cells}</div>"


def seconds(value: float) -> str:
    """Format worker-seconds for display."""
    if abs(value) < 600:
        return f"{round(value, 1) + 0.0:.1f} s"  # never -0.0
    return f"{value / 60:.1f} min" if abs(value) < 7200 else f"{value / 3600:.1f} h"


PLOTS: dict[str, type[Plot]] = {
    "tree": StageTree,
    "workers": Workers,
    "savings": Savings,
    "metrics": Metrics,
    "rungs": Rungs,
    "summary": Summary,
}
