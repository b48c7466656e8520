"""What stacking siblings saves in a whole search: 48 trials of a small model, as a stage tree.

The same search is trained merged (``numerics = "eager"``) and as ``"auto"`` chooses, in turn, on local Dask workers;
worker-seconds and wall time of the two are compared within a round. At a batch size of 32 fusing pays, at 128 it does
not. Seconds of measuring are reported separately: no trial is charged for them. Metrics must not depend on how many are
trained as one. Asynchronous algorithms decide by what has come in, so that two of their searches may train other steps.

    python scripts/bench_fused_search.py --json fused.json
    python scripts/bench_fused_search.py --steps 300 --rounds 1 --inline
    python scripts/bench_fused_search.py --models cnn mlp gpt --algorithms full halving asha hyperband --batch 32
"""

from __future__ import annotations

import argparse
import platform
import statistics
from itertools import product
from typing import Any

import optuna
import torch
from command_line import parser_of, write
from fused_search import ALGORITHMS, MODELS, search


def compare(options: argparse.Namespace, model: str, algorithm: str, batch: int) -> dict[str, Any]:
    """Return the figures of one model, algorithm and batch size."""
    what = f"{model:3} {algorithm:9} batch {batch:3}"
    workers = 0 if options.inline else options.workers
    rounds = []
    for number in range(options.rounds):
        ways: list[tuple[str, int]] = [("eager", 1), ("auto", options.stacked)]
        done = {
            way[0]: search(*way, options.steps, batch, workers, model, algorithm)
            for way in ways[:: 1 - 2 * (number % 2)]
        }
        for way in done.values():
            way["states"] = len(way["states"])
        rounds.append(done)
        for way in done.values():
            print(
                f"{what} round {number}  {way['requested']:5} {way['numerics']:10} x {way['at_a_time']}  "
                f"{way['seconds']:7.1f} worker-s  makespan {way['makespan']:6.1f} s  wall {way['wall']:6.1f} s  "
                f"measuring {way['measure_seconds']:4.1f} s  {way['steps_trained']:,} of {way['steps_unique']:,} steps",
                flush=True,
            )
    # Which trials other algorithms stop may depend on the order of reports.
    stacked = [way["auto"]["values"] for way in rounds if way["auto"]["numerics"].startswith("stacked")]
    compared = bool(stacked) and algorithm == "full"
    alone = [search("stacked", 3, options.steps, batch, 0, model)["values"]] if compared else []
    figures = {
        "merge_seconds": statistics.median(done["eager"]["seconds"] for done in rounds),
        "fused_seconds": statistics.median(done["auto"]["seconds"] for done in rounds),
        "fused_ratio": statistics.median(done["auto"]["seconds"] / done["eager"]["seconds"] for done in rounds),
        "makespan_ratio": statistics.median(done["auto"]["makespan"] / done["eager"]["makespan"] for done in rounds),
        "wall_ratio": statistics.median(done["auto"]["wall"] / done["eager"]["wall"] for done in rounds),
        "measure_seconds": statistics.median(done["auto"]["measure_seconds"] for done in rounds),
        "chosen": [done["auto"]["numerics"] for done in rounds],
        "k_invariant": all(other == alone[0] for other in stacked) if compared else None,
        "rounds": rounds,
    }
    print(
        f"{what}: auto / eager worker-seconds {figures['fused_ratio']:.2f}, makespan {figures['makespan_ratio']:.2f}, "
        f"wall {figures['wall_ratio']:.2f}, {', '.join(figures['chosen'])}"
        + (f"; values depend on K: {not figures['k_invariant']}" if compared else "")
    )
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["cnn"])
    parser.add_argument("--algorithms", nargs="+", choices=[*ALGORITHMS], default=["full"])
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
        "found": {
            f"{model} {algorithm} {batch}": compare(options, model, algorithm, batch)
            for model, algorithm, batch in product(options.models, options.algorithms, options.batch)
        },
    }
    write(options, figures)


if __name__ == "__main__":
    main()
