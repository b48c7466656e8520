"""The base class of the page's panels, each of which draws one study, and the screen that draws them together."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from bokeh.document import Document
from bokeh.models import CustomJS
from bokeh.plotting import figure

from hpstage.cluster.dashboard.board import Board, Shown

Choose = Callable[[], str | None]
"""Returns the key or name of the study to draw; ``None``: the latest."""
Sizing = Literal["stretch_both", "stretch_width"]

# Okabe and Ito's colours, as in the report.
BEST, GOOD, OTHER, FAILED, SPENT, SAVED = "#E69F00", "#0072B2", "#7FB3D9", "#D55E00", "#0072B2", "#009E73"
MIDDLE = "#888888"
"""The colour of lines and grids: visible on white and on black."""

_SHARE = 0.05
"""Maximum share of the scheduler's time for a page. A page that is slow to draw is drawn less often."""


class Panel(ABC):
    """A part of the page. ``root``: its Bokeh model; ``figures``: figures that follow the browser's light or dark
    colours."""

    root: Any

    def __init__(
        self, board: Board, scheduler: Any, doc: Document, *, sizing_mode: Sizing = "stretch_both", height: int = 300
    ) -> None:
        self.board = board
        self.scheduler = scheduler
        self.figures: list[Any] = []
        self.size: dict[str, Any] = {"sizing_mode": sizing_mode, "height": height}
        self._drawn: object = None
        self.make(doc)

    def show(self, shown: Shown | None, now: float) -> None:
        """Draw a study as it is at the time ``now``, if something has changed."""
        version = self.version(shown, now)
        if version != self._drawn:
            self.draw(shown, now)
            self._drawn = version

    def version(self, shown: Shown | None, now: float) -> object:
        """Return a value that changes when the panel must be drawn again."""
        return None if shown is None else (shown.key, shown.view.position)

    @abstractmethod
    def make(self, doc: Document) -> None:
        """Create ``root`` without content."""

    @abstractmethod
    def draw(self, shown: Shown | None, now: float) -> None: ...

    def figure(self, title: str, **options: Any) -> Any:
        made: Any = figure(
            title=title,
            tools="",
            toolbar_location=None,
            background_fill_alpha=0,
            border_fill_alpha=0,
            **self.size,
            **options,
        )
        made.title.text_font_size = "13px"
        made.grid.grid_line_color = MIDDLE
        made.grid.grid_line_alpha = 0.2
        made.axis.axis_line_color = MIDDLE
        made.axis.major_tick_line_color = MIDDLE
        made.axis.minor_tick_line_color = None
        made.outline_line_color = None
        made.min_border_right = 12
        self.figures.append(made)
        return made

    @staticmethod
    def style_legend(made: Any, location: str) -> None:
        made.legend.location = location
        made.legend.background_fill_alpha = 0
        made.legend.border_line_color = None
        made.legend.label_text_font_size = "11px"


class Screen:
    """The panels of one document. They are drawn together, and so always show the same moment."""

    def __init__(self, board: Board, panels: Sequence[Panel], choose: Choose) -> None:
        self._board = board
        self._panels = panels
        self._choose = choose
        self._due = 0.0

    def update(self) -> None:
        """Draw all panels, if the page has not used up its share of the scheduler's time."""
        self._board.drawn = time.monotonic()
        if time.perf_counter() >= self._due:
            self.draw()

    def draw(self) -> None:
        began, now = time.perf_counter(), time.time()
        shown = self._board.find(self._choose())
        for panel in self._panels:
            panel.show(shown, now)
        over = time.perf_counter()
        self._due = over + (over - began) / _SHARE

    def follow_colours(self, doc: Document) -> None:
        """Adapt the figures to the browser's preference for light or dark, whenever it changes."""
        figures = [made for panel in self._panels for made in panel.figures]
        if figures:
            doc.js_on_event("document_ready", CustomJS(args={"figures": figures}, code=_COLOURS))


_COLOURS = """
const scheme = matchMedia("(prefers-color-scheme: dark)")
function paint() {
  const ink = scheme.matches ? "#dddddd" : "#222222"
  const set = (model, names) => {
    model.syncable = false
    model.setv(Object.fromEntries(names.map((name) => [name, ink])))
  }
  for (const figure of figures) {
    set(figure.title, ["text_color"])
    for (const axis of [...figure.below, ...figure.left].filter((model) => model.axis_label_text_color !== undefined))
      set(axis, ["axis_label_text_color", "major_label_text_color"])
    for (const part of [...figure.center, ...figure.above].filter((model) => model.label_text_color !== undefined))
      set(part, ["label_text_color"])
    for (const renderer of figure.renderers.filter((renderer) => renderer.name == "ink"))
      renderer.glyph.text_color = {value: ink}
  }
}
scheme.addEventListener("change", paint)
paint()
"""


def nice(value: float) -> float:
    """Round a positive value up to 1, 2, 5 or 10 times a power of ten. An axis that ends there seldom changes."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((k * power for k in (1, 2, 5, 10) if k * power >= value * (1 - 1e-9)), 10 * power)


def around(low: float, high: float) -> tuple[float, float]:
    """Return round bounds of an axis that shows ``low`` to ``high``; 0 to 1 if the values look like shares."""
    if low >= 0 and 0.1 < high <= 1:
        return 0.0, 1.02
    step = nice((high - low) or abs(high) or 1.0) / 5
    return step * (math.floor(low / step) - 0.1), step * (math.ceil(high / step) + 0.1)
