"""The panels that are text: the choice of a study, its tiles, its failures; and the panel of the stage tree."""

from __future__ import annotations

import time
from typing import Any

from bokeh.document import Document
from bokeh.models import CustomJS, InlineStyleSheet
from bokeh.models.widgets import Div, Select

from hpstage.cluster.dashboard.board import Shown
from hpstage.cluster.dashboard.feed import Feed
from hpstage.cluster.dashboard.panels import FAILED, Panel
from hpstage.cluster.dashboard.tiles import failures_html, summary_html
from hpstage.report.names import plain
from hpstage.report.tree.figure import DARK_INPUTS, TreeFigure
from hpstage.report.tree.rows import HEIGHT

LATEST = ""
"""The choice that always shows the latest study."""

_MOST_CHOICES = 50
_ROWS_SECONDS = 0.006
"""Maximum seconds of the scheduler's time to send rows of the tree at once. The rows left are sent later."""
_ADDRESS = """
const name = (key) => key.split(" ").slice(1).join(" ")
const same = cb_obj.options.filter(([key]) => key && name(key) == name(cb_obj.value)).length
const address = new URL(location)
if (cb_obj.value) address.searchParams.set("study", same > 1 ? cb_obj.value : name(cb_obj.value))
else address.searchParams.delete("study")
history.replaceState(null, "", address)
"""


class Chooser(Panel):
    """A list from which the user chooses the study to show. The page's URL is updated."""

    name: str | None = None
    """The study that the URL names, until the user chooses another one."""

    def make(self, doc: Document) -> None:
        self.root = Select(
            title="Study",
            value=LATEST,
            width=240,
            margin=(5, 15, 5, 5),
            stylesheets=[InlineStyleSheet(css=DARK_INPUTS)],
        )
        self.root.js_on_change("value", CustomJS(code=_ADDRESS))

    def chosen(self) -> str | None:
        return self.name or self.root.value or None

    def version(self, shown: Shown | None, now: float) -> object:
        return self.name, [(one.key, one.study.ended) for one in self.board.studies()[:_MOST_CHOICES]]

    def draw(self, shown: Shown | None, now: float) -> None:
        options: list[str | tuple[Any, str]] = [(LATEST, "the latest")]
        for study in self.board.studies()[:_MOST_CHOICES]:
            options.append((study.key, plain(study.study.name) + ("" if not study.study.ended else " (ended)")))
        self.root.options = options


class Summary(Panel):
    """The tiles of the study: its progress and its savings."""

    def make(self, doc: Document) -> None:
        self.root = Div(
            text="No search has started yet.", disable_math=True, sizing_mode="stretch_width",
            styles={"flex": "1 1 300px", "width": "auto", "overflow-wrap": "anywhere"},
            stylesheets=[InlineStyleSheet(css=".bk-clearfix { width: 100% }")],
        )  # fmt: skip

    def version(self, shown: Shown | None, now: float) -> object:
        # The time left counts down between two reports.
        return now if shown is not None and shown.is_driven else super().version(shown, now)

    def draw(self, shown: Shown | None, now: float) -> None:
        if shown is not None:
            text = summary_html(shown, shown.seconds_left(time.monotonic()))
            if text != self.root.text:
                self.root.text = text


class Failures(Panel):
    """The failures of the study; hidden if there are none."""

    def make(self, doc: Document) -> None:
        self.root = Div(
            text="", disable_math=True, visible=False, sizing_mode="stretch_width",
            styles={"border-left": f"4px solid {FAILED}", "padding-left": "10px", "overflow-wrap": "anywhere"},
        )  # fmt: skip

    def draw(self, shown: Shown | None, now: float) -> None:
        text = "" if shown is None else failures_html(shown)
        if text != self.root.text:
            self.root.text = text
            self.root.visible = bool(text)


class StageTree(Panel):
    """The stage tree of the study's trials, as in reports."""

    def make(self, doc: Document) -> None:
        self._tree = TreeFigure(None, doc, height=HEIGHT)
        self._feed: Feed | None = None
        self.root = self._tree.root

    def version(self, shown: Shown | None, now: float) -> object:
        return now  # chains progress between two reports

    def draw(self, shown: Shown | None, now: float) -> None:
        if shown is None or not self._tree.is_ready:
            return
        if self._feed is None or not self._feed.is_of(shown.view, shown.study):
            self._feed = Feed(shown.view, shown.study)
        rows = self._feed.rows(now, _ROWS_SECONDS)
        if rows is not None:
            self._tree.send(rows)
