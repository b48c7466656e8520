"""The command line of scripts that measure, and where they write their figures."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from figures import ROOT, record_from


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options ``--json`` and ``--record``, for a script with this docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--record", action="store_true", help="write the figures of record into README.md and the book")
    return parser


def write(options: argparse.Namespace, figures: object) -> None:
    """Write figures as JSON, and into the record, where the command line's options request it."""
    text = json.dumps(figures, indent=2, default=_plain) + "\n"
    if options.json is not None:
        options.json.write_text(text)
    if options.record:
        program = Path(sys.argv[0]).resolve().relative_to(ROOT)
        record_from(shlex.join([str(program), *_without_outputs(sys.argv[1:])]), json.loads(text))


def _without_outputs(arguments: Sequence[str]) -> list[str]:
    outputs = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    outputs.add_argument("--json")
    outputs.add_argument("--record", action="store_true")
    return outputs.parse_known_args(arguments)[1]


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
