"""How long ``hpstage status``, ``tree`` and ``report`` take on a large plan, and what memory.

    .venv/bin/python scripts/bench_status.py [--json FILE] [--stages 100000]

The plan is that of a simulated search in SQLite: trials branch at steps 10 and 20 of 30, until so many stages have been
trained, with the snapshots that searches write. Each figure is of a process of its own, from its start to its end.

status_s, tree_s, report_s  wall seconds of ``hpstage status --json``, ``hpstage tree`` and ``hpstage report``
status_cpu_s, ...          their seconds of processor time, which other processes disturb less
status_mib, ...            their largest resident memory
report_page_mib            the page that was written
stages, trials, records    what the journal holds
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from command_line import parser_of, write


def fill(folder: Path, stages: int) -> None:
    """A store in ``folder`` with a search that has trained at least so many stages."""
    from hpstage import schedule as s
    from hpstage.driver.driver import Driver
    from hpstage.driver.snapshots import SnapshotWriter
    from hpstage.execution.simulated import SimulatedExecutor
    from hpstage.plan.facts import SearchStarted, StateKey, TrialAdded, TrialEnded, TrialId, TrialProposed
    from hpstage.plan.log import open_plan
    from hpstage.scheduler.scheduler import Scheduler
    from hpstage.store import SQLiteJournal

    with closing(SQLiteJournal(folder / "plan.sqlite")) as journal:
        plan = open_plan(journal, StateKey("0" * 32), {})
        executor, snapshots = (
            SimulatedExecutor(8, evaluate_seconds=0.1, state_bytes=1000),
            SnapshotWriter(journal, plan),
        )
        driver = Driver(plan, Scheduler(plan), executor, journal, snapshots=snapshots)
        started = SearchStarted(
            "study", "FullTraining()", ("value",), 30, None, "RandomSampler", 0.0, directions=("maximize",)
        )
        driver.log.write([started])
        number = 0
        while plan.totals.steps_trained < 10 * stages:  # each stage has ten steps
            batch = []
            for _ in range(min(1000, stages)):
                rate = s.piecewise({0: 0.1 * (1 + number % 10), 10: 0.01 * (1 + number // 10), 20: 1e-3 * (1 + number)})
                id = TrialId(f"study/{number}")
                batch.append((number, TrialAdded(id, {"lr": rate, "momentum": s.constant(0.9)}, 30)))
                number += 1
            driver.add([trial for _, trial in batch], [TrialProposed("study", n, t.trial, {}) for n, t in batch])
            for _, trial in batch:
                driver.ask(trial.trial, 30)
            answered = 0
            while answered < len(batch):
                answered += len(driver.wait())
            driver.log.write([TrialEnded("study", t.trial, "COMPLETE", (0.001 * n,), 30, 0.0) for n, t in batch])
        driver.finish()
        snapshots.close()


def run(folder: Path, *words: str) -> tuple[float, float, float, bytes]:
    """Wall seconds, processor seconds and MiB of a command, and what it wrote."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpstage", words[0], str(folder), *words[1:]], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    written = process.stdout.read()
    _, code, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise SystemExit(f"hpstage {words[0]} ended with {process.returncode}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, written


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, default=100_000)
    options = parser.parse_args()
    from hpstage.plan.facts import StateReached
    from hpstage.plan.log import read_facts
    from hpstage.store import SQLiteJournal

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, options.stages)
        with closing(SQLiteJournal(folder / "plan.sqlite", read_only=True)) as journal:
            stages = sum(isinstance(fact, StateReached) for fact in read_facts(journal))
        status_s, status_cpu_s, status_mib, written = run(folder, "status", "--json")
        tree_s, tree_cpu_s, tree_mib, _ = run(folder, "tree")
        report_s, report_cpu_s, report_mib, _ = run(folder, "report", str(folder / "report"))
        page_bytes = (folder / "report" / "index.html").stat().st_size
    plan = json.loads(written)["plan"]
    figures = {
        "stages": stages,
        "trials": plan["trials"],
        "records": plan["records"],
        "status_s": status_s,
        "status_cpu_s": status_cpu_s,
        "status_mib": status_mib,
        "tree_s": tree_s,
        "tree_cpu_s": tree_cpu_s,
        "tree_mib": tree_mib,
        "report_s": report_s,
        "report_cpu_s": report_cpu_s,
        "report_mib": report_mib,
        "report_page_mib": page_bytes / 2**20,
    }
    for figure, value in figures.items():
        print(f"{figure:<15} {value:>12,.6g}")
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
