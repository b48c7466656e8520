"""The targets that an algorithm has requested and whose results it has not received yet. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import count

from hpstage.scheduler.answers import Answer

Target = tuple[int, int]
"""The index of a trial, and a step."""


class Targets:
    """Open targets and the answers to them.

    Args:
        synchronous: return targets in the order in which they were requested; otherwise, as their answers arrive.
        by_length: if synchronous, return them in the order in which answers would arrive if all steps took equally long
            and each target had a worker of its own, so that long targets do not hold up shorter ones.
    """

    def __init__(self, *, synchronous: bool, by_length: bool = False) -> None:
        self._synchronous = synchronous
        self._by_length = by_length
        # A heap. If synchronous: in the order of requests, `by_length` first by due time; else in that of completion.
        self._order: list[tuple[int, int, Target]] = []
        self._number = count()
        self._now = 0  # for `by_length`, in steps: the due time of the target that was returned last
        self._steps: dict[Target, Sequence[int]] = {}  # for each open target the steps to be answered, its own last
        self._of_trial: dict[int, list[int]] = defaultdict(list)  # the steps of its open targets
        self._answers: dict[int, dict[int, Answer]] = defaultdict(dict)
        self._reach: dict[int, int] = {}  # the farthest step requested

    def __len__(self) -> int:
        return len(self._steps)

    def reach(self, index: int) -> int:
        """Return the farthest step requested of a trial."""
        return self._reach.get(index, 0)

    def ask(self, index: int, step: int, on_the_way: Sequence[int] = (), *, end: int | None = None) -> list[int]:
        """Add a target; return the steps to request from the driver.

        Args:
            on_the_way: earlier steps, in order, that are evaluated as well. The target counts as answered once they are
                answered, too, so that the order of arrival has no effect.
            end: the trial's last step. If it is before ``step``, the answer there answers the target.
        """
        at = step if end is None else min(step, end)
        due = self._now + step - self.reach(index) if self._by_length else 0
        pending = {other for open in self._of_trial[index] for other in self._steps[index, open]}
        self._steps[index, step] = steps = [*on_the_way, at]
        self._of_trial[index].append(step)
        self._reach[index] = max(self.reach(index), at)
        if self._synchronous or self._is_complete((index, step)):
            self._put(due, (index, step))
        return [other for other in steps if other not in pending]

    def answer(self, index: int, answer: Answer) -> None:
        if index not in self._of_trial or answer.step in self._answers[index]:
            return
        self._answers[index][answer.step] = answer
        if not self._synchronous:
            for step in self._of_trial[index]:
                if answer.step in self._steps[index, step] and self._is_complete((index, step)):
                    self._put(0, (index, step))

    def known(self, index: int) -> list[Answer]:
        """Return the answers to a trial's open targets so far, by step."""
        return [answer for _, answer in sorted(self._answers.get(index, {}).items())]

    def next(self) -> tuple[int, list[Answer]] | None:
        """Remove the next answered target. Return its step and the answers that it waited for, its own last; ``None``
        if there is none yet."""
        if not self._order or (self._synchronous and not self._is_complete(self._order[0][2])):
            return None
        self._now, _, (index, step) = heapq.heappop(self._order)
        found = [self._answers[index][other] for other in self._steps.pop((index, step))]
        self._of_trial[index].remove(step)
        if not self._of_trial[index]:
            del self._of_trial[index], self._answers[index]
        return step, found

    def _put(self, due: int, target: Target) -> None:
        heapq.heappush(self._order, (due, next(self._number), target))

    def _is_complete(self, target: Target) -> bool:
        return all(step in self._answers[target[0]] for step in self._steps[target])
