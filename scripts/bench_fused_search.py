"""What stacking siblings saves in a whole search: 48 trials of a small CNN on scikit-learn's digits, as a stage tree.

The same search is trained merged (``numerics = "eager"``) and as ``"auto"`` chooses, in turn, on local Dask workers;
worker-seconds of the two are compared within a round. At a batch size of 32 fusing pays, at 128 it does not. Seconds of
measuring are reported separately: no trial is charged for them. Metrics must not depend on how many are trained as one.

    python scripts/bench_fused_search.py --json fused.json
    python scripts/bench_fused_search.py --steps 300 --rounds 1 --inline
"""

from __future__ import annotations

import argparse
import platform
import statistics
from typing import Any

import optuna
import torch
from command_line import parser_of, write
from fused_search import search


def compare(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Return the figures of one batch size."""
    workers = 0 if options.inline else options.workers
    rounds = []
    for number in range(options.rounds):
        ways: list[tuple[str, int]] = [("eager", 1), ("auto", options.stacked)]
        done = {way[0]: search(*way, options.steps, batch, workers) for way in ways[:: 1 - 2 * (number % 2)]}
        for way in done.values():
            way["states"] = len(way["states"])
        rounds.append(done)
        for way in done.values():
            print(
                f"batch {batch:3} round {number}  {way['requested']:5} {way['numerics']:10} x {way['at_a_time']}  "
                f"{way['seconds']:7.1f} worker-s  makespan {way['makespan']:6.1f} s  measuring "
                f"{way['measure_seconds']:4.1f} s  {way['steps_trained']:,} of {way['steps_unique']:,} steps",
                flush=True,
            )
    stacked = [way["auto"]["values"] for way in rounds if way["auto"]["numerics"].startswith("stacked")]
    equal_values = [*stacked, search("stacked", 3, options.steps, batch, 0)["values"]] if stacked else []
    figures = {
        "merge_seconds": statistics.median(done["eager"]["seconds"] for done in rounds),
        "fused_seconds": statistics.median(done["auto"]["seconds"] for done in rounds),
        "fused_ratio": statistics.median(done["auto"]["seconds"] / done["eager"]["seconds"] for done in rounds),
        "makespan_ratio": statistics.median(done["auto"]["makespan"] / done["eager"]["makespan"] for done in rounds),
        "measure_seconds": statistics.median(done["auto"]["measure_seconds"] for done in rounds),
        "chosen": [done["auto"]["numerics"] for done in rounds],
        "k_invariant": all(other == equal_values[0] for other in equal_values),
        "rounds": rounds,
    }
    print(
        f"batch {batch}: fused / merged worker-seconds {figures['fused_ratio']:.2f}, makespan "
        f"{figures['makespan_ratio']:.2f}, {', '.join(figures['chosen'])}; values depend on K: "
        f"{not figures['k_invariant']}"
    )
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--stacked", type=int, default=8, metavar="K", help="siblings as one at most (default: 8)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--inline", action="store_true", help="in this process, instead of on Dask workers")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    figures = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "steps": options.steps,
        "by_batch_size": {str(batch): compare(options, batch) for batch in options.batch},
    }
    write(options.json, figures)


if __name__ == "__main__":
    main()
