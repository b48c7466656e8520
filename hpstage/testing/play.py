"""Searches without a study: calls an algorithm as a session does, and checks the laws of its port."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Fork, Setting, Trials

Target = tuple[int, int]
"""A trial's index and a step."""
Value = Callable[[int, int], float]


class Proposed(Trials):
    """Trials of two parameters, which follow from a trial's index or from its fork.

    Args:
        lines: what each proposed trial is trained on, step by step: two are one as long as these are equal. It may end
            before the last step. By default trials have nothing in common.
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
        """One more trial; its index."""
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
    """What happened in one search, in order."""

    requested: list[Target] = field(default_factory=list)
    reported: list[Target] = field(default_factory=list)
    forks: list[tuple[int, Fork]] = field(default_factory=list)  # with the index that each got
    proposed_after: list[int] = field(default_factory=list)  # per proposed trial: the number of results reported before
    ends: dict[int, str] = field(default_factory=dict)
    params: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # of trials that are Proposed

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
    """Do what a session does, and check the laws of the port on the way.

    Args:
        value: of a target; never NaN.
        order: which of the open targets is reported next, if the algorithm is not synchronous; the oldest when it is
            used up.
        failing: targets that fail.
        ahead: trials that an interrupted call had proposed.
        stop_after: results after which the study is stopped.
        most: proposals after which it is.
        trials: what can be looked up; by default :class:`Proposed`, in which trials have nothing in common.
    """
    algorithm.check(setting)
    known = Proposed() if trials is None else trials
    search = algorithm.start(setting, known)
    played = Played(params=known.values if isinstance(known, Proposed) else {})
    waiting: list[Target] = []
    last: dict[int, int] = {}  # the last step requested of every trial
    due: dict[Target, int] = {}  # when a target would be reported, if by_length; all at once, else
    now = 0
    closed = False
    turns = iter(order)

    def is_idle(index: int) -> bool:
        return index in last and index not in played.ends and all(index != other for other, _ in waiting)

    def perform(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask(index, step):
                    assert is_idle(index) and last[index] < step <= setting.steps
                    due[index, step] = now + step - last[index] if algorithm.by_length else 0
                    last[index] = step
                    waiting.append((index, step))
                    played.requested.append((index, step))
                case Finish(index, state):
                    assert is_idle(index) and (index, last[index]) in played.reported
                    assert (state == "complete") == (last[index] == setting.steps)
                    played.ends[index] = state
                case Fork(donor, step):
                    assert donor not in played.ends and (donor, step) in played.reported
                    made = add(action)
                    played.forks.append((made, action))
                    perform(search.forked(made, action))

    def add(fork: Fork | None = None) -> int:
        index = known.add(fork) if isinstance(known, Proposed) else len(last)
        last[index] = 0 if fork is None else fork.step
        return index

    def propose() -> None:
        played.proposed_after.append(len(played.reported))
        perform(search.added(add()))

    def more() -> bool:
        proposed = len(played.proposed_after)
        stopped = len(played.reported) >= stop_after or proposed >= most
        return not stopped and (setting.n_trials is None or proposed < setting.n_trials)

    for _ in range(ahead):
        propose()
    for _ in range(100_000):
        while more() and search.room() > 0:
            propose()
        if not more() and not closed:
            closed = True
            perform(search.closed())
        if not waiting:
            break
        first = min(range(len(waiting)), key=lambda turn: due[waiting[turn]])
        index, step = waiting.pop(first if algorithm.synchronous else next(turns, 0) % len(waiting))
        now = due[index, step]
        if (index, step) in failing:
            played.ends[index] = "failed"
            perform(search.failed(index))
        else:
            played.reported.append((index, step))
            perform(search.reported(index, step, value(index, step)))
    assert not waiting and not more(), "the search does not come to its end"
    assert played.ends.keys() == last.keys()
    return played
