"""The common style of pictures, for two-column pages and colour-blind readers; and functions that save pictures."""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito, "Color Universal Design" (2008): distinct under every common form of colour blindness.
BLUE = "#0072B2"
SKY = "#56B4E9"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"

Colour = str | tuple[float, float, float, float]

INK = "#222222"
GREY = "#777777"
FAINT = "#B5B5B5"
TRACK = "#E9E9E9"

WIDTH = 7.2
"""Width of a picture in inches: both columns of most journals."""
TALLEST = 9.0
"""Maximum height in inches: a page."""
DPI = 200
MOST_SHAPES = 2000
"""Number of lines or bars above which they are rasterized in a vector file: 10,000 would take a megabyte."""
TITLE, LABEL, SMALL, TINY = 8.5, 8.0, 7.0, 5.5
"""Font sizes in points: titles; axis labels; ticks and legends; names within a picture."""

_DATELESS: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure, ``height`` inches high, and its axes. It does not use pyplot and its global state."""
    drawn = blank(height)
    axes = drawn.add_subplot()
    tidy(axes)
    return drawn, axes


def blank(height: float, *, layout: Literal["constrained"] | None = "constrained") -> Figure:
    drawn = Figure(figsize=(WIDTH, height), dpi=DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(drawn)
    return drawn


def tidy(axes: Axes) -> None:
    """Style axes: a line at the bottom, small ticks."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.spines["bottom"].set_linewidth(0.6)
    axes.tick_params(labelsize=SMALL, color=FAINT, labelcolor=INK, width=0.6, length=3)
    axes.set_axisbelow(True)


def title(axes: Axes, text: str) -> None:
    """Set the title of the axes' figure, at the left edge of the figure, since narrow axes have too little room."""
    whole = axes.figure
    y = None if whole.get_layout_engine() else 1 - 0.05 * DPI / whole.bbox.height
    whole.suptitle(text, x=0.01, y=y, ha="left", fontsize=TITLE, color=INK, parse_math=False)


def label(axes: Axes, *, x: str | None = None, y: str | None = None) -> None:
    """Set the axis labels; they are not parsed as mathematical text."""
    if x is not None:
        axes.set_xlabel(x, fontsize=LABEL, color=INK, parse_math=False)
    if y is not None:
        axes.set_ylabel(y, fontsize=LABEL, color=INK, parse_math=False)


def counts(axis: Axis) -> None:
    """Use integer ticks on the axis."""
    axis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    axis.set_major_formatter("{x:,.0f}")


def legend(axes: Axes, handles: Iterable[Any], *, on_a_line: int = 4) -> None:
    """Add a legend above the axes, at the right: it covers neither data nor the title. Labels must not come from users.

    Args:
        on_a_line: maximum number of labels on a line; more do not fit into a narrow picture.
    """
    handles = list(handles)
    if not handles:
        return
    columns = min(on_a_line, len(handles))
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.1,
        ncols=columns,
        labelspacing=0.3,
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
        handlelength=1.0,
        handletextpad=0.4,
        columnspacing=1.0,
    )


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for displaying times up to ``seconds``: its length in seconds, and its name."""
    if abs(seconds) >= 2 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if abs(seconds) >= 300 else (1.0, "seconds")


_Drawing = TypeVar("_Drawing", bound=Callable[..., Figure])


def in_our_style(draw: _Drawing) -> _Drawing:
    """Decorate a function to draw in matplotlib's default style, whatever style the process has set: Optuna's plots set
    ggplot's. The user's fonts are kept."""

    @functools.wraps(draw)
    def drawn(*given: Any) -> Figure:
        with _ours():
            return draw(*given)

    return cast(_Drawing, drawn)


@contextmanager
def _ours() -> Iterator[None]:
    known: Any = matplotlib.rcParams
    fonts = {name: known[name] for name in known if name.startswith("font.")}  # copying all would choose a backend
    with matplotlib.style.context(["default", fonts]):
        yield


def nothing(message: str) -> Figure:
    """Return a picture with a message saying why there is nothing to draw."""
    drawn, axes = figure(0.8)
    axes.set_axis_off()
    axes.text(
        0.5,
        0.5,
        message,
        ha="center",
        va="center",
        fontsize=TITLE,
        color=INK,
        parse_math=False,
        transform=axes.transAxes,
        in_layout=False,  # a text wider than the figure would leave no room for the axes
    )
    return drawn


def svg(drawn: Figure, width: float = WIDTH) -> bytes:
    """Return the picture as SVG, ``width`` inches wide, with its text as outlines."""
    drawn.set_figwidth(width)  # before it is laid out, which happens when it is written
    buffer = io.BytesIO()
    _save(drawn, buffer, "svg")
    return buffer.getvalue()


Format = Literal["png", "svg", "pdf", "eps", "ps", "jpg", "tif", "webp"]


def save(drawn: Figure, path: str | os.PathLike[str], *, format: Format | None = None) -> Path:
    """Write a picture and return its path. ``format`` is by default that of the path's suffix; without one, PNG."""
    place = Path(path)
    _save(drawn, place, format or place.suffix[1:].lower() or "png")
    return place


def _save(drawn: Figure, target: Path | io.BytesIO, kind: str) -> None:
    # Fonttype 42: publishers want whole fonts in PDF. With a fixed salt and no date, equal pictures have equal files.
    with _ours(), matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "hpstage"}), warnings.catch_warnings():
        # Characters missing from matplotlib's font are drawn as boxes, which is no reason to warn the user.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        drawn.savefig(target, format=kind, metadata=_DATELESS.get(kind))
