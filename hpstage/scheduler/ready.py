"""The ready stages of a stage tree, those with the longest remaining paths first. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from hpstage.scheduler.branches import Branch

ReadyStage = tuple[float, Branch, int]
"""A source from which a wanted step can be trained now, with the seconds of its longest path: a branch, and a step."""

# Entries that are kept sorted before some of them are put back.
_FRONT = 64


class ReadyStages:
    """The queue of the ready stages.

    The first few are looked at in every turn and seldom change. They are kept as a sorted list, so that a look moves
    nothing in the heap of all others, which may be long.

    Args:
        branches: those of the tree, by node id.
        remaining: returns the seconds of the longest path from a source.
    """

    def __init__(self, branches: Sequence[Branch], remaining: Callable[[Branch, int], float]) -> None:
        self.count = 0
        self._branches = branches
        self._remaining = remaining
        # Entries (-seconds, node id, step), including stale ones.
        self._front: list[tuple[float, int, int]] = []  # the first of them, ascending
        self._rest: list[tuple[float, int, int]] = []  # a heap
        self._found: list[ReadyStage] = []  # those of the front's first entries, as far as none of these is stale
        self._estimates = 0  # how often estimates have changed without all that depends on them

    def renew(self) -> None:
        """Note that estimates have changed, on which the seconds of any ready stage may depend."""
        self._estimates += 1
        self._found.clear()

    def put(self, branch: Branch, step: int) -> None:
        """Add a ready stage, or queue it again if its seconds have changed."""
        if branch.rated != self._estimates:
            branch.rated = self._estimates
            for other in branch.ready:
                self._queue(branch, other)
        self._queue(branch, step)

    def _queue(self, branch: Branch, step: int) -> None:
        seconds, before = self._remaining(branch, step), branch.ready.get(step)
        if before == seconds:
            return
        if before is None:
            self.count += 1
        else:
            self._forget((-before, branch.node.id, step))
        branch.queue_stage(step, seconds)
        self._push((-seconds, branch.node.id, step), branch)

    def drop(self, branch: Branch, step: int) -> None:
        """Remove a ready stage, if it is one."""
        seconds = branch.ready.pop(step, None)
        if seconds is not None:
            self.count -= 1
            self._forget((-seconds, branch.node.id, step))

    def first(self, most: int) -> list[ReadyStage]:
        """Return those with the longest paths, at most so many. Ties go to the older node."""
        if len(self._found) < min(most, self.count):
            self._find(most)
        return self._found[:most]

    def _find(self, most: int) -> None:
        """Find further ready stages, until there are so many. All that are found are estimated again."""
        front, found = self._front, self._found
        at = len(found)
        while at < most:
            if at == len(front):
                if not self._rest:
                    break
                front.append(heapq.heappop(self._rest))
            negative, id, step = front[at]
            branch = self._branches[id]
            if branch.ready.get(step) != -negative or (at and front[at] == front[at - 1]):
                del front[at]  # stale: queued again since, or removed
            elif branch.rated != self._estimates:
                branch.rated = self._estimates
                for step in branch.ready:
                    seconds = branch.ready[step] = self._remaining(branch, step)
                    place = bisect_right(front, entry := (-seconds, id, step))
                    if place == len(front):
                        heapq.heappush(self._rest, entry)
                        continue
                    front.insert(place, entry)
                    if place < at:  # before some that are found, among which none is of this branch
                        found.insert(place, (seconds, branch, step))
                        at += 1
            else:
                found.append((-negative, branch, step))
                at += 1

    def _push(self, entry: tuple[float, int, int], branch: Branch) -> None:
        front, found = self._front, self._found
        if not front or entry > front[-1]:
            heapq.heappush(self._rest, entry)
            return
        place = bisect_right(front, entry)
        front.insert(place, entry)
        if place < len(found):
            found.insert(place, (-entry[0], branch, entry[2]))
        if len(front) > _FRONT:
            for last in front[_FRONT // 2 :]:
                heapq.heappush(self._rest, last)
            del front[_FRONT // 2 :], found[_FRONT // 2 :]

    def _forget(self, entry: tuple[float, int, int]) -> None:
        """Remove an entry that is stale now from those that are found, if it is one of them."""
        found = len(self._found)
        if found and entry <= self._front[found - 1]:
            place = bisect_left(self._front, entry, 0, found)
            del self._front[place], self._found[place]
