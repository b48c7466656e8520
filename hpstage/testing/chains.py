"""Chains for the tests of executors, and how to wait for their reports."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpstage.executor import Executor
from hpstage.plan.facts import ChainId, NodeId, StateKey, StateReached, WorkerId
from hpstage.plan.keys import ValueHistory
from hpstage.plan.messages import Boundary, BoundaryReached, Chain, ChainEnded, Report, Stage, WorkerJoined
from hpstage.schedule import Constant, Scalar

NODE = NodeId(1)


def key(step: int) -> StateKey:
    return StateKey(f"{step:032x}")


def stage(start: int, stop: int, x: Scalar = 1.0) -> Stage:
    return Stage(NODE, start, stop, {"x": Constant(x)}, seen(x).digest)


def seen(x: Scalar = 1.0) -> ValueHistory:
    """Return the history of a trial in which ``x`` is constant."""
    return ValueHistory.new(StateKey("w" * 32), ["x"]).changed(0, [("x", x)])


def boundary(step: int) -> Boundary:
    """Return a boundary at which the state is evaluated and saved."""
    return Boundary(NODE, step, key(step), evaluate=True, keep=True)


def chain(name: str, stop: int, *boundaries: int, start: int = 0, x: Scalar = 1.0) -> Chain:
    """Return a chain of steps ``[start, stop)`` with boundaries at ``boundaries`` and ``stop``. It begins with the
    saved state at ``start``, or with a new state if ``start`` is 0."""
    return Chain(
        id=ChainId(name),
        source=key(start) if start else None,
        initial={"x": x},
        stages=(stage(start, stop, x),),
        boundaries=tuple(boundary(step) for step in sorted({*boundaries, stop})),
    )


def until(executor: Executor, enough: Callable[[list[Report]], bool], seconds: float = 120.0) -> list[Report]:
    """Wait for reports until ``enough(reports)``, for at most ``seconds``. Return the reports."""
    reports: list[Report] = []
    deadline = time.monotonic() + seconds
    while not enough(reports):
        assert time.monotonic() < deadline, f"in {seconds} s, only these reports arrived: {reports}"
        reports += executor.wait(0.2)
    return reports


def workers(executor: Executor, count: int = 2) -> list[WorkerId]:
    """Wait until ``count`` workers have joined. Return the workers."""
    joined = until(executor, lambda seen: sum(isinstance(report, WorkerJoined) for report in seen) == count)
    return [report.worker for report in joined if isinstance(report, WorkerJoined)]


def ended(executor: Executor, *names: str) -> list[Report]:
    """Wait until all named chains have ended. Return the reports."""

    def enough(seen: list[Report]) -> bool:
        return {report.chain for report in seen if isinstance(report, ChainEnded)} >= set(names)

    return until(executor, enough)


def outcome(reports: list[Report], name: str) -> ChainEnded:
    """Return the only ``ChainEnded`` of a chain."""
    [end] = [report for report in reports if isinstance(report, ChainEnded) and report.chain == name]
    return end


def reached(reports: list[Report], name: str) -> list[StateReached]:
    return [r.reached for r in reports if isinstance(r, BoundaryReached) and r.reached.chain == name]
