"""A user's module that reads a file and a variable."""

from __future__ import annotations

import os
from os import environ
from pathlib import Path

FOLDER = Path("data")


def scale() -> float:
    return float(FOLDER.joinpath("scale.txt").read_text())


def variable() -> float:
    return float(environ.get("HPSTAGE_TEST_SCALE") or os.environ["HPSTAGE_TEST_SCALE"])
