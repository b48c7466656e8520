"""Random searches for tests of the planner: trials over value lists, and the oracle that counts prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.driver.driver import Driver
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import StageFailed, StateKey, TargetAsked, TrialAdded, TrialId
from hpstage.plan.log import open_plan
from hpstage.plan.messages import WorkerJoined, WorkerLeft
from hpstage.scheduler.answers import Answer
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store.memory import MemoryJournal
from tests.invariants import validate_scheduler

WORKLOAD = StateKey("w" * 32)


def trial(number: int, schedules: dict[str, s.Schedule], steps: int) -> TrialAdded:
    return TrialAdded(TrialId(f"study/{number}"), schedules, steps)


@st.composite
def schedules(draw: st.DrawFn, steps: int) -> s.Schedule:
    """Few values and few forms, so that prefixes coincide often, also between differently written schedules."""
    kind = draw(st.sampled_from(["constant", "piecewise", "linear", "sampled"]))
    value = draw(st.sampled_from([1, 2]))
    if kind == "constant":
        return s.constant(value)
    if kind == "linear":
        return s.linear(value, start_factor=1.0, end_factor=3.0, total_iters=draw(st.sampled_from([2, 4])))
    if kind == "sampled":
        return s.sampled(draw(st.lists(st.sampled_from([1, 2]), min_size=steps, max_size=steps)), steps)
    cut = draw(st.integers(1, steps))
    return s.piecewise({0: value, cut: draw(st.sampled_from([1, 2, 3]))})


@st.composite
def searches(draw: st.DrawFn, steps: int = 8, most: int = 8) -> list[TrialAdded]:
    count = draw(st.integers(1, most))
    return [trial(i, {"a": draw(schedules(steps)), "b": draw(schedules(steps))}, steps) for i in range(count)]


def histories(trials: Sequence[TrialAdded], stops: Sequence[int]) -> set[tuple[object, ...]]:
    """Every distinct non-empty prefix of the trials' values: what a perfect tree trains, one step each."""
    seen: set[tuple[object, ...]] = set()
    for added, stop in zip(trials, stops, strict=True):
        names = sorted(added.schedules)
        line = tuple(tuple(added.schedules[name].value(step) for name in names) for step in range(stop))
        seen.update(line[:length] for length in range(1, stop + 1))
    return seen


class Search:
    """A driver on simulated workers, its parts within reach."""

    def __init__(self, executor: SimulatedExecutor, journal: MemoryJournal | None = None, **options: object) -> None:
        self.executor = executor
        self.journal = MemoryJournal() if journal is None else journal
        self.plan = open_plan(self.journal, WORKLOAD, {}, sharing=bool(options.pop("sharing", True)))
        every = options.pop("checkpoint_every", 10**9)
        options.setdefault("audit_seed", "0")  # else the plan's id, which is drawn
        self.scheduler = Scheduler(self.plan, checkpoint_every=every, widest=executor.widest, **options)  # type: ignore[arg-type]
        self.driver = Driver(self.plan, self.scheduler, executor, self.journal)

    def run(self, trials: Sequence[TrialAdded], stops: Sequence[int], *, validate: bool = True) -> list[Answer]:
        """Ask for every trial up to its stop and wait for all answers."""
        self.driver.add(trials)
        for added, stop in zip(trials, stops, strict=True):
            self.driver.ask(added.trial, stop)
        return self.answers(len(trials), validate=validate)

    def answers(self, count: int, *, validate: bool = True) -> list[Answer]:
        answers: list[Answer] = []
        for _ in range(10_000):
            if len(answers) >= count:
                break
            answers += self.driver.wait()
            if validate:
                validate_scheduler(self.scheduler)
        assert len(answers) == count, "the search hangs"
        self.driver.finish()
        if validate:
            validate_scheduler(self.scheduler)
        return answers


def failures_after(losses: Iterable[WorkerLeft]) -> list[StageFailed]:
    """How a trial fails whose workers leave one after the other in its first stage."""
    plan = open_plan(MemoryJournal(), WORKLOAD, {})
    scheduler = Scheduler(plan, checkpoint_every=10**9)
    scheduler.fold(TrialAdded(TrialId("t"), {"a": s.constant(1)}, 8))
    scheduler.fold(TargetAsked(TrialId("t"), 8))
    failures: list[StageFailed] = []
    for left in losses:
        scheduler.note(WorkerJoined(left.worker, left.at - 0.5))
        for claim in scheduler.propose():
            scheduler.fold(claim)
        for fact in scheduler.decide(left):
            scheduler.fold(fact)
            failures += [fact] if isinstance(fact, StageFailed) else []
        scheduler.note(left)
        validate_scheduler(scheduler)
    return failures
