"""The colours of all drawings of the stage tree: distinct for colour-blind readers, on white and on black pages."""

SHADES = slice(60, 215)
"""Indices of the colours of ranks in viridis with 256 colours. The darkest and lightest colours are left out: they
would be invisible on black or white pages."""
UNMEASURED = "#999999"
BEST = "#e69f00"
"""The band along the best trial's path."""
FAILED = "#d55e00"
