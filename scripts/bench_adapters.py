"""What a search over adapters saves: 24 trials that fine-tune a BERT, of which most is frozen, on two workers.

    python scripts/bench_adapters.py --json adapters.json
    python scripts/bench_adapters.py --quick
    python scripts/bench_adapters.py --parts "LoRA by PEFT" --width 768 --length 8 --ways eager auto

What is trained: the last layer; the last third of the layers; LoRA in all layers, by hand and by PEFT. In each round,
the same trials are trained by hpstage merged (``eager``), merged and stacked (``stacked``, ``auto``), by a plain loop,
by Optuna with a pool of processes, and, with PEFT, as several adapters of one model, which take turns.

worker     seconds in trials, summed, and by those of ``eager`` in the same round
memory     the most of all processes together, and of one of them (PSS)
a state    bytes of a stored state by those of what is trained and its optimizer's state
parts      bytes of what states have in common by those of what is frozen
k          values do not depend on how many are trained as one: those of ``stacked`` are those of widths of 1 to 16
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import adapter_task as task
import programs
import torch
from command_line import parser_of, write
from engine_models import equal

from hpstage.torch.backends.stacked import Builder, Bundle
from hpstage.torch.backends.stacked.streams import generator_of
from hpstage.training.randomness import rekey
from hpstage.workloads.tuned_bert import TunedBert

WAYS = ("eager", "stacked", "auto", "loop", "optuna", "peft")
QUICK = {"steps": 4, "trials": 4, "batch": 4, "layers": 2, "width": 32, "length": 8, "workers": 0, "rounds": 1}
CPU = torch.device("cpu")


def compare(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of what is trained, and print them."""
    ways = [way for way in options.ways if way != "peft" or task.PARTS[part] == "peft"]
    given = [*task.sizes(options), f"--part={part}", f"--dropout={options.dropout}"]
    rounds = []
    for number in range(options.rounds):
        order = ways if number % 2 == 0 else ways[::-1]
        rounds.append({way: programs.ran("adapters.py", f"--way={way}", *given) for way in order})
    found: dict[str, Any] = {}
    for way in ways:
        one = rounds[-1][way]
        found[way] = {
            **{name: value for name, value in one.items() if name != "values"},
            **{name: statistics.median(each[way][name] for each in rounds) for name in ("worker_seconds", "wall")},
            "ratio": statistics.median(
                each[way]["worker_seconds"] / each[ways[0]]["worker_seconds"] for each in rounds
            ),
        }
        own = (
            f"  {one['at_a_time']:2} as one, a state {one['state_bytes']:.2f}, parts "
            f"{one['part_bytes'] / one['base_bytes']:.2f}"
            if "states" in one
            else ""
        )
        print(
            f"{part:13} {way:8} {found[way]['worker_seconds']:8.1f} worker-s {found[way]['ratio']:6.2f}  "
            f"wall {found[way]['wall']:7.1f} s  memory {one['memory'] / 1e6:6.0f} MB, "
            f"of one {one['largest'] / 1e6:5.0f} MB{own}",
            flush=True,
        )
    stacked = [each[way]["values"] for each in rounds for way in ("stacked", "auto") if way in ways]
    found["same_values"] = all(each == stacked[0] for each in stacked)
    return found


def invariant(part: str, options: argparse.Namespace) -> bool:
    """Return whether a member's weights are the same for each number of members."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return _invariant(task.subject(options, part), options)


def _invariant(subject: TunedBert, options: argparse.Namespace) -> bool:
    data = subject.dataset()
    builder, generator = Builder(subject, CPU), generator_of(CPU)
    states: list[list[list[torch.Tensor]]] = []
    for width in range(1, options.widths + 1):
        bundle, members = Bundle(builder), []
        for number in range(width):
            torch.manual_seed(0)
            subject.hp = {"lr": 1e-3 * (1 + number), "weight_decay": 0.1, "rank": 8, "alpha": 16}
            model = subject.model(subject.hp)
            members.append((bundle.join(model, subject.optimizer(model, subject.hp)), subject.hp))
        for step in range(3):
            for member, _ in members:
                rekey(0, step)
                member.stream = generator.get_state()
            batch = data[step * options.batch : (step + 1) * options.batch]
            bundle.step([batch] * width, [hp for _, hp in members])
        for member, _ in members:
            bundle.sync(member)
        states.append([[*member.model.state_dict().values()] for member, _ in members])
    return all(equal(each, states[-1]) for each in states)


def main() -> None:
    parser = parser_of(__doc__)
    task.add_sizes(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=[*task.PARTS], default=[*task.PARTS], metavar="PART")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--widths", type=int, default=16, help="numbers of members up to which bits are compared")
    parser.add_argument("--dropout", type=float, default=0.0, help="also in what is frozen")
    parser.add_argument("--quick", action="store_true", help="at a tiny size")
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(**QUICK, widths=3, parts=["LoRA by PEFT"], ways=["eager", "stacked", "peft"])
        options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {name: value for name, value in vars(options).items() if name != "json"}
    for part in options.parts:
        figures[part] = compare(part, options)
        figures[part]["k_invariant"] = invariant(part, options)
        print(f"{part:13} values depend on K: {not figures[part]['k_invariant']}", flush=True)
    write(options, figures)
    if not all(figures[part]["k_invariant"] and figures[part]["same_values"] for part in options.parts):
        sys.exit("values depend on how many are trained as one")


if __name__ == "__main__":
    main()
