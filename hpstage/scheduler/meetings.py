"""Meetings: which workers are asked to train a chain together. Pure."""

from __future__ import annotations

import re

from hpstage.plan.facts import ChainId, WorkerId

# Initial and maximum seconds for which workers that did not meet are left out of gangs; doubled each time in a row.
_LEFT_OUT = (10.0, 600.0)
# So many gangs in a row that did not meet are the last ones: then it is not for what one worker does meanwhile.
_VAIN = 6


class Meetings:
    """Leaves workers that did not meet out of gangs for a while, and ends gangs if none meets.

    Attributes:
        ended: whether no more gangs are formed.
        any_asked: whether any workers were asked to train together.
    """

    def __init__(self) -> None:
        self.ended = self.any_asked = False
        self._asked: dict[ChainId, tuple[WorkerId, ...]] = {}
        self._missed: dict[WorkerId, tuple[int, float]] = {}  # how often in a row, and until when it is left out
        self._in_vain = 0  # gangs in a row that did not meet
        self._told: set[str] = set()

    def ask(self, chain: ChainId, workers: tuple[WorkerId, ...]) -> None:
        """Note that workers are asked to train a chain together."""
        self.any_asked = True
        self._asked[chain] = workers

    def met(self, chain: ChainId) -> None:
        """Note that the workers of a chain have trained together."""
        self._in_vain = 0
        for worker in self._asked.get(chain, ()):
            self._missed.pop(worker, None)

    def over(self, chain: ChainId) -> None:
        """Note that a chain has ended."""
        self._asked.pop(chain, None)

    def failed(self, chain: ChainId, why: str, now: float) -> list[str]:
        """Leave the workers of a chain, which did not meet, out for a while. Return messages for the user."""
        first, longest = _LEFT_OUT
        seconds = 0.0
        for worker in self._asked.pop(chain, ()):
            times = self._missed.get(worker, (0, 0.0))[0]
            left_out = min(first * 2.0 ** min(times, 30), longest)
            self._missed[worker] = times + 1, now + left_out
            seconds = max(seconds, left_out)
        if self.ended:
            return []
        self._in_vain += 1
        if self._in_vain == _VAIN:
            self.ended = True
            return [
                f"{why}. No workers have met in {_VAIN} attempts: from now on each chain is trained by one worker, "
                f"with the same results."
            ]
        cause = re.sub(r"\d+", "", why)  # not where they met
        if cause in self._told:
            return []
        self._told.add(cause)
        return [f"{why}. They train alone for {seconds:.0f} s, with the same results, and are then asked again."]

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker that has left, and the chains that it was asked to train."""
        self._asked = {chain: workers for chain, workers in self._asked.items() if worker not in workers}
        self._missed.pop(worker, None)

    def open_to(self, worker: WorkerId, now: float) -> bool:
        """Whether a worker is asked to train with others."""
        return not self.ended and self._missed.get(worker, (0, 0.0))[1] <= now

    def next_at(self, now: float) -> float | None:
        """Return when the next worker is asked again, or ``None`` if none is left out for a while."""
        if self.ended or not self._missed:
            return None
        return min((until for _, until in self._missed.values() if until > now), default=None)
