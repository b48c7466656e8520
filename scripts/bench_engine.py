"""What the engine saves: siblings trained as one, by model, batch and number, and in a whole search.

By model: seconds per member and step against eager training. All variants live side by side; in each round every
variant trains one block of steps, in a shuffled order, and ratios are taken within a round, so that other load on the
machine cancels out. Seconds are of this thread.

The search: 48 trials of a small CNN, merged (``numerics = "eager"``), and merged and fused (``"stacked"``), in turn on
local Dask workers; worker-seconds of the two are compared within a round.

    python scripts/bench_engine.py --json engine.json
    python scripts/bench_engine.py --models mlp small_cnn --batches 32 --widths 1 8 24 --steps 300 --rounds 3

merge_seconds, fused_seconds   of workers, for the search
fused_ratio                    the second by the first, within a round
k_invariant                    whether bits do not depend on how many are trained as one: K is 1, 2, 5 and 8, in
                               steps of each model, and in all states of a shorter search
models                         by model and batch: the K that pays (none: eager training does) and its ratio of seconds
save_stall_ratio, prefetch_hidden, elastic_equal   what ``bench_states.py`` and ``bench_elastic.py`` find
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import torch
from command_line import parser_of, write
from engine_models import CPU, SUBJECTS, Side, equal
from fused_search import search

from hpstage.torch.backends.stacked import Builder

WIDTHS = (1, 2, 5, 8)
"""Numbers of members of which bits are compared."""
ELSEWHERE: dict[str, dict[str, Callable[[Any], Any]]] = {
    "bench_states.py": {"save_stall_ratio": statistics.median, "prefetch_hidden": statistics.median},
    "bench_elastic.py": {"elastic_equal": all},
}
"""Figures of other scripts, by script, and how several values become one."""


def measure(name: str, size: int, widths: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure a model at a batch size; blocks take about ``seconds``."""
    subject = SUBJECTS[name]()
    builder = Builder(subject, CPU)
    eager = Side(subject, None, 1, size)
    sides = {width: Side(subject, builder, width, size) for width in {*widths, *WIDTHS}}
    for side in (eager, *sides.values()):
        side.train(3)
    alone = sides[1].weights()
    invariant = all(equal(alone, side.weights()) for side in sides.values())
    invariant &= all(equal(sides[width].weights(), sides[max(WIDTHS)].weights()) for width in WIDTHS)
    like_eager = equal(eager.weights(), alone)
    each = eager.train(2)
    ratios: dict[int, list[float]] = {width: [] for width in widths}
    spent = []
    for _ in range(rounds):
        base = eager.train(max(1, round(seconds / each)))
        spent.append(base)
        for width in random.sample(widths, len(widths)):
            ratios[width].append(sides[width].train(max(1, round(seconds / each / width))) / base)
    found = {width: statistics.median(values) for width, values in ratios.items()}
    best = min(found, key=lambda width: found[width])
    return {
        "model": name,
        "batch_size": size,
        "eager_seconds": statistics.median(spent),
        "fused_ratio": found[best],
        "width_that_pays": best if found[best] < 1 else None,
        "ratios": found,
        "k_invariant": invariant,
        "equals_eager": like_eager,
        "build_seconds": builder.seconds,
    }


def of_models(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of each model and batch size, and print them."""
    for name in options.models:
        for size in options.batches:
            row = measure(name, size, options.widths, options.rounds, options.seconds)
            ratios = "  ".join(f"{width}: {ratio:.2f}" for width, ratio in row["ratios"].items())
            print(
                f"{name:10} batch {size:4}  eager {1e3 * row['eager_seconds']:7.2f} ms  {ratios}  "
                f"k_invariant {row['k_invariant']}  equals_eager {row['equals_eager']}  "
                f"built in {row['build_seconds']:.1f} s",
                flush=True,
            )
            yield row


def of_searches(rounds: int, steps: int, batch: int, stacked: int, workers: int) -> dict[str, Any]:
    """Return what a search takes, merged, and merged and fused."""
    done = []
    for number in range(rounds):
        ways: list[tuple[str, int]] = [("eager", 1), ("stacked", stacked)]
        done.append({way[0]: search(*way, steps, batch, workers) for way in ways[:: 1 - 2 * (number % 2)]})
        for way in done[-1].values():
            print(
                f"round {number}  {way['numerics']:8} {way['seconds']:7.1f} worker-s  "
                f"makespan {way['makespan']:6.1f} s  wall {way['wall']:6.1f} s  {way['steps_trained']:,} of "
                f"{way['steps_unique']:,} steps, merge rate {way['merge_rate']:.2f}",
                flush=True,
            )
    return {
        "steps": steps,
        "merge_seconds": statistics.median(way["eager"]["seconds"] for way in done),
        "fused_seconds": statistics.median(way["stacked"]["seconds"] for way in done),
        "fused_ratio": statistics.median(way["stacked"]["seconds"] / way["eager"]["seconds"] for way in done),
        "makespan_ratio": statistics.median(way["stacked"]["makespan"] / way["eager"]["makespan"] for way in done),
        "equals_eager": all(way["stacked"]["values"] == way["eager"]["values"] for way in done),
        "searches": [{name: {**way, "states": len(way["states"])} for name, way in ways.items()} for ways in done],
    }


def states_agree(steps: int, batch: int) -> bool:
    """Return whether a search has the same states for each number of siblings that are trained as one."""
    found = [search("stacked", width, steps, batch, 0)["states"] for width in WIDTHS]
    common = set.intersection(*(set(states) for states in found))
    return bool(common) and all(len({states[key] for states in found}) == 1 for key in common)


def of_others(scripts: Path) -> Iterator[tuple[str, Any]]:
    """Yield the figures that other scripts find, by key; those of scripts that are not there are left out."""
    for script, keys in ELSEWHERE.items():
        if not (scripts / script).exists():
            print(f"left out, since there is no {script} here: {', '.join(keys)}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "found.json")
            subprocess.run([sys.executable, str(scripts / script), "--json", str(file)], check=True)
            found = json.loads(file.read_text())
        for key, summary in keys.items():
            values = list(valued(found, key))
            if values:
                yield key, summary(values)
            else:
                print(f"left out, since {script} does not report it: {key}", flush=True)


def valued(tree: Any, key: str) -> Iterator[Any]:
    """Yield what a key has, wherever it is in a tree of dicts and lists."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        if name == key:
            yield value
        else:
            yield from valued(value, key)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128], metavar="SIZE")
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 4, 8, 16, 24], metavar="K")
    parser.add_argument("--rounds", type=int, default=7, help="with each model (default: 7)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a block (default: 0.2)")
    parser.add_argument("--searches", type=int, default=3, help="rounds of searches (default: 3; 0: none)")
    parser.add_argument("--steps", type=int, default=3000, help="of a trial of the search (default: 3000)")
    parser.add_argument("--stacked", type=int, default=8, metavar="K", help="siblings as one there (default: 8)")
    parser.add_argument("--workers", type=int, default=2, help="0: in this process (default: 2)")
    parser.add_argument("--alone", action="store_true", help="without the figures of other scripts")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }
    if options.searches:
        figures |= of_searches(options.searches, options.steps, 32, options.stacked, options.workers)
    figures["models"] = list(of_models(options))
    figures["k_invariant"] = states_agree(40, 32) and all(row["k_invariant"] for row in figures["models"])
    if not options.alone:
        figures |= dict(of_others(Path(__file__).parent))
    print(json.dumps({key: value for key, value in figures.items() if not isinstance(value, list)}, indent=2))
    write(options, figures)


if __name__ == "__main__":
    main()
