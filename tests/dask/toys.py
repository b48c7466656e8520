"""What the tests of the Dask executor train, the chains that they hand it, and how they wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpstage.cluster import DaskExecutor
from hpstage.plan.facts import ChainId, NodeId, StateKey, StateReached, WorkerId
from hpstage.plan.keys import History
from hpstage.plan.messages import Boundary, BoundaryReached, Chain, ChainEnded, Report, Stage, WorkerJoined
from hpstage.schedule import Constant, Scalar

NODE = NodeId(1)


class Counter:
    """Trains by counting. With a gate, step ``held`` and those after it wait until the file ``gate`` is there."""

    def __init__(self, gate: Path | None = None, held: int = 0) -> None:
        self.gate = str(gate) if gate else None
        self.held = held
        self.total = 0.0

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.total = 0.0

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if self.gate is not None and step >= self.held:
            Path(self.gate + ".reached").touch()
            while not os.path.exists(self.gate):
                os.sched_yield()
        if hp["x"] == "boom":
            raise ArithmeticError(f"boom at step {step}")
        self.total += float(hp["x"] or 0)

    def evaluate(self) -> dict[str, float]:
        return {"total": self.total, "pid": float(os.getpid())}

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, dict)
        self.total = state["total"]


def key(step: int) -> StateKey:
    return StateKey(f"{step:032x}")


def stage(start: int, stop: int, x: Scalar = 1.0) -> Stage:
    return Stage(NODE, start, stop, {"x": Constant(x)}, seen(x).digest)


def seen(x: Scalar = 1.0) -> History:
    """The values of a line that has never seen another ``x``."""
    return History.new(StateKey("w" * 32), ["x"]).changed(0, [("x", x)])


def boundary(step: int) -> Boundary:
    """Evaluated and kept."""
    return Boundary(NODE, step, key(step), evaluate=True, keep=True)


def chain(name: str, stop: int, *boundaries: int, start: int = 0, x: Scalar = 1.0) -> Chain:
    """Steps ``[start, stop)``, from the kept state at ``start``, with boundaries at ``boundaries`` and the end."""
    return Chain(
        id=ChainId(name),
        source=key(start) if start else None,
        source_ref=None,
        initial={"x": x},
        stages=(stage(start, stop, x),),
        boundaries=tuple(boundary(step) for step in sorted({*boundaries, stop})),
    )


def until(executor: DaskExecutor, enough: Callable[[list[Report]], bool], seconds: float = 120.0) -> list[Report]:
    """Reports up to and with those that are enough."""
    reports: list[Report] = []
    deadline = time.monotonic() + seconds
    while not enough(reports):
        assert time.monotonic() < deadline, f"after {seconds} s there was only {reports}"
        reports += executor.wait(0.2)
    return reports


def workers(executor: DaskExecutor, count: int = 2) -> list[WorkerId]:
    joined = until(executor, lambda seen: sum(isinstance(report, WorkerJoined) for report in seen) == count)
    return [report.worker for report in joined if isinstance(report, WorkerJoined)]


def ended(executor: DaskExecutor, *names: str) -> list[Report]:
    """Reports until all these chains have ended."""

    def enough(seen: list[Report]) -> bool:
        return {report.chain for report in seen if isinstance(report, ChainEnded)} >= set(names)

    return until(executor, enough)


def outcome(reports: list[Report], name: str) -> ChainEnded:
    """The one end of a chain."""
    [end] = [report for report in reports if isinstance(report, ChainEnded) and report.chain == name]
    return end


def reached(reports: list[Report], name: str) -> list[StateReached]:
    return [r.reached for r in reports if isinstance(r, BoundaryReached) and r.reached.chain == name]


def wait_for(path: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come within {seconds} s"
        os.sched_yield()
