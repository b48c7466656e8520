"""Where running chains give way: before a longer way, so that the last workers end together, or to nobody. Pure.

Forking is exact and cheap here, so a chain may be cut anywhere and go on elsewhere with the same result. Schedules
with cuts come closer to the bound max(critical path, work / workers) than those without: three equal chains on two
workers take 1.5 of their length in place of 2 (McNaughton, "Scheduling with deadlines and loss functions", 1959).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hpstage.plan.messages import AmendChain, Amendment, Boundary, Instruction, StopChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.chains import NOTICE, Layer, RunningChain
from hpstage.scheduler.stage_tree import StageTree

# A cut must save at least this many times what it costs.
_WORTH = 10.0


class Yielding:
    """Sets the ends of running chains."""

    def __init__(self, plan: SearchPlan, tree: StageTree, layer: Layer) -> None:
        self._plan = plan
        self._tree = tree
        self._layer = layer

    def switch_seconds(self) -> float:
        """What it costs to leave a line and come back: a message, a save, a load."""
        totals = self._plan.totals
        save = totals.save_seconds / totals.saves if totals.saves else 0.0
        load = totals.load_seconds / totals.loads if totals.loads else save
        return 0.01 + load + save

    def settle(self, running: list[RunningChain], workers: int, now: float) -> list[Instruction]:
        """Instructions that bring the chains' ends to where they are to be now."""
        going, instructions = self._going(running)
        waiting = [seconds for seconds, _, _ in islice(self._tree.heads(), workers)]
        if not self._plan.sharing:
            waiting = []  # a trial that is trained alone gives way to none: cut, it would go on from a state
        cuts = self._cuts([chain for chain, _ in going], waiting, workers, now)
        for chain, last in going:
            end = last
            if waiting:
                end = self._before_longer(chain, last, waiting[0])
            cut = cuts.get(chain.id)
            if cut is not None and cut < end:
                end = cut
            boundaries: tuple[Boundary, ...] = ()
            if end not in chain.marks:
                chain.marks.add(end)
                boundaries = (self._layer.boundary_at(chain.line_at(end), end),)
            wish = end if end != chain.marks[-1] else None
            if wish != chain.end or boundaries:
                chain.end = wish
                instructions.append(AmendChain(Amendment(chain.id, (), boundaries, chain.ref(wish))))
        return instructions

    def part(self, running: list[RunningChain]) -> list[Instruction]:
        """Instructions that end all chains at their next steps, those that somebody wants with their states kept."""
        going, instructions = self._going(running)
        for chain, _ in going:
            chain.stopping = True
            instructions.append(StopChain(chain.id, keep=True))
        return instructions

    def _going(self, running: list[RunningChain]) -> tuple[list[tuple[RunningChain, int]], list[Instruction]]:
        """The chains that somebody wants, each with the last mark that is wanted; the others are stopped."""
        instructions: list[Instruction] = []
        going = []
        for chain in running:
            if chain.stopping or not chain.marks:
                continue
            last = next((mark for mark in reversed(chain.marks) if self._is_wanted(chain, mark)), None)
            if last is None:
                chain.stopping = True
                instructions.append(StopChain(chain.id, keep=False))
            else:
                going.append((chain, last))
        return going, instructions

    @staticmethod
    def _is_wanted(chain: RunningChain, mark: int) -> bool:
        return mark in chain.line_at(mark).wanted

    def _beyond(self, chain: RunningChain) -> float:
        """Seconds of the way that hangs at the chain's last state and is not laid yet."""
        tail = chain.legs[-1]
        return self._tree.remaining(tail.line, tail.stop)

    def _before_longer(self, chain: RunningChain, last: int, waiting: float) -> int:
        """The first place to rest behind which the chain's own way is shorter than the one that waits."""
        end = last
        rivals = waiting - self.switch_seconds()
        if rivals <= 0:
            return end
        left = self._beyond(chain) if last == chain.marks[-1] else 0.0
        later = last
        for mark in self._rests(chain, last):
            if left >= rivals:
                break
            left += chain.seconds_between(mark, later)
            later = mark
            if left < rivals:
                end = mark
        return end

    def _rests(self, chain: RunningChain, last: int) -> Iterator[int]:
        """Places before ``last`` at which the state is kept anyway, the last first."""
        yield from chain.marks.rrange(last, inclusive=False)
        rest = self._layer.rest(chain)
        if rest < chain.marks[0]:
            yield rest

    def _cuts(self, chains: list[RunningChain], waiting: list[float], workers: int, now: float) -> dict[str, int]:
        """Where chains are cut when less waits than there are workers, so that all workers end about together."""
        if not waiting or len(waiting) >= workers or len(chains) < workers:
            return {}
        if not self._plan.totals.saves:
            return {}  # what a step takes, and what a cut costs, is not known yet
        left = sorted(((self._left(chain, now), chain) for chain in chains), key=lambda pair: (pair[0], pair[1].id))
        together = (sum(seconds for seconds, _ in left) + sum(waiting)) / workers
        together = max(together, left[-1][0], waiting[0])
        cuts: dict[str, int] = {}
        # The chain that ends first is followed by the longest way that waits: what does not fit is left for others.
        for length, (seconds, chain) in zip(waiting, left, strict=False):
            over = seconds + length - together
            if over > _WORTH * self.switch_seconds() and over < seconds:
                cut = self._place(chain, over, now)
                if cut is not None:
                    cuts[chain.id] = cut
        return cuts

    def _left(self, chain: RunningChain, now: float) -> float:
        """Estimated seconds to the end of the chain's way."""
        whole = chain.seconds_between(chain.at, chain.legs[-1].stop) + self._beyond(chain)
        spent = max(0.0, now - chain.since)
        return max(0.0, whole - spent)

    def _place(self, chain: RunningChain, left: float, now: float) -> int | None:
        """The place on the chain with ``left`` seconds to go, if word can still reach it before it is there."""
        if chain.end is not None and chain.end in chain.marks and chain.cut == chain.end:
            return chain.end  # once cut, the place stays: moving it would leave states behind
        left -= self._beyond(chain)
        if left < 0:
            return None
        step = chain.step_before_end(left)
        if step <= max(chain.at, chain.passed) or step == chain.legs[-1].stop:
            return None
        if chain.seconds_between(chain.at, step) - max(0.0, now - chain.since) < NOTICE:
            return None
        chain.cut = step
        return step
