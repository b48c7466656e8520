"""How the pictures look: colours that everyone can tell apart, sizes, and the way from a figure to a PNG."""

from __future__ import annotations

import io

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008): distinct under every common form of colour blindness.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"

Colour = str | tuple[float, float, float, float]

INK = "#222222"
FAINT = "#B5B5B5"
TRACK = "#E4E4E4"

WIDTH = 11.0
"""Of every picture, in inches."""
DPI = 130
SMALL = 8.0
"""Font size of ticks and labels, in points."""


def figure(height: float) -> tuple[Figure, Axes]:
    """An empty figure ``height`` inches high, and its axes. No pyplot: nothing global is touched."""
    drawn = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(labelsize=SMALL, color=FAINT, labelcolor=INK)
    return drawn, axes


def shades(maximize: bool) -> Colormap:
    """From pale (bad) to dark (good): viridis without its palest end, which would vanish on white."""
    darker = [colormaps["viridis"](0.9 * i / 63) for i in range(64)]
    return LinearSegmentedColormap.from_list("shades", darker[::-1] if maximize else darker)


def nothing(message: str) -> Figure:
    """A picture that says why there is none."""
    drawn, axes = figure(1.2)
    axes.set_axis_off()
    axes.text(0.5, 0.5, message, ha="center", va="center", color=INK, transform=axes.transAxes)
    return drawn


def png(drawn: Figure) -> bytes:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png")
    return buffer.getvalue()
