"""Runs searches without a study: calls an algorithm as a session does, and checks the laws of its port."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Fork, Setting, Trials

Target = tuple[int, int]
"""A trial's index and a step."""
Value = Callable[[int, int], float]


class Proposed(Trials):
    """Trials with two parameters. A proposed trial's parameters follow from its index; a fork states its own.

    Args:
        lines: for each proposed trial, the values of its hyperparameters, step by step. Trials share their training as
            long as these are equal. A line may end before the last step. By default, trials share nothing.
    """

    distributions: Mapping[str, BaseDistribution] = {
        "lr": FloatDistribution(1e-6, 1e6, log=True),
        "batch": IntDistribution(1, 10**6),
    }

    def __init__(self, lines: Sequence[Sequence[Hashable]] | None = None) -> None:
        self.lines = lines
        self.values: dict[int, Mapping[str, Any]] = {}
        self._forks: dict[int, Fork] = {}

    def add(self, fork: Fork | None = None) -> int:
        """Add a trial. Return its index."""
        index = len(self.values)
        self.values[index] = {"lr": 10.0 ** (index % 5 - 2), "batch": 100 + index} if fork is None else fork.params
        if fork is not None:
            self._forks[index] = fork
        return index

    def prefix(self, index: int, step: int) -> Hashable:
        fork = self._forks.get(index)
        if fork is not None:
            own = () if step <= fork.step else (index,)
            return self.prefix(fork.donor, min(step, fork.step)), own
        return index if self.lines is None else tuple(self.lines[index][:step])

    def params(self, index: int) -> Mapping[str, tuple[Any, BaseDistribution]]:
        return {name: (value, self.distributions[name]) for name, value in self.values[index].items()}


@dataclass
class Played:
    """The events of one search, in order."""

    requested: list[Target] = field(default_factory=list)
    reported: list[Target] = field(default_factory=list)
    forks: list[tuple[int, Fork]] = field(default_factory=list)  # each with the index of its trial
    proposed_after: list[int] = field(default_factory=list)  # for each proposed trial, the number of results before
    ends: dict[int, str] = field(default_factory=dict)
    params: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # empty unless trials are Proposed

    def reached(self) -> dict[int, int]:
        return dict(self.reported)


def play(
    algorithm: Algorithm,
    setting: Setting,
    value: Value,
    *,
    order: Sequence[int] = (),
    failing: Container[Target] = frozenset(),
    ahead: int = 0,
    stop_after: int = 10**9,
    most: int = 10**9,
    trials: Trials | None = None,
) -> Played:
    """Run a search as a session does, without a study, and check along the way that the algorithm does what the
    :class:`~hpstage.algorithm.Algorithm` port requires.

    Args:
        value: returns the value of a target; never NaN.
        order: numbers that decide which of the waiting targets is reported next, if the algorithm is not synchronous.
            After the last number, the oldest target is reported.
        failing: targets that fail.
        ahead: number of trials that an interrupted call had proposed.
        stop_after: number of results after which the study is stopped.
        most: number of proposals after which the study is stopped.
        trials: looks up trials; by default a :class:`Proposed`, in which trials share nothing.
    """
    algorithm.check(setting)
    session = _Session(algorithm, setting, value, Proposed() if trials is None else trials, most, stop_after)
    for _ in range(ahead):
        session.propose()
    session.run(iter(order), failing)
    return session.played


class _Session:
    def __init__(
        self, algorithm: Algorithm, setting: Setting, value: Value, known: Trials, most: int, stop_after: int
    ) -> None:
        self._algorithm = algorithm
        self._setting = setting
        self._value = value
        self._known = known
        self._most = most
        self._stop_after = stop_after
        self._search = algorithm.start(setting, known)
        self._waiting: list[Target] = []
        self._last: dict[int, int] = {}  # for each trial, the last step requested
        self._due: dict[Target, int] = {}  # the time at which a target is reported, if by_length; otherwise 0
        self._now = 0
        self.played = Played(params=known.values if isinstance(known, Proposed) else {})

    def run(self, turns: Iterator[int], failing: Container[Target]) -> None:
        """Propose, train and report until no trial is unfinished."""
        closed = False
        for _ in range(_ROUNDS):
            while self._more() and self._search.room() > 0:
                self.propose()
            if not self._more() and not closed:
                closed = True
                self._perform(self._search.closed())
            if not self._waiting:
                break
            self._train(self._next(turns), failing)
        assert not self._waiting and not self._more(), "the search does not end"
        assert self.played.ends.keys() == self._last.keys()

    def propose(self) -> None:
        self.played.proposed_after.append(len(self.played.reported))
        self._perform(self._search.added(self._add()))

    def _more(self) -> bool:
        proposed, n_trials = len(self.played.proposed_after), self._setting.n_trials
        stopped = len(self.played.reported) >= self._stop_after or proposed >= self._most
        return not stopped and (n_trials is None or proposed < n_trials)

    def _next(self, turns: Iterator[int]) -> Target:
        if self._algorithm.synchronous:
            return self._waiting.pop(min(range(len(self._waiting)), key=lambda turn: self._due[self._waiting[turn]]))
        return self._waiting.pop(next(turns, 0) % len(self._waiting))

    def _train(self, target: Target, failing: Container[Target]) -> None:
        index, step = target
        self._now = self._due[target]
        if target in failing:
            self.played.ends[index] = "failed"
            self._perform(self._search.failed(index))
        else:
            self.played.reported.append(target)
            self._perform(self._search.reported(index, step, self._value(index, step)))

    def _perform(self, actions: list[Action]) -> None:
        played, last = self.played, self._last
        for action in actions:
            match action:
                case Ask(index, step):
                    assert self._is_idle(index) and last[index] < step <= self._setting.steps
                    self._due[index, step] = self._now + step - last[index] if self._algorithm.by_length else 0
                    last[index] = step
                    self._waiting.append((index, step))
                    played.requested.append((index, step))
                case Finish(index, state):
                    assert self._is_idle(index) and (index, last[index]) in played.reported
                    assert (state == "complete") == (last[index] == self._setting.steps)
                    played.ends[index] = state
                case Fork(donor, step):
                    assert donor not in played.ends and (donor, step) in played.reported
                    made = self._add(action)
                    played.forks.append((made, action))
                    self._perform(self._search.forked(made, action))

    def _is_idle(self, index: int) -> bool:
        ended = index in self.played.ends or any(index == other for other, _ in self._waiting)
        return index in self._last and not ended

    def _add(self, fork: Fork | None = None) -> int:
        index = self._known.add(fork) if isinstance(self._known, Proposed) else len(self._last)
        self._last[index] = 0 if fork is None else fork.step
        return index


_ROUNDS = 100_000
