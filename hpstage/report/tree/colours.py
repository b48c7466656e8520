"""The colours of the stage tree, wherever it is drawn: distinct under any colour vision, on white and on black."""

SHADES = slice(60, 215)
"""Indices into the 256 colours of viridis, by rank, without the darkest and lightest, which a black or white page would
hide."""
UNMEASURED = "#999999"
BEST = "#e69f00"
"""The band along the best trial's path."""
FAILED = "#d55e00"
