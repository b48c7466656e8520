"""The command line of scripts that measure, and the file that they write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option ``--json``, for a script with this docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser


def write(file: Path | None, figures: object) -> None:
    """Write figures as JSON, if a file is given."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2, default=_plain) + "\n")


def shown(table: Mapping[str, Sequence[float]], note: str) -> dict[str, Any]:
    """Print the median, least and most of each figure's values; return the medians, and the others as spread."""
    width = max(map(len, table)) + 2
    print(f"{'':<{width}} {'median':>9} {'least':>9} {'most':>9}   {note}")
    for name, values in table.items():
        print(f"{name:<{width}} {median(values):>9.3f} {min(values):>9.3f} {max(values):>9.3f}", flush=True)
    spread = {name: [min(values), max(values)] for name, values in table.items()}
    return {**{name: median(values) for name, values in table.items()}, "spread": spread}


def _plain(value: object) -> object:
    """Return one of NumPy's numbers as Python's, anything else (a path) as text."""
    return value.item() if hasattr(value, "item") else str(value)
