"""The same 48 trials by hpstage and by what people use: Ray Tune, Optuna, Dask futures, Syne Tune.

    pip install -e '.[peers]'
    python scripts/bench_peers.py --json peers.json
    python scripts/bench_peers.py --steps 300 --programs hpstage optuna --algorithms full
    python scripts/bench_peers.py --from peers.json --picture notebooks/pictures/peers.svg
    python scripts/bench_peers.py --record          the table of full training in README.md and the book

Each program (``scripts/peers``) trains a small CNN on scikit-learn's digits, one thread in each of the same number of
processes, from the first line of the program to its end. Programs take turns; figures are medians over rounds.
*hpstage, fused* is the same search with ``numerics = "auto"``: up to 8 sibling models are trained as one.

wall               seconds from the start of the program to its end
worker             seconds in trials, summed: training and evaluation, for hpstage loading and saving of states, too
memory             the most of all its processes together (PSS), seen every half second or less often
per trial, report  seconds that a further trial and a further report of one add to a program that trains nothing
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import programs
from command_line import parser_of, write

sys.path.insert(0, str(Path(__file__).parent))
from figures import record

PROGRAMS = {
    "hpstage": ("hpstage_search.py",),
    "hpstage, fused": ("hpstage_search.py", "--fused"),
    "optuna": ("optuna_pool.py",),
    "dask": ("dask_futures.py",),
    "ray": ("ray_tune.py",),
    "ray, new actors": ("ray_tune.py", "--new-actors"),
    "syne-tune": ("syne_tune_local.py",),
}
LABELS = {
    "optuna": "Optuna, a pool of processes",
    "dask": "Dask futures",
    "ray": "Ray Tune, actors reused",
    "ray, new actors": "Ray Tune, an actor for each trial",
    "syne-tune": "Syne Tune, a process for each trial",
}
"""Of rows in the book; others are called as here."""
WITHOUT_ASHA = ("dask", "ray, new actors")


def ran(program: str, *options: str) -> dict[str, Any]:
    file, *own = PROGRAMS[program]
    return programs.ran(file, *own, *options)


def sizes(options: argparse.Namespace) -> tuple[str, str]:
    return f"--batch={options.batch}", f"--workers={options.workers}"


def compare(algorithm: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    names = [name for name in options.programs if algorithm == "full" or name not in WITHOUT_ASHA]
    rounds = []
    for number in range(options.rounds):
        order = names if number % 2 == 0 else names[::-1]
        rounds.append(
            {name: ran(name, *sizes(options), f"--steps={options.steps}", f"--algorithm={algorithm}") for name in order}
        )
        for name in names:
            one = rounds[-1][name]
            print(
                f"{algorithm:5} round {number}  {name:16} {one['wall']:7.1f} s  {one['steps']:8,.0f} steps", flush=True
            )
    found = {}
    for name in names:
        all_of = {what: [one[name][what] for one in rounds] for what in ("wall", "worker_seconds", "memory")}
        ratios = {
            f"{what}_ratio": [one[name][what] / one["hpstage"][what] for one in rounds if "hpstage" in one]
            for what in ("wall", "worker_seconds")
        }
        medians = {what: statistics.median(values) for what, values in {**all_of, **ratios}.items() if values}
        found[name] = {**rounds[-1][name], **medians, "rounds": [one[name] for one in rounds], "spread": ratios}
    return found


def overheads(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the seconds that a trial, and a report, add to a program that trains nothing."""
    found = {}
    idle = (*sizes(options), "--steps=100", "--idle", "--algorithm=full")
    for name in options.programs:
        few, many, reporting = (
            ran(name, *idle, f"--trials={trials}", f"--reports={reports}")["wall"]
            for trials, reports in ((12, 1), (48, 1), (48, 21))
        )
        found[name] = {"per_trial": (many - few) / 36, "per_report": (reporting - many) / (48 * 20)}
    return found


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the book's table of full training; ratios are to hpstage, and to hpstage, fused, of the same round."""

    def ratios(one: dict[str, Any], what: str, name: str) -> str:
        against = [base for base in ("hpstage", "hpstage, fused") if base in found and base != name]
        pairs = [zip(one["rounds"], found[base]["rounds"], strict=True) for base in against if name != "hpstage"]
        return ", ".join(f"{statistics.median(a[what] / b[what] for a, b in pair):.2f}" for pair in pairs)

    return [
        [
            LABELS.get(name, name),
            f"{one['wall']:.1f} s",
            ratios(one, "wall", name),
            f"{one['worker_seconds']:.1f}",
            ratios(one, "worker_seconds", name),
            f"{one['steps']:,.0f}",
            f"{one['memory'] / 1e9:.1f} GB",
            f"{one['best']:.4f}",
        ]
        for name, one in found.items()
    ]


def draw(figures: dict[str, Any], file: Path) -> None:
    """Draw wall and worker-seconds of full training: a bar for each program, the shortest at the top."""
    from hpstage.report.pictures import style

    found = figures["full"]
    names = sorted(found, key=lambda name: float(found[name]["wall"]), reverse=True)
    drawn = style.blank(0.6 + 0.26 * len(names))
    axes = drawn.subplots(1, 2, sharey=True)
    kinds = {"wall": "From the program's start to its end", "worker_seconds": "Seconds of training, of all workers"}
    for one, (what, text) in zip(axes, kinds.items(), strict=True):
        style.tidy(one)
        one.set_title(text, loc="left", fontsize=style.TITLE)
        colours = [style.BLUE if name.startswith("hpstage") else style.FAINT for name in names]
        bars = one.barh(names, [found[name][what] for name in names], color=colours)
        one.bar_label(bars, fmt="%.0f s", padding=3, fontsize=style.SMALL)
        one.xaxis.set_visible(False)
        one.spines["bottom"].set_visible(False)
        one.margins(x=0.15)
    style.save(drawn, file)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--algorithms", nargs="*", choices=["full", "asha"], default=["full", "asha"])
    parser.add_argument("--overheads", action="store_true", help="measure trials and reports that train nothing, too")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw full training, as SVG")
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="earlier", help="draw those of --json FILE, run nothing"
    )
    options = parser.parse_args()
    if options.earlier is not None:
        draw(json.loads(options.earlier.read_text()), options.picture)
        return
    figures: dict[str, Any] = {
        "machine": platform.machine(),
        **{name: vars(options)[name] for name in ("steps", "batch")},
    }
    for algorithm in options.algorithms:
        figures[algorithm] = found = compare(algorithm, options)
        print(f"\n{algorithm:16} {'wall':>8} {'x':>6} {'worker':>8} {'x':>6} {'steps':>9} {'memory':>8} {'best':>7}")
        for name, one in found.items():
            print(
                f"{name:16} {one['wall']:8.1f} {one.get('wall_ratio', 0):6.2f} {one['worker_seconds']:8.1f} "
                f"{one.get('worker_seconds_ratio', 0):6.2f} {one['steps']:9,.0f} {one['memory'] / 1e6:5.0f} MB "
                f"{one['best']:7.4f}  {' '.join(f'{k} {v}' for k, v in one['versions'].items())}"
            )
        if "hpstage" in found:
            ours = found["hpstage"]
            print(f"merge rate {ours['merge_rate']:.2f}, by cost {ours['cost_weighted_merge_rate']:.2f}\n")
    if options.overheads:
        figures["overheads"] = extra = overheads(options)
        for name, one in extra.items():
            print(f"{name:16} {1e3 * one['per_trial']:8.1f} ms a trial {1e3 * one['per_report']:8.2f} ms a report")
    if options.picture is not None:
        draw(figures, options.picture)
    if options.record:
        record("peers", rows(figures["full"]), "scripts/bench_peers.py")
    write(options, figures)


if __name__ == "__main__":
    main()
