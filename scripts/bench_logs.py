"""What logging costs: a call, a step that logs, and a boundary that keeps a log.

    python scripts/bench_logs.py

Prints JSON. Calls are measured in processor time, each the best of several rounds, so that other work on the machine
hardly shows; a step of a millisecond is what they are compared with.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hpstage.checkpoints import FolderCheckpoints
from hpstage.execution.recording import Recording, release_streams
from hpstage.plan.facts import StateKey
from hpstage.training.step_log import Recorder, log

_CALLS, _ROUNDS = 20_000, 7
_STEP = 1e-3  # seconds


def seconds_per_call(work: Callable[[int], object]) -> float:
    """Return the processor seconds of a call, in the best of several rounds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.process_time()
        for index in range(_CALLS):
            work(index)
        best = min(best, (time.process_time() - began) / _CALLS)
    return best


def logging(value: object) -> Callable[[int], object]:
    """A call of ``log`` in a step of its own, with all that is done later with its value."""
    recorder = Recorder(0)

    def work(step: int) -> None:
        recorder.step = step
        log("train_loss", value)

    def within(step: int) -> None:
        work(step)
        if step == _CALLS - 1:
            recorder.take(_CALLS)

    Recording(recorder).__enter__()
    return within


def step_of(recorder: Recorder, value: torch.Tensor) -> Callable[[int], object]:
    """What the runner does around a step that logs its loss, and the call."""

    def work(step: int) -> None:
        recorder.step = step
        with Recording(recorder):
            log("train_loss", value)

    return work


def main() -> None:
    torch.set_num_threads(1)
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    nothing = seconds_per_call(lambda step: None)
    calls = {
        "a float": seconds_per_call(logging(0.25)) - nothing,
        "a tensor": seconds_per_call(logging(torch.tensor(0.25))) - nothing,
        "a loss with its graph": seconds_per_call(logging(loss)) - nothing,
    }
    recorder = Recorder(0)
    step = seconds_per_call(step_of(recorder, loss)) - nothing
    release_streams()
    for index in range(_CALLS):
        recorder.step = index
        recorder.log("train_loss", 1 / (index + 1))
    began = time.perf_counter()
    taken = recorder.take(_CALLS)
    took = time.perf_counter() - began
    assert taken is not None
    with tempfile.TemporaryDirectory() as folder:
        store = FolderCheckpoints(Path(folder), "bench")
        best = float("inf")
        for number in range(50):
            began = time.perf_counter()
            store.save_log(StateKey(f"{number:032x}"), taken)
            best = min(best, time.perf_counter() - began)
        size = max(store.logs().values())
    print(
        json.dumps(
            {
                "microseconds per call": {name: round(1e6 * seconds, 2) for name, seconds in calls.items()},
                "microseconds of a step that logs its loss": round(1e6 * step, 2),
                "percent of a step of 1 ms": round(100 * step / _STEP, 2),
                "milliseconds to sum up 20,000 values": round(1e3 * took, 2),
                "milliseconds to keep the log of a stage": round(1e3 * best, 2),
                "bytes of it": size,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
