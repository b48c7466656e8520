"""How likely an audit finds a fault that nothing else looks for: 12 planted faults, capture and verification off.

    .venv/bin/python scripts/bench_audit.py [--json FILE] [--audited 1 3 12] [--seeds 50] [--trials 48] [--fault NAME]

For each fault (``scripts/planted_faults.py``), a search trains 48 trials in one process, as a worker does, with
``HPSTAGE_UNWATCHED`` set. Then every segment and every whole trial that could be audited is trained again, each in a
fresh process: so it is known which ones show the fault. An audit draws from them in a random order. In a search the
order is all that depends on the seed, so one search is audited with 50 seeds. The first row has no fault.

segments, show      what could be audited, and which part of it shows the fault
trials, show        the same of whole trials
then, for each number of --audited:
computed            the probability that one of the first so many shows it, from the weights of the draw
seen                in which part of the seeds one did
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import optuna
import torch
from command_line import parser_of, write
from planted_faults import FAULTS, Small

import hpstage
from hpstage import schedule as s
from hpstage.execution.retraining import retrain
from hpstage.plan.facts import NodeId
from hpstage.plan.messages import AuditId
from hpstage.scheduler.audit_draw import WHOLE, AuditDraw, Drawn
from hpstage.training.capture.unwatched import VARIABLE
from hpstage.training.trainables import as_trainable

STEPS = 28
GRID = list(product([0.2, 0.1, 0.05], [6, 10, 14], [0.5, 0.3], [18, 20, 22]))
EQUAL, DIFFERS, FAILED = range(3)
EXACT = "none"


def space(trial: optuna.Trial) -> dict[str, object]:
    """Learning rates that drop twice: 54 sequences with common beginnings."""
    lr, first, gamma, second = GRID[trial.suggest_int("sequence", 0, len(GRID) - 1)]
    return {"lr": s.multistep(lr, milestones=[first, second], gamma=gamma), "batch_size": 16}


@dataclass(frozen=True)
class Shown:
    """What can be audited: the steps after which segments end and whether they show the fault, and trials."""

    segments: dict[tuple[NodeId, int], bool]
    trials: dict[tuple[NodeId, int], bool]
    orders: list[list[tuple[NodeId, int, bool]]]

    def seen(self, order: Sequence[tuple[NodeId, int, bool]]) -> bool:
        """Whether any of these audits shows the fault."""
        return any((self.trials if whole else self.segments)[node, step] for node, step, whole in order)


def in_fork(action: Callable[[], int]) -> int:
    """Return the exit status of an action in a forked process: nothing of it is left here."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = FAILED
    try:
        status = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def preload() -> None:
    """Import what training imports, which trains nothing here: else every fork would."""
    with tempfile.TemporaryDirectory(prefix="hpstage-audit-") as name:
        folder = Path(name)

        def train() -> int:
            search(Small, folder, 1)
            (folder / "modules").write_text("\n".join(sys.modules))
            return EQUAL

        in_fork(train)
        for module in (folder / "modules").read_text().splitlines():
            with suppress(Exception):
                importlib.import_module(module)


def search(fault: type[Small], folder: Path, trials: int) -> int:
    os.environ[VARIABLE] = "1"
    hpstage.optimize(
        optuna.create_study(study_name="audited", sampler=optuna.samplers.RandomSampler(seed=0)),
        fault(folder),
        space,
        metric="loss",
        steps=STEPS,
        n_trials=trials,
        executor=hpstage.InlineExecutor(),
        store=folder / "store",
        verify="off",
        audit="off",
    )
    return EQUAL


def measure(fault: type[Small], trials: int, seeds: int, count: int) -> Shown:
    """Train a search, audit all that can be audited, and draw with each of the seeds."""
    with tempfile.TemporaryDirectory(prefix="hpstage-audit-") as name:
        folder = Path(name)
        if in_fork(lambda: search(fault, folder, trials)):
            sys.exit(f"the search with {fault.__name__} has failed")
        stored = hpstage.open(folder / "store")
        plan, checkpoints = stored.plan, stored.checkpoints
        if plan.failures:
            sys.exit(f"training {fault.__name__} has failed: {plan.failures[0].failure.summary}")
        every = AuditDraw(plan, "all")
        found: dict[tuple[NodeId, int, bool], bool] = {}
        for drawn in [*drain(every, len(every))]:
            segment = every.audit(drawn, AuditId("audit")).segment

            def again(segment: object = segment) -> int:
                os.environ[VARIABLE] = "1"
                trained = retrain(as_trainable(fault(folder)), checkpoints, segment)  # type: ignore[arg-type]
                if trained.problem is not None:
                    print(trained.problem.text, file=sys.stderr)
                    return FAILED
                return EQUAL if trained.equal else DIFFERS

            status = in_fork(again)
            if status == FAILED:
                sys.exit(f"an audit of {fault.__name__} has failed")
            found[drawn.node, drawn.step, drawn.whole] = status == DIFFERS
        orders = [
            [(one.node, one.step, one.whole) for one in drain(AuditDraw(plan, f"{seed}"), count)]
            for seed in range(seeds)
        ]
        return Shown(
            {(node, step): shows for (node, step, whole), shows in found.items() if not whole},
            {(node, step): shows for (node, step, whole), shows in found.items() if whole},
            orders,
        )


def drain(draw: AuditDraw, count: int) -> Sequence[Drawn]:
    """Return the first audits, in their order."""
    found: list[Drawn] = []
    while len(found) < count and len(draw):
        if (one := draw.next()) is not None:
            found.append(one)
    return found


def computed(shown: Shown, count: int) -> float:
    """Return the probability that one of the first ``count`` audits shows the fault.

    Segments are drawn like decays, at rates that are their weights: the steps after which they end. The first that
    shows the fault comes at a time T, distributed exponentially at the sum of the weights of those that show it; it is
    too late if as many of the others have come by then. All segments of this search are of one regime. Whole trials
    have equal weights.
    """
    trials = min(count // WHOLE, len(shown.trials))
    showing = sum(shown.trials.values())
    miss = math.prod((len(shown.trials) - showing - i) / (len(shown.trials) - i) for i in range(trials))
    return 1.0 - max(0.0, miss) * missed(shown.segments, count - trials)


def missed(segments: dict[tuple[NodeId, int], bool], count: int) -> float:
    """Return the probability that none of the first segments shows the fault."""
    total = float(sum(step for (_, step), shows in segments.items() if shows))
    others = np.array([step for (_, step), shows in segments.items() if not shows], float)
    if not total or count > len(others):
        return 0.0 if total else 1.0
    miss, parts = 0.0, 2000
    for part in range(parts):  # over quantiles of T
        time = -math.log(1.0 - (part + 0.5) / parts) / total
        came = np.zeros(count + 1)  # how many of the others, the last entry: at least so many
        came[0] = 1.0
        for chance in 1.0 - np.exp(-others * time):
            last = came[-1]
            came[1:] = came[1:] * (1.0 - chance) + came[:-1] * chance
            came[0] *= 1.0 - chance
            came[-1] += last * chance
        miss += came[-1] / parts
    return miss


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--audited", type=int, nargs="+", default=[1, 3, 12])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--fault", choices=[EXACT, *FAULTS], action="append")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    preload()
    figures: dict[str, dict[str, float]] = {}
    titles = "".join(f"{f'computed {count}':>12}{'seen':>6}" for count in options.audited)
    print(f"{'':<31} {'segments':>8} {'show':>5} {'trials':>7} {'show':>5}{titles}")
    for name in options.fault or (EXACT, *FAULTS):
        shown = measure(FAULTS.get(name, Small), options.trials, options.seeds, max(options.audited))
        one = figures[name] = {
            "segments": len(shown.segments),
            "segments_showing": sum(shown.segments.values()),
            "trials": len(shown.trials),
            "trials_showing": sum(shown.trials.values()),
        }
        for count in options.audited:
            one[f"computed_{count}"] = computed(shown, count)
            one[f"seen_{count}"] = sum(shown.seen(order[:count]) for order in shown.orders) / options.seeds
        shares = "".join(f"{one[f'computed_{count}']:>12.2f}{one[f'seen_{count}']:>6.2f}" for count in options.audited)
        counts = f"{one['segments']:>8} {one['segments_showing']:>5} {one['trials']:>7} {one['trials_showing']:>5}"
        print(f"{name:<31} {counts}{shares}", flush=True)
    write(options, {"seeds": options.seeds, "faults": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
