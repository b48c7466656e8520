"""What gangs bring a search of 400 trials with a narrow trunk, given what ``bench_elastic.py`` has measured.

    .venv/bin/python scripts/bench_elastic.py --json FILE && .venv/bin/python scripts/bench_gang_makespan.py FILE
    .venv/bin/python scripts/bench_gang_makespan.py --kept 0.9 --nodes 16

Prints the makespan at 8, 40 and 128 workers as a multiple of work / workers: the search of
``tests/unit/scheduler/test_gangs.py``, simulated with steps of 32 s. ``kept`` is the part of its workers' speed that a
gang keeps when it has twice as many: half the speed-up of two processes. It is taken to be so at each doubling.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator

import optuna

from tests.unit.scheduler.test_gangs import makespan

WORKERS = (8, 40, 128)


def measured(file: str) -> Iterator[tuple[str, int, float]]:
    """Yield what was measured: a name, the number of virtual nodes, and what is kept."""
    with open(file) as stream:
        figures = json.load(stream)["figures"]
    for model, of_nodes in figures.items():
        for nodes, found in of_nodes.items():
            yield f"{model}, {nodes} nodes", int(nodes), found["speedup"] / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="what bench_elastic.py --json has written")
    parser.add_argument("--kept", type=float, nargs="+", default=[])
    parser.add_argument("--nodes", type=int, default=16)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("hpstage").setLevel(logging.ERROR)
    cases = [("given", options.nodes, kept) for kept in options.kept]
    if options.file:
        cases += measured(options.file)
    for name, nodes, kept in cases:
        ratios = "  ".join(f"{workers} workers: {makespan(workers, kept, nodes):.2f}" for workers in WORKERS)
        print(f"{name:>20}  keeps {kept:.2f} per doubling  {ratios}", flush=True)


if __name__ == "__main__":
    main()
