"""Checks on a GPU what cannot be checked without one, and measures what it gains there.

    python scripts/gpu_check.py --json gpu.json
    python scripts/gpu_check.py --parts forks fused --models mlp

forks    under deterministic algorithms, by each step backend: training from a state, kept on the device, on the host or
         on disk, gives the bits of training straight through
costs    seconds to fork from a state on the device, on the host and on disk
steps    seconds of a step by each step backend; CUDA graphs against eager training
fused    siblings as one: seconds per member and step against eager training, peak memory, and whether bits depend on K
chains   several chains on one device: steps per second of 1, 2 and 4 processes, and of as many CUDA streams in one
search   a search on a local cluster by each step backend: bits and seconds, compared to trials without sharing

A part that fails reports why, and the others run. It needs nothing but hpstage, and exits with 0 where there is no GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import optuna
import torch
from command_line import parser_of, write
from engine_models import SUBJECTS, Images, Side, equal, now
from torch.utils._pytree import tree_map_only

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone, digest, nbytes
from hpstage.execution import device_memory
from hpstage.plan.facts import StateKey
from hpstage.torch.backends.lookup import backend_named
from hpstage.torch.backends.stacked import Builder
from hpstage.torch.environment import use_deterministic_algorithms
from hpstage.training.trainables import as_trainable

BACKENDS = ("eager", "compiled", "graphed", "stacked")


@dataclass(frozen=True)
class Sizes:
    """How much each part does."""

    models: tuple[str, ...] = ("mlp", "small_cnn", "resnet20", "gpt")
    batch: int = 32
    steps: int = 50
    """Of a block that is timed."""
    rounds: int = 5
    widths: tuple[int, ...] = (1, 4, 16, 64)
    chains: tuple[int, ...] = (1, 2, 4)


SMALL = Sizes(models=("mlp",), batch=4, steps=2, rounds=1, widths=(1, 2), chains=(1, 2))
"""Enough to see that everything runs."""


def subject_on(device: torch.device, model: str, numerics: str = "eager") -> Images:
    subject = SUBJECTS[model]()
    subject.device, subject.numerics = str(device), numerics
    return subject


@contextmanager
def training(subject: Images, batch: int) -> Iterator[tuple[Any, Callable[[int, int], None]]]:
    """Set a trainable up; yield it, and a function that trains it from a step to another."""
    trainable: Any = as_trainable(subject)
    hp = {"lr": 0.05, "batch_size": batch, "seed": 1}

    def train(start: int, stop: int) -> None:
        for step in range(start, stop):
            trainable.train(step, hp)

    with closing(trainable):
        trainable.setup(hp)
        yield trainable, train


def on_host(state: object) -> object:
    return clone(tree_map_only(torch.Tensor, torch.Tensor.cpu, state))


def by_disk(state: object, folder: Path) -> object:
    store = FolderCheckpoints(folder, workload="gpu_check")
    key = StateKey(digest(state)[:32].ljust(32, "0"))
    store.save(key, state, step=1, parent=None)
    return store.load(key)


def by_backend(
    device: torch.device, sizes: Sizes, measure: Callable[[Images, Sizes], dict[str, Any]]
) -> dict[str, Any]:
    """Return what is measured, by model and backend; or why the backend cannot run here."""
    found: dict[str, Any] = {}
    for model in sizes.models:
        for numerics in BACKENDS:
            missing = backend_named(numerics).missing(device)
            found[f"{model} {numerics}"] = missing or measure(subject_on(device, model, numerics), sizes)
    return found


def forks(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Return, by model and backend, from where forks are exact; or why the backend cannot run here."""
    return by_backend(device, sizes, forked)


def forked(subject: Images, sizes: Sizes) -> dict[str, bool]:
    batch = sizes.batch
    with training(subject, batch) as (trainable, train), tempfile.TemporaryDirectory() as folder:
        train(0, 3)
        state = trainable.state_dict()
        kept = {"device": clone(state), "host": on_host(state), "disk": by_disk(state, Path(folder))}
        train(3, 6)
        straight = digest(trainable.state_dict())
        exact = {}
        for place, state in kept.items():
            trainable.setup({"lr": 0.05, "batch_size": batch, "seed": 1})
            trainable.load_state_dict(state)
            train(3, 6)
            exact[place] = digest(trainable.state_dict()) == straight
    return exact


def costs(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Return, by model, the bytes of a state, and median seconds to save it and resume from it, by where it is kept."""
    return {model: cost(subject_on(device, model), sizes) for model in sizes.models}


def cost(subject: Images, sizes: Sizes) -> dict[str, Any]:
    with training(subject, sizes.batch) as (trainable, train), tempfile.TemporaryDirectory() as folder:
        train(0, 2)
        seconds: dict[str, list[float]] = {"device": [], "host": [], "disk": []}
        size = nbytes(trainable.state_dict())
        for number in range(sizes.rounds):
            train(2 + number, 3 + number)  # the store keeps equal states once
            places: dict[str, Callable[[object], object]] = {
                "device": clone,
                "host": on_host,
                "disk": lambda state: by_disk(state, Path(folder)),
            }
            for place, keep in places.items():
                trainable.synchronize()
                begin = time.perf_counter()
                trainable.load_state_dict(keep(trainable.state_dict()))
                trainable.synchronize()
                seconds[place].append(time.perf_counter() - begin)
    return {"bytes": size, **{f"{place}_seconds": statistics.median(taken) for place, taken in seconds.items()}}


def steps(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Return, by model, the median seconds of a step by each backend that can run here."""
    return by_backend(device, sizes, stepped)


def stepped(subject: Images, sizes: Sizes) -> dict[str, Any]:
    with training(subject, sizes.batch) as (trainable, train):
        begin = time.perf_counter()
        train(0, 3)
        trainable.synchronize()
        begun = time.perf_counter() - begin
        device_memory.reset_peak()
        taken = []
        for number in range(sizes.rounds):
            begin = time.perf_counter()
            train(3 + number * sizes.steps, 3 + (number + 1) * sizes.steps)
            trainable.synchronize()
            taken.append((time.perf_counter() - begin) / sizes.steps)
        return {
            "seconds": statistics.median(taken),
            "first_steps_seconds": begun,
            "peak_bytes": device_memory.peak_bytes(),
        }


def fused(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Return, by model and number of members, seconds per member and step by eager ones, and the peak of memory."""
    found: dict[str, Any] = {}
    for model in sizes.models:
        subject = subject_on(device, model)
        builder = Builder(subject, device)
        eager = Side(subject, None, 1, sizes.batch, device)
        eager.train(3)
        alone: list[list[torch.Tensor]] = []
        for width in sizes.widths:
            try:
                device_memory.reset_peak()
                side = Side(subject, builder, width, sizes.batch, device)
                side.train(3)
                weights = side.weights()
                alone = alone or weights[:1]
                ratios = [side.train(sizes.steps) / eager.train(sizes.steps) for _ in range(sizes.rounds)]
            except torch.OutOfMemoryError as error:
                found[f"{model} {width}"] = str(error).splitlines()[0]
                break
            found[f"{model} {width}"] = {
                "ratio": statistics.median(ratios),
                "k_invariant": equal(alone, weights),
                "peak_bytes": device_memory.peak_bytes(),
            }
            del side, weights
    return found


def chains(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Return, by model and number of chains, the steps per second of all together: in processes, and in streams."""
    found: dict[str, Any] = {}
    for model in sizes.models:
        for count in sizes.chains:
            found[f"{model} {count}"] = {
                **in_processes(device, model, count, sizes),
                **in_streams(device, model, count, sizes),
            }
    return found


def in_processes(device: torch.device, model: str, count: int, sizes: Sizes) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    with ProcessPoolExecutor(count, mp_context=context, initializer=_meet, initargs=(barrier,)) as pool:
        done = [pool.submit(one_of, str(device), model, sizes) for _ in range(count)]
        each = [future.result() for future in done]
    rate = sum(one["steps_per_second"] for one in each)
    return {"processes_steps_per_second": rate, "processes_peak_bytes": [one["peak_bytes"] for one in each]}


def one_of(device: str, model: str, sizes: Sizes) -> dict[str, Any]:
    """Train a chain in a process of its own, at the same time as the others."""
    at = torch.device(device)
    prepare(at)
    side = Side(subject_on(at, model), None, 1, sizes.batch, at)
    side.train(3)
    _meeting[0].wait(300)
    begin = time.perf_counter()
    side.train(sizes.steps * sizes.rounds)
    seconds = time.perf_counter() - begin
    return {"steps_per_second": sizes.steps * sizes.rounds / seconds, "peak_bytes": device_memory.peak_bytes()}


_meeting: list[Any] = []


def _meet(barrier: Any) -> None:
    _meeting.append(barrier)


def in_streams(device: torch.device, model: str, count: int, sizes: Sizes) -> dict[str, Any]:
    """Train chains by turns in one process, each on a stream of its own; losses are not waited for."""
    subject = subject_on(device, model)
    sides = [Side(subject, None, 1, sizes.batch, device) for _ in range(count)]
    on = [torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext() for _ in sides]
    for side in sides:
        side.train(3)
    now(device)
    begin = time.perf_counter()
    for _ in range(sizes.steps * sizes.rounds):
        for side, stream in zip(sides, on, strict=True):
            with stream:
                subject.update(*side.pairs[0], side.batches[0])
    now(device)
    return {"streams_steps_per_second": count * sizes.steps * sizes.rounds / (time.perf_counter() - begin)}


def search(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Return, by model and backend, whether every trial equals itself without sharing, and what each took."""
    return by_backend(device, sizes, searched)


def searched(subject: Images, sizes: Sizes) -> dict[str, Any]:
    third = sizes.steps * sizes.rounds
    rates = {"second": [0.05, 0.02, 0.01], "last": [0.01, 0.005]}

    def space(trial: optuna.Trial) -> dict[str, s.Schedule]:
        second, last = (trial.suggest_categorical(name, values) for name, values in rates.items())
        return {
            "lr": s.piecewise({0: 0.05, third: second, 2 * third: last}),
            "batch_size": s.constant(sizes.batch),
            "seed": s.constant(1),
        }

    study = optuna.create_study(sampler=optuna.samplers.GridSampler(rates, seed=0))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        result = hpstage.optimize(study, subject, space, metric="loss", steps=3 * third, store=folder, audit="off")
        seconds = time.perf_counter() - begin
    values = [trial.value for trial in study.trials]
    begin = time.perf_counter()
    truth = [alone(subject, result.trial(number).schedules, 3 * third) for number in range(6)]
    return {
        "exact": values == truth,
        "values": values,
        "alone": truth,
        "seconds": seconds,
        "one_by_one_seconds": time.perf_counter() - begin,
        "savings": str(result.savings),
    }


def alone(subject: Images, schedules: Mapping[str, s.Schedule], steps: int) -> float:
    """Return the loss of a trial trained in a plain loop in this process: no plan, no chain, no checkpoint."""
    trainable: Any = as_trainable(subject)
    with closing(trainable):
        trainable.setup({name: schedule.value(0) for name, schedule in schedules.items()})
        for step in range(steps):
            trainable.train(step, {name: schedule.value(step) for name, schedule in schedules.items()})
        return float(trainable.evaluate()["loss"])


PARTS: dict[str, Callable[[torch.device, Sizes], dict[str, Any]]] = {
    "forks": forks,
    "costs": costs,
    "steps": steps,
    "fused": fused,
    "chains": chains,
    "search": search,
}


def prepare(device: torch.device) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        use_deterministic_algorithms()
        torch.cuda.init()


def check(device: torch.device, sizes: Sizes, parts: tuple[str, ...] = tuple(PARTS)) -> dict[str, Any]:
    """Return versions, the device, and what each part has found, or the error by which it has failed."""
    prepare(device)
    is_gpu = device.type == "cuda"
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
        "cuda": torch.version.cuda if is_gpu else None,
        "parts": {},
    }
    for name in parts:
        begin = time.perf_counter()
        try:
            found["parts"][name] = {"found": PARTS[name](device, sizes)}
        except Exception as error:
            found["parts"][name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        found["parts"][name]["seconds"] = time.perf_counter() - begin
        print(
            f"{name}: {json.dumps(found['parts'][name].get('found', found['parts'][name].get('error')), indent=2)}",
            flush=True,
        )
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(Sizes.models))
    parser.add_argument("--small", action="store_true", help="little of everything, to see that it runs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"gpu_check: no GPU here (torch {torch.__version__} finds no CUDA device): nothing was checked")
        return 0
    sizes = replace(SMALL if options.small else Sizes(), models=tuple(options.models))
    found = check(torch.device("cuda", 0), sizes, tuple(options.parts))
    write(options, found)
    return 1 if any("error" in part for part in found["parts"].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
