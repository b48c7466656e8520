"""Where running chains give way: before a longer way, so that the last workers end together, or to nobody. Pure.

Forking is exact and cheap here, so a chain may be cut anywhere and go on elsewhere with the same result. Schedules
with cuts come closer to the bound max(critical path, work / workers) than those without: three equal chains on two
workers take 1.5 of their length in place of 2 (McNaughton, "Scheduling with deadlines and loss functions", 1959).
"""

from __future__ import annotations

from itertools import islice

from hpstage.chains import Layer, RunningChain
from hpstage.events import AmendChain, Amendment, Boundary, Instruction, StopChain
from hpstage.plan import SearchPlan
from hpstage.stage_tree import StageTree

# A cut must save at least this many times what it costs.
_WORTH = 10.0
# Seconds that word of a new boundary may take to reach a worker.
_NOTICE = 0.05


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
        cuts = self._cuts([chain for chain, _ in going], waiting, workers, now)
        for chain, last in going:
            end = last
            if waiting:
                end = self._before_longer(chain, last, waiting[0])
            boundaries: tuple[Boundary, ...] = ()
            cut = cuts.get(chain.id)
            if cut is not None and cut < end:
                if cut not in chain.marks or cut in chain.fleeting:
                    chain.marks.add(cut)
                    chain.fleeting.discard(cut)
                    boundaries = (self._layer.boundary_at(chain.legs[cut[0]].line, cut[1]),)
                end = cut
            wish = end if end != chain.marks[-1] else None
            if wish != chain.end or boundaries:
                chain.end = wish
                instructions.append(AmendChain(Amendment(chain.id, (), boundaries, chain.ref(wish))))
        return instructions

    def part(self, running: list[RunningChain], now: float) -> list[Instruction]:
        """Instructions that end all chains as soon as can be, with the state kept from which others go on."""
        # Where nothing is measured yet, what a step takes is a guess, and it is the chain that tells where it is.
        measured = self._plan.totals.steps_trained > 0
        going, instructions = self._going(running)
        for chain, last in going:
            if chain.end is not None and chain.end in chain.marks and chain.end == chain.cut:
                continue
            end = next((mark for mark in chain.marks if mark not in chain.fleeting), last)
            leg, step = place = max(chain.at, chain.passed)
            line = chain.legs[leg].line
            # As far ahead as word of it takes; further each time that it came too late, but for the first: where the
            # chain was then, nobody knew exactly.
            spent = max(0.0, now - chain.since) if place == chain.at and measured else 0.0
            soon = leg, step + ((1 + int((spent + 2 * _NOTICE) / line.cost)) << max(0, chain.lateness - 1))
            boundaries: tuple[Boundary, ...] = ()
            if soon < end and soon[1] < chain.legs[leg].stop:
                chain.marks.add(soon)
                chain.fleeting.discard(soon)
                chain.periodic = end = soon
                boundaries = (self._layer.boundary_at(line, soon[1]),)
            chain.end = chain.cut = end
            instructions.append(AmendChain(Amendment(chain.id, (), boundaries, chain.ref(end))))
        return instructions

    def _going(
        self, running: list[RunningChain]
    ) -> tuple[list[tuple[RunningChain, tuple[int, int]]], list[Instruction]]:
        """The chains that somebody wants, each with the last mark that is wanted; the others are stopped."""
        instructions: list[Instruction] = []
        going = []
        for chain in running:
            if chain.stopping or not chain.marks:
                continue
            last = next((mark for mark in reversed(chain.marks) if self._is_wanted(chain, mark)), None)
            if last is None:
                chain.stopping = True
                instructions.append(StopChain(chain.id))
            else:
                going.append((chain, last))
        return going, instructions

    @staticmethod
    def _is_wanted(chain: RunningChain, mark: tuple[int, int]) -> bool:
        return mark[1] in chain.legs[mark[0]].line.wanted

    def _beyond(self, chain: RunningChain) -> float:
        """Seconds of the way that hangs at the chain's last state and is not laid yet."""
        tail = chain.legs[-1]
        return self._tree.remaining(tail.line, tail.stop)

    def _before_longer(self, chain: RunningChain, last: tuple[int, int], waiting: float) -> tuple[int, int]:
        """The first boundary behind which the chain's own way is shorter than the one that waits."""
        end = last
        rivals = waiting - self.switch_seconds()
        if rivals <= 0:
            return end
        left = self._beyond(chain) if last == chain.marks[-1] else 0.0
        later = last
        for mark in chain.marks.rrange(last, inclusive=False):
            if left >= rivals:
                break
            left += chain.seconds_between(mark, later)
            later = mark
            if left < rivals and mark not in chain.fleeting:
                end = mark
        return end

    def _cuts(
        self, chains: list[RunningChain], waiting: list[float], workers: int, now: float
    ) -> dict[str, tuple[int, int]]:
        """Where chains are cut when less waits than there are workers, so that all workers end about together."""
        if not waiting or len(waiting) >= workers or len(chains) < workers:
            return {}
        if not self._plan.totals.saves:
            return {}  # what a step takes, and what a cut costs, is not known yet
        left = sorted(((self._left(chain, now), chain) for chain in chains), key=lambda pair: (pair[0], pair[1].id))
        together = (sum(seconds for seconds, _ in left) + sum(waiting)) / workers
        together = max(together, left[-1][0], waiting[0])
        cuts: dict[str, tuple[int, int]] = {}
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
        whole = chain.seconds_between(chain.at, (len(chain.legs) - 1, chain.legs[-1].stop)) + self._beyond(chain)
        spent = max(0.0, now - chain.since)
        return max(0.0, whole - spent)

    def _place(self, chain: RunningChain, left: float, now: float) -> tuple[int, int] | None:
        """The place on the chain with ``left`` seconds to go, if word can still reach it before it is there."""
        if chain.end is not None and chain.end in chain.marks and chain.cut == chain.end:
            return chain.end  # once cut, the place stays: moving it would leave states behind
        left -= self._beyond(chain)
        for index in range(len(chain.legs) - 1, chain.at[0] - 1, -1):
            leg = chain.legs[index]
            steps = int(left / leg.line.cost)
            if steps < 0:
                return None
            if steps < leg.stop - leg.start:
                step = leg.stop - steps
                ahead = chain.seconds_between(chain.at, (index, step)) if (index, step) > chain.at else -1.0
                spent = max(0.0, now - chain.since)
                if ahead - spent < _NOTICE or (index, step) <= chain.passed or step >= leg.stop:
                    return None
                chain.cut = (index, step)
                return chain.cut
            left -= (leg.stop - leg.start) * leg.line.cost
        return None
