"""Trials that fill a plan, and workers that obey at once: the load of the planner's bench."""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpstage import schedule as s
from hpstage.driver.driver import Driver
from hpstage.execution.course import Course
from hpstage.executor import Environment, Executor
from hpstage.plan.facts import ChainId, Kept, StateKey, StateReached, TrialAdded, TrialId, WorkerId
from hpstage.plan.log import open_plan
from hpstage.plan.messages import Amendment, BoundaryReached, Chain, ChainEnded, Instruction, Report, WorkerJoined
from hpstage.scheduler.dispatch import Claim
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store.memory import MemoryJournal

SEGMENTS, LENGTH = 5, 10
STEPS = SEGMENTS * LENGTH
BATCH = 1000
WORKLOAD = StateKey("0" * 32)


# --- trials ---------------------------------------------------------------------------------------------------


def choices(kind: str, trials: int) -> Iterator[Sequence[int]]:
    """Yield what each trial has chosen in each of its segments."""
    if kind == "distinct":
        for number in range(trials):
            yield [number] * SEGMENTS
        return
    base = 2
    while base**SEGMENTS < trials:
        base += 1
    leaves = list(range(trials))
    random.Random(0).shuffle(leaves)
    for leaf in leaves:
        yield [leaf // base ** (SEGMENTS - 1 - level) % base for level in range(SEGMENTS)]


def schedules(chosen: Sequence[int]) -> dict[str, s.Schedule]:
    starts = range(0, STEPS, LENGTH)
    return {
        "lr": s.piecewise({at: 0.1 / (1 + pick) + 1e-9 * at for at, pick in zip(starts, chosen, strict=True)}),
        "momentum": s.piecewise({at: 0.5 + 1e-7 * pick + 1e-9 * at for at, pick in zip(starts, chosen, strict=True)}),
        "batch_size": s.piecewise({at: 32 + 8 * pick + at for at, pick in zip(starts, chosen, strict=True)}),
    }


def trials_of(chosen: Sequence[Sequence[int]], first: int) -> list[TrialAdded]:
    """Return the next batch of trials, from number ``first`` on, with the chosen schedules."""
    return [
        TrialAdded(TrialId(f"study/{number}"), schedules(chosen[number]), STEPS)
        for number in range(first, min(len(chosen), first + BATCH))
    ]


def insert(driver: Driver, kind: str, trials: int) -> dict[str, float]:
    """Seconds by part."""
    build = add = ask = 0.0
    chosen = list(choices(kind, trials))
    gc.collect()
    for first in range(0, trials, BATCH):
        began = time.process_time()
        batch = trials_of(chosen, first)
        built = time.process_time()
        driver.add(batch)
        added = time.process_time()
        for trial in batch:
            driver.ask(trial.trial, STEPS)
        driver.log.write()
        build, add, ask = build + built - began, add + added - built, ask + time.process_time() - added
    return {"build": build, "add": add, "ask": ask}


# --- a driver without a cluster -------------------------------------------------------------------------------


class Prompt(Executor):
    """Workers that obey at once: the chains that have waited longest reach their next boundaries. A
    step takes a second."""

    def __init__(self, workers: int) -> None:
        self.seconds = 0.0  # spent in this executor
        self.at_a_time = 1  # chains that report at a time
        self._workers = workers
        self._now = 0.0
        self._courses: dict[ChainId, tuple[WorkerId, Course, Chain]] = {}
        self._at: dict[ChainId, int] = {}
        self._queue: deque[ChainId] = deque()
        self._reports: list[Report] = [WorkerJoined(WorkerId(f"worker-{n}"), 0.0) for n in range(workers)]

    def open(self, trainable: object, checkpoints: object) -> Environment:
        return Environment({})

    def use(self, checkpoints: object) -> None: ...

    def try_out(self, initial: Mapping[str, Any]) -> None:
        return None

    def clock(self) -> float:
        return self._now

    def close(self) -> None: ...

    def start(self, worker: WorkerId, chain: Chain) -> None:
        began = time.process_time()
        self._courses[chain.id] = worker, Course(chain), chain
        self._at[chain.id] = chain.stages[0].start
        self._queue.append(chain.id)
        self.seconds += time.process_time() - began

    def amend(self, amendment: Amendment) -> None:
        began = time.process_time()
        if amendment.chain in self._courses:
            self._courses[amendment.chain][1].amend(amendment, self._at[amendment.chain])
        self.seconds += time.process_time() - began

    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        raise NotImplementedError("every chain is wanted here")

    def wait(self, timeout: float | None) -> list[Report]:
        began = time.process_time()
        reports, self._reports = self._reports, []
        if not reports and timeout != 0.0:
            for id in [self._queue.popleft() for _ in range(min(self.at_a_time, len(self._queue)))]:
                reports += self._reach(id)
        self.seconds += time.process_time() - began
        return reports

    def _reach(self, id: ChainId) -> list[Report]:
        worker, course, chain = self._courses[id]
        start, step = self._at[id], min(course.boundaries)
        boundary = course.boundaries.pop(step)
        self._now += LENGTH / self._workers
        reached = StateReached(
            id,
            worker,
            boundary.node,
            start,
            step,
            self._now,
            float(step - start),
            save_seconds=0.01 if boundary.keep else 0.0,
            source=("fresh" if chain.source is None else "disk") if start == chain.stages[0].start else None,
            metrics={"value": int(boundary.key, 16) / 16**32} if boundary.evaluate else None,
            kept=Kept(boundary.key, 1000, boundary.key) if boundary.keep else None,
        )
        self._at[id] = step
        if step != course.end and course.boundaries:
            self._queue.append(id)
            return [BoundaryReached(reached)]
        del self._courses[id], self._at[id]
        return [BoundaryReached(reached), ChainEnded(id, worker, "done", self._now, boundary.node, step)]


class TimedScheduler(Scheduler):
    """Adds up the seconds of choosing."""

    seconds = 0.0

    def propose(self) -> list[Claim]:
        began = time.process_time()
        claims = super().propose()
        self.seconds += time.process_time() - began
        return claims

    def carry_out(self, claims: Iterable[Claim]) -> list[Instruction]:
        began = time.process_time()
        instructions = super().carry_out(claims)
        self.seconds += time.process_time() - began
        return instructions


def new_driver(workers: int) -> tuple[Driver, TimedScheduler, Prompt, MemoryJournal]:
    journal, executor = MemoryJournal(), Prompt(workers)
    plan = open_plan(journal, WORKLOAD, {})
    scheduler = TimedScheduler(plan)
    return Driver(plan, scheduler, executor, journal), scheduler, executor, journal
