"""Simulates the rest of a search: its algorithm in the current state, further trials similar to the earlier ones, and
made-up values.

Which trials an algorithm will promote is unknown, but hardly affects how many it promotes, and to which step. Future
values are therefore drawn from those reported at the same step, or are the trial's last one. Workers take the longest
remaining path first, and each step is trained once, as in the stage tree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from hpstage.algorithm import Action, Ask, Finish, Fork, Trials
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.list_schedule import ListSchedule
from hpstage.search.history import History

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from hpstage.search.trials import SessionTrial

# Upper bound on the number of simulated results; the time for the others is extrapolated.
_MOST = 20_000


class Stretch(NamedTuple):
    """Steps ``(start, stop]`` of a branch, at ``pace`` seconds per step. A branch is the id of a node, or a negative
    number for a made-up trial."""

    branch: int
    start: int
    stop: int
    pace: float


class _Cast(Trials):
    """The trials of a search, and made-up ones that resemble them.

    A made-up trial resembles one from the later half of the trials: it leaves the tree at the same step, and shares
    nothing after that. If later trials shared more of their steps than earlier ones, an increasing share of the made-up
    trials shares all of them, as later pages of a text contain fewer new words (Heaps' law).
    """

    def __init__(self, history: History, trials: Sequence[SessionTrial], plan: SearchPlan, random: Random) -> None:
        self._known = history.look_ups
        self._trials = trials
        self._plan = plan
        self._random = random
        self._paths: dict[int, list[Stretch]] = {}
        self._models: dict[int, tuple[int, int]] = {}  # made-up trial: the trial it resembles, and until which step
        self._later: list[tuple[int, int]] | None = None
        self._growth = 1.0
        self._decided: dict[int, list[bool]] = {}  # the decisions of the study's pruner at each step
        for (_, step), pruned in history.look_ups.pruned.items():
            self._decided.setdefault(step, []).append(pruned)
        totals = plan.totals
        self._overhead = 1.0 + (totals.load_seconds + totals.save_seconds) / (totals.train_seconds or math.inf)

    def path(self, index: int) -> list[Stretch]:
        """Return the stretches that a trial is trained on; none if it cannot be trained."""
        known = self._paths.get(index)
        if known is not None:
            return known
        if index < len(self._trials):
            planned = self._plan.trials.get(self._trials[index].id)
            ways = [] if planned is None else planned.path_to(planned.steps)
            found = [
                Stretch(node.id, start, stop, self._plan.step_seconds(node) * self._overhead)
                for node, start, stop in ways
            ]
        else:
            model, until = self._model(index)
            theirs = self.path(model)
            found = [
                Stretch(way.branch, way.start, min(way.stop, until), way.pace) for way in theirs if way.start < until
            ]
            end = theirs[-1].stop if theirs else 0
            if until < end:
                found.append(Stretch(-1 - index, until, end, self._plan.totals.average_step_seconds * self._overhead))
        self._paths[index] = found
        return found

    def fork(self, index: int, fork: Fork) -> None:
        """Make up the trial that an algorithm forks."""
        self._models[index] = fork.donor, fork.step

    def _model(self, index: int) -> tuple[int, int]:
        model = self._models.get(index)
        if model is None:
            if self._later is None:
                self._later, self._growth = self._branch_points()
            template, until = self._random.choice(self._later)
            # The middle of the later half is at 3/4 of the trials.
            fresh = ((index + 1) / (0.75 * len(self._trials))) ** (self._growth - 1.0)
            if self._random.random() > fresh:
                until = self.path(template)[-1].stop if self.path(template) else 0
            model = self._models[index] = template, until
        return model

    def _branch_points(self) -> tuple[list[tuple[int, int]], float]:
        """Return the trials of the later half, each with the step at which it left the tree of those before it, and the
        exponent with which the steps of the tree grow with the number of trials."""
        reach: dict[int, int] = {}
        found = []
        early = late = 0
        for index in range(len(self._trials)):
            path = self.path(index)
            until = path[-1].stop if path else 0
            for branch, start, stop, _ in path:
                known = reach.get(branch, start)
                if stop > known:
                    until = min(until, known)
                    reach[branch] = stop
            new = (path[-1].stop if path else 0) - until
            if 2 * index >= len(self._trials) - 1:
                found.append((index, until))
                late += new
            else:
                early += new
        return found, min(1.0, math.log2(1.0 + late / early)) if early else 1.0

    def prefix(self, index: int, step: int) -> Hashable:
        if index < len(self._trials):
            return self._known.prefix(index, step)
        model, until = self._model(index)
        path = self.path(index)
        at = min(step, path[-1].stop if path else 0)
        return self.prefix(model, step) if at <= until else (index, at)

    def params(self, index: int) -> Mapping[str, tuple[Any, BaseDistribution]]:
        return self._known.params(index) if index < len(self._trials) else self.params(self._model(index)[0])

    def should_prune(self, index: int, step: int) -> bool:
        known = self._known.pruned.get((index, step))
        if known is not None:
            return known
        decided = self._decided.get(step) or [one for others in self._decided.values() for one in others]
        return bool(decided) and self._random.choice(decided)


class _Branches:
    """The steps trained on each branch before and during the simulation, and their times."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._reach: dict[int, int] = {}
        self._played: dict[int, list[tuple[int, int, float, float]]] = {}  # start, stop, time at start, pace

    def reach(self, way: Stretch) -> int:
        """Return the step up to which a branch is trained, or will be according to the simulation so far."""
        known = self._reach.get(way.branch)
        if known is None:
            known = way.start
            if way.branch >= 0:
                node = self._plan.nodes[way.branch]
                known = min(node.start + node.trained, node.extent)
            self._reach[way.branch] = known
        return known

    def advance(self, chain: OpenChain, seconds: float) -> None:
        """Count the steps that a running chain has trained since its last report."""
        at = chain.at
        for span in chain.spans[chain.index_at(at) :]:
            pace = self._plan.step_seconds(self._plan.nodes[span.node])
            steps = min(span.stop - max(at, span.start), int(seconds / pace) if pace else 0)
            start = self.reach(Stretch(span.node, span.start, span.stop, pace))
            self._reach[span.node] = max(start, max(at, span.start) + steps)
            seconds -= steps * pace
            if max(at, span.start) + steps < span.stop:
                return

    def todo(self, path: Sequence[Stretch], step: int) -> tuple[int, int, float]:
        """Return where training of a path up to ``step`` has to start: the index of the stretch (the number of
        stretches if nothing is left to train), the step, and the time at which the state at that step is trained."""
        ready = 0.0
        for place, way in enumerate(path):
            if way.start >= step:
                return len(path), step, ready
            stop = min(way.stop, step)
            reach = max(way.start, self.reach(way))
            if reach > way.start:
                ready = self._trained_at(way.branch, min(reach, stop))
            if reach < stop:
                return place, reach, ready
        return len(path), step, ready

    def _trained_at(self, branch: int, step: int) -> float:
        for start, stop, began, pace in reversed(self._played.get(branch, ())):
            if start < step <= stop:
                return began + (step - start) * pace
        return 0.0

    def train(self, path: Sequence[Stretch], place: int, start: int, step: int, now: float) -> float:
        """Train a path from its stretch ``place`` on up to ``step``, and return the time at which it is trained."""
        for way in path[place:]:
            stop = min(way.stop, step)
            if stop <= start:
                break
            self._played.setdefault(way.branch, []).append((start, stop, now, way.pace))
            self._reach[way.branch] = max(stop, self.reach(way))
            now += (stop - start) * way.pace
            start = stop
        return now


_Target = tuple[int, int]


class Forecast:
    """Simulates a search to its end.

    Args:
        history: the results that its algorithm has received so far.
        trials: its trials so far.
        more: number of further trials that the sampler will propose.
        running: running chains, each with the seconds since its last report.
        workers: number of workers, each of which trains one chain at a time.
        seed: of the made-up trials and values.
    """

    def __init__(
        self,
        history: History,
        trials: Sequence[SessionTrial],
        plan: SearchPlan,
        *,
        more: int,
        running: Iterable[tuple[OpenChain, float]],
        workers: float,
        seed: int,
    ) -> None:
        self._random = Random(seed)
        self._cast = _Cast(history, trials, plan, self._random)
        self._search = history.again(self._cast)
        self._reported_at = {step: tuple(values) for step, values in self._search.values.items()}  # before simulating
        # By length, results are reported about as they arrive.
        self._synchronous = history.synchronous and not history.by_length
        self._more = more
        self._next = len(trials)
        self._over_before = len(self._search.over)
        self._branches = _Branches(plan)
        for chain, seconds in running:
            self._branches.advance(chain, seconds)
        self._evaluate_seconds = plan.totals.average_evaluate_seconds
        # An event is a target, whether it is done (else its start state is ready), and whether a worker was busy.
        self._schedule: ListSchedule[_Target, tuple[_Target, bool, bool]] = ListSchedule(max(1, round(workers)))
        self._order: deque[_Target] = deque()  # open targets in the order of their requests
        self._done: set[_Target] = set()
        self._values: dict[Hashable, float] = {}
        self.results = 0
        self._trained: list[tuple[float, float]] = []  # start and end of each target that a worker has trained

    def seconds(self) -> float:
        """Return the seconds until the search is finished."""
        return self._play(math.inf)

    def trained(self, until: float) -> list[tuple[float, float]]:
        """Return the start and the end, in seconds from now, of each target that a worker starts before ``until``."""
        self._play(until)
        return self._trained

    def _play(self, until: float) -> float:
        """Simulate up to a time, or to the end of the search; return the time reached."""
        for target in list(self._search.open):
            self._ask(target)
        self._propose()
        while True:
            self._dispatch()
            event = self._schedule.advance(until)
            if event is None:
                return self._schedule.now
            target, done, worked = event
            self._schedule.free += worked
            if not done:
                self._place(target)
                continue
            self._done.add(target)
            self._complete(target)
            if self.results > _MOST:
                over = len(self._search.over)
                left = self._more + self._next - over
                # Where the simulation has ended no trial, assume that each trial left needs one more result.
                return self._schedule.now * (1.0 + left / (over - self._over_before or self.results))

    def _complete(self, target: _Target) -> None:
        if not self._synchronous:
            self._done.discard(target)
            self._report(target)
            return
        while self._order and self._order[0] in self._done:
            first = self._order.popleft()
            self._done.discard(first)
            self._report(first)

    def _report(self, target: _Target) -> None:
        index, step = target
        self.results += 1
        self._perform(self._search.reported(index, step, self._value(index, step)))
        self._propose()

    def _propose(self) -> None:
        while self._more and self._search.room() > 0:
            self._more -= 1
            self._perform(self._search.added(self._take()))
        if not self._more and not self._search.is_closed:
            self._perform(self._search.closed())

    def _take(self) -> int:
        self._next += 1
        return self._next - 1

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Ask(index, step):
                    self._ask((index, step))
                case Fork():
                    index = self._take()
                    self._cast.fork(index, action)
                    self._perform(self._search.forked(index, action))
                case Finish():
                    pass

    def _ask(self, target: _Target) -> None:
        self._order.append(target)
        self._place(target)

    def _place(self, target: _Target) -> None:
        """Queue a target for a worker, or first for the state that its training starts from."""
        index, step = target
        path = self._cast.path(index)
        place, start, ready = self._branches.todo(path, step)
        if place == len(path):  # trained, or soon will be; evaluated concurrently
            known = (self._cast.prefix(index, step), step) in self._values
            at = max(self._schedule.now, ready) + (0.0 if known else self._evaluate_seconds)
            self._schedule.at(at, (target, True, False))
        elif ready > self._schedule.now:
            self._schedule.at(ready, (target, False, False))
        else:
            left = sum(
                (min(way.stop, step) - max(way.start, start)) * way.pace for way in path[place:] if way.start < step
            )
            self._schedule.wait(left, target)

    def _dispatch(self) -> None:
        schedule = self._schedule
        for target in schedule.take():
            path, step = self._cast.path(target[0]), target[1]
            place, start, ready = self._branches.todo(path, step)
            if place == len(path) or ready > schedule.now:
                self._place(target)  # its steps are being trained for another target
                continue
            at = self._branches.train(path, place, start, step, schedule.now) + self._evaluate_seconds
            schedule.free -= 1
            self._trained.append((schedule.now, at))
            schedule.at(at, (target, True, True))

    def _value(self, index: int, step: int) -> float:
        """Make up a value: the same for all trials that are equal up to ``step``."""
        state = self._cast.prefix(index, step), step
        value = self._values.get(state)
        if value is None:
            known = self._reported_at.get(step)
            if known:
                one, other = self._random.choice(known), self._random.choice(known)
                value = one + self._random.random() * (other - one) if math.isfinite(one + other) else one
            else:
                value = self._search.last.get(index, self._random.random())
            self._values[state] = value
        return value
