"""The colours of the stage tree, wherever it is drawn: distinct under any colour vision, on white and on black."""

SHADES = slice(60, 215)
"""Of the 256 colours of viridis, by rank: without the darkest and lightest, which black and white would hide."""
UNMEASURED = "#999999"
BEST = "#e69f00"
"""The band along the best trial's path."""
FAILED = "#d55e00"
