"""Bytecode of the package and of its tests, compiled once for the hundreds of processes of a run."""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parent.parent
# The private functions below are those of these versions; with others each process rewrites what it imports.
REWRITES = pytest.version_tuple[:1] in ((8,), (9,))


def compile_share(config: pytest.Config) -> None:
    """Compile this process's share of the sources, also where bytecode is not to be written.

    Each worker of pytest-xdist imports all files of tests, and would rewrite the assertions of all of them; a process
    without workers imports those that are named. Nothing else is compiled: tests write modules of one name and size
    twice within a second.
    """
    worker = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    number, workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    rewrites = REWRITES and workers > 1 and config.getoption("assertmode") == "rewrite"
    files = [file for folder in ("hpstage", "cluster", "algos", "tests") for file in (ROOT / folder).rglob("*.py")]
    for file in sorted(files)[number % workers :: workers]:
        compileall.compile_file(file, quiet=2)
        if rewrites and file.name.startswith("test_"):
            rewrite_ahead(file, config)


def rewrite_ahead(file: Path, config: pytest.Config) -> None:
    """Write what pytest imports in place of a file of tests."""
    folder = rewrite.get_cache_dir(file)
    cached = folder / f"{file.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(file, cached) is None and rewrite.try_makedirs(folder):
        source, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, cached)
