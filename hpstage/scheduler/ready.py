"""The ready stages of a stage tree, those with the longest remaining paths first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sortedcontainers import SortedList

from hpstage.scheduler.branches import Branch

ReadyStage = tuple[float, Branch, int]
"""A source from which a wanted step can be trained now: the seconds of its longest path, its branch and its step."""

_Entry = tuple[float, int, int]
"""A ready stage as it is queued: the negative of its seconds, the id of its branch's node, and its step."""


class ReadyStages:
    """The queue of the ready stages.

    Args:
        branches: those of the tree, by node id.
        remaining: returns the seconds of the longest path from a source.
    """

    def __init__(self, branches: Sequence[Branch], remaining: Callable[[Branch, int], float]) -> None:
        self._branches = branches
        self._remaining = remaining
        self._queue: SortedList = SortedList()  # of entries
        self._found: list[ReadyStage] = []  # the first stages of the queue, as far as known since it changed
        self._estimates = 0  # the number of the current estimates: stages rated by earlier ones are out of date

    @property
    def count(self) -> int:
        return len(self._queue)

    def renew(self) -> None:
        """Record that estimates have changed which may affect any ready stage."""
        self._estimates += 1
        self._found = []

    def put(self, branch: Branch, step: int) -> None:
        """Add a ready stage, or queue it again if its seconds have changed."""
        if branch.rated != self._estimates:
            self._rate(branch)
        self._put(branch, step)

    def drop(self, branch: Branch, step: int) -> None:
        """Remove a stage, if it is ready."""
        seconds = branch.ready.pop(step, None)
        if seconds is not None:
            self._remove((-seconds, branch.node.id, step))

    def first(self, most: int) -> list[ReadyStage]:
        """Return the ``most`` ready stages with the longest paths, after estimating them again. Ties go to the older
        node."""
        if len(self._found) < min(most, len(self._queue)):
            self._found = self._find(most)
        return self._found[:most]

    def _find(self, most: int) -> list[ReadyStage]:
        while True:
            found = [(-negative, self._branches[id], step) for negative, id, step in self._queue[:most]]
            unrated = {branch.node.id: branch for _, branch, _ in found if branch.rated != self._estimates}
            if not unrated:
                return found
            for branch in unrated.values():
                self._rate(branch)

    def _rate(self, branch: Branch) -> None:
        """Estimate all ready stages of a branch again."""
        branch.rated = self._estimates
        for step in branch.ready:
            self._put(branch, step)

    def _put(self, branch: Branch, step: int) -> None:
        seconds, before = self._remaining(branch, step), branch.ready.get(step)
        if before == seconds:
            return
        if before is not None:
            self._remove((-before, branch.node.id, step))
        branch.queue_stage(step, seconds)
        entry = (-seconds, branch.node.id, step)
        self._forget(entry)
        self._queue.add(entry)

    def _remove(self, entry: _Entry) -> None:
        self._forget(entry)
        self._queue.remove(entry)

    def _forget(self, entry: _Entry) -> None:
        """Forget the result of :meth:`first` if an entry is added or removed before its last stage."""
        if self._found:
            seconds, branch, step = self._found[-1]
            if entry <= (-seconds, branch.node.id, step):
                self._found = []
