"""The interactive stage tree as a Bokeh component: its data as compact columns, a search box and a figure.

``tree.js`` decides in the browser which branches are unfolded and draws those, so that a tree of any size costs what is
on the screen. Everything that users typed reaches the page as JSON and is shown as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, CustomJS, HoverTool, LayoutDOM, LinearColorMapper, Range1d
from bokeh.models.widgets import TextInput
from bokeh.palettes import viridis
from bokeh.plotting import figure

from hpstage.plan.facts import TrialId
from hpstage.plan.nodes import PlannedTrial, State
from hpstage.report.book import Book
from hpstage.report.names import trial_name
from hpstage.report.sums import failures_of
from hpstage.report.tree.colours import BEST, FAILED, SHADES, UNMEASURED
from hpstage.report.tree.layout import Layout
from hpstage.report.tree.logs import logs_of
from hpstage.schedule.forms import Constant
from hpstage.text import shortened

PALETTE = viridis(256)[SHADES]

_ROW = 19  # pixels
_AROUND = 60  # pixels above and below the rows
_TALLEST = 3200  # pixels
_POINTS = 24  # of a curve
_TEXT = 120  # characters of a value
_TRACEBACK = 20_000  # characters, the last ones
_FAILURES = 200  # tracebacks: a fault in the user's code often fails hundreds of trials alike


def component(layout: Layout, doc: Document) -> LayoutDOM:
    """Return the tree and add it to the document, with the search box and what happens on a click."""
    data = {
        "branches": ColumnDataSource(_branches(layout)),
        "trials": ColumnDataSource(_trials(layout)),
        "failures": ColumnDataSource(_failures(layout)),
        "logs": ColumnDataSource(logs_of(layout)),
    }
    search = TextInput(
        placeholder="Find: trial 212, lr=0.1, failed", title="Find trials", sizing_mode="stretch_width", max_width=420
    )
    drawn, glyphs = _figure(layout)
    args: dict[str, Any] = {**data, **glyphs, "fig": drawn, "search": search}
    args["options"] = {
        "metric": layout.book.metric or "",
        "study": layout.book.studies[0] if len(layout.book.studies) == 1 else "",
        "row": _ROW,
        "around": _AROUND,
        "tallest": _TALLEST,
    }
    code = files("hpstage.report.tree").joinpath("tree.js").read_text("utf-8")
    doc.js_on_event("document_ready", CustomJS(args=args, code=code))
    drawn.js_on_event("tap", CustomJS(args={"fig": drawn}, code="fig.hpstage?.tap(cb_obj.x, cb_obj.y)"))
    for name, action in (("value_input", "find"), ("value", "next")):
        search.js_on_change(name, CustomJS(args={"fig": drawn}, code=f"fig.hpstage?.{action}(cb_obj.{name})"))
    root = column(search, drawn, sizing_mode="stretch_width")
    doc.add_root(root)
    return root


def _figure(layout: Layout) -> tuple[Any, dict[str, ColumnDataSource]]:
    """Return the figure without its rows and the sources that they are drawn from."""
    end = max((branch.lane.reach for branch in layout.branches), default=1)
    drawn: Any = figure(
        height=_AROUND + 3 * _ROW,
        sizing_mode="stretch_width",
        tools="pan,wheel_zoom,box_zoom,reset",
        active_drag="pan",
        toolbar_location="above",
        x_range=Range1d(start=-0.01 * end, end=1.15 * end),
        y_range=Range1d(start=3, end=-1),
        x_axis_label="training step",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_color=None,
    )
    drawn.toolbar.logo = None
    drawn.yaxis.visible = False
    drawn.ygrid.visible = False
    drawn.xgrid.grid_line_alpha = 0.25
    columns = {
        "joins": ("x", "top", "bottom", "rank"),
        "way": ("x", "y", "right", "bottom"),
        "lines": ("x", "right", "y", "rank", "width", "label", "trials", "state", "value", "node"),
        "knobs": ("x", "y", "mark"),
        "crosses": ("x", "y"),
        "found": ("x", "y"),
        "texts": ("x", "y", "text"),
        "ends": ("x", "y", "text"),
    }
    own = {name: ColumnDataSource({key: [] for key in keys}) for name, keys in columns.items()}
    shade = {"field": "rank", "transform": LinearColorMapper(palette=PALETTE, low=0, high=1, nan_color=UNMEASURED)}
    drawn.segment("x", "y", "right", "bottom", source=own["way"], line_width=11, line_alpha=0.35, line_color=BEST,
                  line_cap="butt", name="way")  # fmt: skip
    drawn.segment("x", "top", "x", "bottom", source=own["joins"], line_color=shade, line_width=1)
    lines = drawn.segment("x", "y", "right", "y", source=own["lines"], line_color=shade, line_width="width")
    drawn.scatter("x", "y", source=own["crosses"], marker="x", size=11, line_width=3, color=FAILED)
    drawn.scatter("x", "y", source=own["found"], marker="circle", size=16, line_width=2.5, fill_alpha=0,
                  line_color=FAILED)  # fmt: skip
    drawn.scatter("x", "y", source=own["knobs"], marker="mark", size=9, line_color="#777777", fill_color="white")
    for name, offset, baseline in (("texts", (6, -3), "bottom"), ("ends", (6, 0), "middle")):
        drawn.text("x", "y", "text", source=own[name], x_offset=offset[0], y_offset=offset[1], text_baseline=baseline,
                   text_font_size="11px", name=name)  # fmt: skip
    tips = [("node", "@node, @state"), ("steps", "@x to @right"), ("changes", "@label"), ("trials", "@trials"),
            ("best from here", "@value")]  # fmt: skip
    drawn.add_tools(HoverTool(renderers=[lines], line_policy="interp", tooltips=tips))
    return drawn, own


def _branches(layout: Layout) -> dict[str, list[Any]]:
    shown, measured = layout.unfolded(), layout.book.measured
    rows = layout.branches
    return {
        "node": [branch.lane.node.id for branch in rows],
        "x": [branch.lane.node.start for branch in rows],
        "right": [branch.lane.reach for branch in rows],
        "parent": [branch.parent for branch in rows],
        "stop": [branch.stop for branch in rows],
        "trials": [branch.lane.trials for branch in rows],
        "rank": [branch.rank for branch in rows],
        "value": [measured[branch.lane.node.id].value for branch in rows],
        "label": [branch.label for branch in rows],
        "state": [branch.state for branch in rows],
        "kept": [_kept(branch.lane.node.states) for branch in rows],
        "best": [i in layout.best for i in range(len(rows))],
        "shown": [i in shown for i in range(len(rows))],
    }


def _kept(states: Mapping[int, State]) -> str:
    kept = {step: state.kept for step, state in states.items() if state.kept is not None}
    return f"step {max(kept):,}: {kept[max(kept)].key}" if kept else ""


def _trials(layout: Layout) -> dict[str, list[Any]]:
    book = layout.book
    plan, seconds = book.account.plan, _seconds(book)
    table: dict[str, list[Any]] = {key: [] for key in ("name", "leaf", "state", "value", "params", "curves", "seconds")}
    for id, leaf in layout.leaves.items():
        ended, proposed = plan.ended.get(id), plan.searches.proposed.get(id)
        params = {} if proposed is None else proposed.params
        row = (
            trial_name(book, id),
            leaf,
            "running" if ended is None else "failed" if ended.state == "FAIL" else ended.state.lower(),
            layout.value_of(id),
            json.dumps({shortened(name, 200): shortened(value, _TEXT) for name, value in params.items()}),
            json.dumps(_curves(book.trials[id])),
            seconds.get(id, 0.0),
        )
        for cells, value in zip(table.values(), row, strict=True):
            cells.append(value)
    return table


def _seconds(book: Book) -> dict[TrialId, float]:
    """The worker seconds that each trial paid for."""
    found: dict[TrialId, float] = {}
    for charge in book.charges:
        found[charge.trial] = found.get(charge.trial, 0.0) + charge.seconds
    return found


def _curves(trial: PlannedTrial) -> dict[str, list[tuple[int, float]]]:
    """Sample those of a trial's schedules that are numbers and not constant."""
    found = {}
    for name, schedule in trial.schedules.items():
        pieces = [(start, form) for start, _, form in schedule.pieces() if start < trial.asked]
        if len(pieces) == 1 and isinstance(pieces[0][1], Constant):
            continue
        steps = {round(i * (trial.asked - 1) / (_POINTS - 1)) for i in range(_POINTS)}
        steps |= {step for start, _ in pieces[:_POINTS] for step in (start - 1, start) if 0 <= step < trial.asked}
        points, at = [], 0
        for step in sorted(steps):
            while at + 1 < len(pieces) and pieces[at + 1][0] <= step:
                at += 1
            value = pieces[at][1].value(step)
            if isinstance(value, int | float) and not isinstance(value, bool):
                points.append((step, float(f"{value:.5g}")))
        if points:
            found[shortened(name, 200)] = points
    return found


def _failures(layout: Layout) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {key: [] for key in ("branch", "step", "doing", "summary", "traceback")}
    for fact, _ in failures_of(layout.book):
        if fact.node not in layout.place:
            continue
        trace = fact.failure.traceback[-_TRACEBACK:] if len(table["branch"]) < _FAILURES else ""
        doing = "evaluating" if fact.evaluating else "training"
        row = (layout.place[fact.node], fact.step, doing, shortened(fact.failure.summary, 300), trace)
        for cells, value in zip(table.values(), row, strict=True):
            cells.append(value)
    return table
