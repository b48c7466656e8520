"""Random journals of every kind of fact, in an order that is allowed, whatever it means."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from hpstage import schedule as s
from hpstage.plan.checks import FORMAT, check
from hpstage.plan.facts import (
    Audited,
    ChainClosed,
    ChainId,
    ChainLost,
    ChainProlonged,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    ForkedFrom,
    ForkVerified,
    InputsRead,
    Kept,
    Part,
    PlanCreated,
    RandomState,
    SearchEnded,
    SearchStarted,
    Span,
    StageFailed,
    StateDiffers,
    StateKey,
    StateLost,
    StateReached,
    StepsTimed,
    TargetAsked,
    TrainingEnded,
    TrialAdded,
    TrialEnded,
    TrialId,
    TrialProposed,
    UserFailure,
    WorkerId,
    WorkersChanged,
)
from hpstage.plan.nodes import Node
from hpstage.plan.plan import SearchPlan
from tests.unit.searches import WORKLOAD

STEPS = 12
_NAMES = ("a", "b")
_FAILURE = UserFailure("ValueError: no", "a traceback", ("builtins.ValueError", "builtins.Exception"))


def journal(seed: int, length: int, *, sharing: bool = True) -> list[Fact]:
    """Return facts that each pass the checks against those before."""
    source = _Source(random.Random(seed), SearchPlan(WORKLOAD, sharing=sharing))
    found: list[Fact] = [PlanCreated(FORMAT, WORKLOAD, {}, f"plan {seed}")]
    source.plan.apply(found[0])
    for fact in source.facts():
        check(source.plan, fact)
        source.plan.apply(fact)
        found.append(fact)
        if len(found) >= length:
            break
    return found


class _Source:
    def __init__(self, choose: random.Random, plan: SearchPlan) -> None:
        self.choose = choose
        self.plan = plan
        self.now = 0.0
        self.numbers = 0

    def facts(self) -> Iterator[Fact]:
        kinds: list[tuple[Callable[[], Fact | None], int]] = [
            (self.added, 6),
            (self.requested, 10),
            (self.reached, 14),
            (self.lost, 2),
            (self.differs, 1),
            (self.verified, 1),
            (self.audited, 1),
            (self.failed, 1),
            (self.training_ended, 1),
            (self.chain_lost, 2),
            (self.chain, 4),
            (self.driver, 2),
            (self.workers, 2),
            (self.search, 2),
            (self.proposed, 5),
            (self.ended, 4),
            (self.timed, 1),
            (self.read, 1),
        ]
        makers, weights = zip(*kinds, strict=True)
        while True:
            self.now += self.choose.random()
            fact = self.choose.choices(makers, weights)[0]()
            if fact is not None:
                yield fact

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def study(self) -> str:
        return self.choose.choice(["study", "another/study", "dürer"])

    def node(self) -> Node | None:
        return self.choose.choice(self.plan.nodes) if self.plan.nodes else None

    def trial(self) -> TrialId | None:
        return self.choose.choice([*self.plan.trials]) if self.plan.trials else None

    def schedule(self) -> s.Schedule:
        match self.choose.randrange(6):
            case 0:
                return s.constant(self.choose.choice([True, False, "adam", None, 1, 0.5]))
            case 1:
                return s.linear(1, start_factor=0.5, end_factor=3.0, total_iters=self.choose.choice([2, 4]))
            case 2:
                return s.sampled([self.choose.choice([1, 2]) for _ in range(STEPS)], STEPS)
            case _:
                return s.piecewise({0: self.choose.choice([1, 2]), self.choose.randint(1, STEPS): 0.1})

    def added(self) -> Fact | None:
        if self.plan.trials and self.choose.random() < 0.2:
            known = self.plan.trials[self.choose.choice([*self.plan.trials])]
            if known.requested < known.steps and self.choose.random() < 0.5:
                return TrialAdded(known.id, known.schedules, known.steps, (known.requested + 1,))
            longer = {name: each.until(known.steps).then(self.schedule()) for name, each in known.schedules.items()}
            steps = known.steps + 3
            return TrialAdded(known.id, {name: _up_to(each, steps) for name, each in longer.items()}, steps)
        keep_at = (self.choose.randint(1, STEPS),) if self.choose.random() < 0.2 else ()
        plateaus = {}
        if self.choose.random() < 0.1:
            plateau = s.plateau(0.1, every=2)
            assert isinstance(plateau, s.Plateau)
            plateaus["a"] = plateau
        names = _NAMES if self.choose.random() < 0.7 else _NAMES[:1]
        schedules = {name: self.schedule() for name in names}
        id = TrialId(f"{self.study()}/{self.number()}")
        return TrialAdded(id, schedules, STEPS, keep_at, plateaus)

    def requested(self) -> Fact | None:
        trial = self.trial()
        if trial is None:
            return None
        driver = self.choose.choice([*self.plan.drivers, DriverId(""), DriverId("gone")])
        return TargetAsked(trial, self.choose.randint(1, self.plan.trials[trial].steps), driver)

    def parts(self) -> tuple[tuple[Part, ...], int | None]:
        chosen = self.choose.sample(range(3), self.choose.choice([0, 0, 1, 2]))
        parts = tuple(Part(StateKey(f"part-{number}"), 100 * number) for number in chosen)
        return parts, self.choose.randrange(100) if parts else None

    def reached(self) -> Fact | None:
        node = self.node()
        if node is None:
            return None
        last = max(node.extent, node.start + 1)
        step = self.choose.randint(node.start + 1, last)
        start = step if self.choose.random() < 0.2 else self.choose.randint(node.start, step)
        kept = None
        if self.choose.random() < 0.6:
            key = self.plan.key(node, step)
            kept = Kept(key, self.choose.randrange(1000), self.choose.choice([key, "a digest"]), "marks", *self.parts())
        metrics = {"value": self.choose.choice([0.5, "nan", "inf", self.choose.random()])}
        if self.choose.random() < 0.2:
            metrics["other"] = 1.0
        return StateReached(
            ChainId(self.choose.choice([*self.plan.chains, "chain"])),
            WorkerId("worker"),
            node.id,
            start,
            step,
            self.now,
            self.choose.random(),
            load_seconds=0.25,
            evaluate_seconds=0.5,
            source=self.choose.choice(["fresh", "live", "disk", None]),
            metrics=metrics if self.choose.random() < 0.6 else None,
            kept=kept,
            peak_bytes=self.choose.choice([None, None, 7]),
        )

    def lost(self) -> Fact | None:
        states = [*self.plan.kept.values()]
        if not states:
            return None
        state = self.choose.choice(states)
        return StateLost(state.node.id, state.step, self.choose.choice(["evicted", "unreadable"]))

    def differs(self) -> Fact | None:
        node = self.node()
        return node and StateDiffers(node.id, node.start + 1, WorkerId("w"), self.now, None, ("one", "another"))

    def verified(self) -> Fact | None:
        node = self.node()
        difference = self.choose.choice([None, None, "a leaf"])
        return node and ForkVerified(ChainId("c"), WorkerId("w"), node.id, node.start + 1, 1, 0.5, self.now, difference)

    def audited(self) -> Fact | None:
        node = self.node()
        outcome = self.choose.choice(["equal", "equal", "stopped", "failed", "differs"])
        return node and Audited("segment", WorkerId("w"), node.id, 0, node.start + 1, self.now, 0.5, outcome, 1)

    def failed(self) -> Fact | None:
        node = self.node()
        if node is None or self.choose.random() < 0.5:
            return None
        step = self.choose.randint(node.start, max(node.start, node.extent - 1))
        return StageFailed(node.id, step, self.choose.random() < 0.5, _FAILURE)

    def training_ended(self) -> Fact | None:
        node = self.node()
        if node is None or self.choose.random() < 0.5:
            return None
        evaluated = [state.step for state in node.states.values() if state.metrics is not None]
        complete = bool(evaluated) and self.choose.random() < 0.5
        step = self.choose.choice(evaluated) - 1 if complete else self.choose.randint(node.start, node.extent)
        outcome = "complete" if complete else "pruned"
        return TrainingEnded(ChainId("c"), WorkerId("w"), node.id, step, self.now, outcome)

    def chain_lost(self) -> Fact | None:
        node = self.node()
        outcome = self.choose.choice(["died", "lost", "stopped", "closed"])
        return node and ChainLost(ChainId("c"), WorkerId("w"), node.id, node.start + 1, self.now, outcome, 0.5, 2)

    def chain(self) -> Fact | None:
        node = self.node()
        if node is None:
            return None
        span = Span(node.id, node.start, max(node.extent, node.start + 1))
        chains = [*self.plan.chains]
        if chains and self.choose.random() < 0.3:
            return ChainClosed(self.choose.choice(chains), self.now)
        if chains and node.parent is not None and self.choose.random() < 0.3:
            return ChainProlonged(self.choose.choice(chains), (span,))
        driver = self.choose.choice([*self.plan.drivers, DriverId("")])
        return ChainStarted(ChainId(f"chain {self.number()}"), driver, WorkerId("worker"), (span,), self.now)

    def driver(self) -> Fact:
        drivers = [*self.plan.drivers]
        if drivers and self.choose.random() < 0.6:
            return DriverLeft(self.choose.choice(drivers), self.now, "ended")
        return DriverJoined(DriverId(f"driver {self.number()}"), "pool", "host", 1, self.now, "a place")

    def workers(self) -> Fact | None:
        drivers = [*self.plan.drivers]
        if not drivers:
            return None
        driver = self.choose.choice(drivers)
        some = tuple(WorkerId(f"worker-{self.choose.randrange(4)}") for _ in range(2))
        joined, left = self.choose.choice([(some, ()), ((), some)])
        return WorkersChanged(driver, self.now, self.plan.drivers[driver].pool, joined, left)

    def search(self) -> Fact | None:
        study = self.study()
        if study in self.plan.searches and self.choose.random() < 0.3:
            return SearchEnded(study, self.now)
        metrics, directions = self.choose.choice(
            [(("value",), ("minimize",)), (("value",), ("maximize",)), (("value", "other"), ("minimize", "maximize"))]
        )
        extends = study in self.plan.searches and self.choose.random() < 0.5
        return SearchStarted(
            study,
            "ASHA()",
            metrics,
            STEPS,
            None,
            "TPE",
            self.now,
            extends,
            identity=study,
            directions=directions,
            defaults=self.choose.choice([{}, {"b": 1}, {"c": "absent"}]),
        )

    def proposed(self) -> Fact | None:
        study = self.study()
        if study not in self.plan.searches:
            return None
        if self.choose.random() < 0.1:
            return TrialProposed(study, None, None, {"sampler": RandomState(3, 0, 0.5, "a key")})
        trial = self.choose.choice([*self.plan.trials, TrialId(f"{study}/{self.number()}")])
        fork = ForkedFrom(trial, 3, {"lr": "0.5"}) if self.choose.random() < 0.2 else None
        states = {"sampler": RandomState(3, 0, 0.5, None)}
        params = {"lr": 0.1, "on": True, "name": "adam", "n": 3, "none": None}
        return TrialProposed(study, self.number(), trial, states, fork, self.choose.choice([None, trial]), params)

    def ended(self) -> Fact | None:
        trial = self.trial()
        study = self.study()
        if trial is None or study not in self.plan.searches:
            return None
        count = len(self.plan.searches[study].started.directions)
        values = tuple(self.choose.choice([0.5, self.choose.random(), "nan"]) for _ in range(count))
        state = self.choose.choice(["COMPLETE", "COMPLETE", "PRUNED", "FAIL"])
        feasible = self.choose.random() < 0.9
        return TrialEnded(study, trial, state, values if state != "FAIL" else None, 3, self.now, feasible)

    def read(self) -> Fact:
        name = self.choose.choice(["file data/x", "variable X"])
        return InputsRead(ChainId("c"), WorkerId("w"), self.now, {name: self.choose.choice(["", "one", "one"])})

    def timed(self) -> Fact:
        return StepsTimed(((1, 0.5), (2, 0.75)), self.now)


def _up_to(schedule: s.Schedule, steps: int) -> s.Schedule:
    length = schedule.length
    return schedule.until(steps) if length is None or length >= steps else schedule.then(1).until(steps)
