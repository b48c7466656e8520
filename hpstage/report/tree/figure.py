"""The interactive stage tree as a Bokeh component: a search box, a figure, and a message with its rows.

In the browser, the scripts next to this file choose the unfolded branches and draw only their visible part, so that
trees of any size are fast. All text of users reaches the page as JSON and is shown as text.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    FixedTicker,
    HoverTool,
    InlineStyleSheet,
    LayoutDOM,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import ColorBar
from bokeh.models.widgets import TextInput
from bokeh.palettes import viridis
from bokeh.plotting import figure

from hpstage.report.tree.colours import BEST, FAILED, SHADES, UNMEASURED
from hpstage.report.tree.rows import HEIGHT, Rows

PALETTE = viridis(256)[SHADES]

_SCRIPTS = ("branches.js", "finding.js", "drawing.js", "drawer.js", "gestures.js")
DARK_INPUTS = """@media (prefers-color-scheme: dark) {
  .bk-input { background: #1d1f21; color: #dddddd; border-color: #666666 }
  .bk-input::placeholder { color: #999999 } .bk-input option { background: #1d1f21 } label { color: #dddddd } }"""
_COLUMNS = {
    "joins": ("x", "top", "bottom", "rank"),
    "band": ("xs", "ys"),
    "lines": ("x", "right", "y", "front", "rank", "width", "label", "trials", "state", "value", "node"),
    "knobs": ("x", "y", "mark"),
    "crosses": ("x", "y"),
    "chains": ("x", "y"),
    "found": ("x", "y", "size"),
    "labels": ("x", "y", "text"),
    "after": ("x", "y", "text"),
}


class TreeFigure:
    """The component; its Bokeh model is ``root``. On pages of a Bokeh server, :meth:`send` updates the rows."""

    def __init__(self, rows: Rows | None, doc: Document, *, height: int = HEIGHT) -> None:
        self._message = ColumnDataSource({"text": ["" if rows is None else rows.encoded()]})
        self._taken = ColumnDataSource({"count": [0]})  # number of messages that the browser has processed
        self._sent = 1
        self._search = TextInput(
            placeholder="Find: trial 212, lr=0.1 accuracy>0.9, best, failed", title="Find trials", max_width=420,
            sizing_mode="stretch_width", stylesheets=[InlineStyleSheet(css=DARK_INPUTS)], syncable=False,
        )  # fmt: skip
        drawn, glyphs = _figure(height)
        legend = _scale(drawn)
        args = {
            **glyphs,
            "fig": drawn,
            "legend": legend,
            "search": self._search,
            "message": self._message,
            "taken": self._taken,
            "options": {"height": height},
        }
        home = files("hpstage.report.tree")
        code = "\n".join(home.joinpath(script).read_text("utf-8") for script in _SCRIPTS)
        doc.js_on_event("document_ready", CustomJS(args=args, code=code))
        own = {"fig": drawn}
        for event in ("tap", "doubletap"):  # the second of two quick taps is only a doubletap
            drawn.js_on_event(event, CustomJS(args=own, code="fig.hpstage?.tap(cb_obj.x, cb_obj.y)"))
        for name, action in (("value_input", "type"), ("value", "next")):
            self._search.js_on_change(name, CustomJS(args=own, code=f"fig.hpstage?.{action}(cb_obj.{name})"))
        self.root: LayoutDOM = column(self._search, drawn, sizing_mode="stretch_width")
        # A server updates only models that another model refers to.
        self.root.tags = [self._message, self._taken]

    @property
    def is_ready(self) -> bool:
        """Whether the browser has processed all that was sent. Rows sent before it has opened the page are lost."""
        return bool(self._taken.data["count"][0] == self._sent)

    def send(self, rows: Rows) -> None:
        """Send new and changed rows to the browser, which must be ready."""
        self._sent += 1
        self._message.data = {"text": [rows.encoded()]}


def _figure(height: int) -> tuple[Any, dict[str, ColumnDataSource]]:
    """Return the empty figure, and the sources of its glyphs by name.

    They are not synchronized: the browser sends neither what it draws nor what the user does to the server.
    """
    drawn: Any = figure(
        height=height,
        sizing_mode="stretch_width",
        tools="pan,wheel_zoom,box_zoom,reset",
        active_drag="pan",
        toolbar_location="above",
        x_range=Range1d(start=0, end=1, syncable=False),
        y_range=Range1d(start=20, end=-1, syncable=False),
        x_axis_label="training step",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_color=None,
        lod_threshold=None,
        syncable=False,
    )
    drawn.toolbar.logo = None
    drawn.yaxis.visible = False
    drawn.ygrid.visible = False
    drawn.xgrid.grid_line_color = "#888888"
    drawn.xgrid.grid_line_alpha = 0.2
    drawn.min_border_right = 14
    own = {name: ColumnDataSource({key: [] for key in keys}, syncable=False) for name, keys in _COLUMNS.items()}
    shade = {"field": "rank", "transform": LinearColorMapper(palette=PALETTE, low=0, high=1, nan_color=UNMEASURED)}
    drawn.multi_line("xs", "ys", source=own["band"], line_width=11, line_alpha=0.35, line_color=BEST,
                     line_cap="round", line_join="round", name="band")  # fmt: skip
    drawn.segment("x", "top", "x", "bottom", source=own["joins"], line_color=shade, line_width=1)
    tracks = drawn.segment("x", "y", "right", "y", source=own["lines"], line_color="#cfcfcf", line_width="width",
                           name="tracks")  # fmt: skip
    drawn.segment("x", "y", "front", "y", source=own["lines"], line_color=shade, line_width="width")
    drawn.scatter("x", "y", source=own["chains"], marker="circle", size=8, fill_color="#222222", line_color=None,
                  name="chains")  # fmt: skip
    drawn.scatter("x", "y", source=own["crosses"], marker="x", size=11, line_width=3, color=FAILED)
    drawn.scatter("x", "y", source=own["found"], marker="circle", size="size", line_width=2.5, fill_alpha=0,
                  line_color=FAILED)  # fmt: skip
    drawn.scatter("x", "y", source=own["knobs"], marker="mark", size=8, line_color="#888888", fill_color="white",
                  name="knobs")  # fmt: skip
    for source, name, offset in (("labels", "texts", 7), ("after", "ends", 8)):
        drawn.text("x", "y", "text", source=own[source], x_offset=offset, y_offset=-2, text_baseline="bottom",
                   text_font_size="11px", text_font={"value": "system-ui, sans-serif"}, name=name)  # fmt: skip
    tips = [("node", "@node, @state"), ("steps", "@x to @right"), ("changes", "@label"), ("trials", "@trials"),
            ("best at or below", "@value")]  # fmt: skip
    drawn.add_tools(HoverTool(renderers=[tracks], line_policy="interp", tooltips=tips))
    return drawn, own


def _scale(drawn: Any) -> ColorBar:
    """Add the colour bar of ranks. The browser labels some ranks with their values of the metric."""
    values = CustomJSTickFormatter(args={"fig": drawn}, code="return fig.hpstage?.valued(tick) ?? ''", syncable=False)
    bar = ColorBar(
        color_mapper=LinearColorMapper(palette=PALETTE, low=0, high=1),
        ticker=FixedTicker(ticks=[], syncable=False),
        formatter=values,
        orientation="horizontal",
        location=(20, 0),
        width=240,
        height=7,
        padding=2,
        title_standoff=3,
        label_standoff=3,
        major_tick_in=0,
        background_fill_alpha=0.0,
        title="best at or below, by rank",
        syncable=False,
    )
    drawn.add_layout(bar, "below")
    return bar
