"""Handing work out: heads to idle workers as chains, and what is newly wanted to the chains that pass it. Pure."""

from __future__ import annotations

from itertools import islice

from hpstage.errors import InternalError
from hpstage.plan.facts import ChainId, DriverId, StateRef, WorkerId
from hpstage.plan.messages import AmendChain, Amendment, Boundary, Chain, Instruction, Stage, StartChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.chains import Layer, RunningChain
from hpstage.scheduler.lines import Line
from hpstage.scheduler.preemption import Yielding
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.workers import Worker

# Heads looked at for one that the idle worker holds live.
_CONSIDERED = 8


class Dispatch:
    """Starts chains and amends those that run.

    Args:
        driver: makes the ids of chains unique.
        verify_new: whether chains verify a fork wherever training begins to change something else.
        workers: of the driver's executor; each chain that is started is set on its worker.
        running: the driver's chains; those that are started come in.
    """

    def __init__(
        self,
        plan: SearchPlan,
        tree: StageTree,
        layer: Layer,
        yielding: Yielding,
        driver: DriverId,
        workers: dict[WorkerId, Worker],
        running: dict[ChainId, RunningChain],
        verify_new: bool,
    ) -> None:
        self._plan = plan
        self._tree = tree
        self._layer = layer
        self._yielding = yielding
        self._driver = driver
        self._workers = workers
        self._running = running
        self._verify_new = verify_new
        self._started = 0

    def amend_running(self, *, prolong: bool) -> list[Instruction]:
        """Changes that bring what is newly wanted to the chains on whose way it lies, and ``prolong`` them."""
        fresh, self._tree.fresh = self._tree.fresh, []
        touched: dict[ChainId, tuple[list[Stage], list[Boundary]]] = {}
        for line, step in fresh:
            wanted = line.wanted.get(step)
            cover = self._tree.cover_of(line, step)
            if wanted is None or cover is None:
                continue
            chain = self._running.get(cover.chain)
            if chain is None or chain.stopping:
                # Another driver's, which sees what is wanted as well; or once it is over, the step is open again.
                continue
            if step not in chain.marks:
                chain.marks.add(step)
            elif not wanted.evaluate or step in chain.evaluated:
                continue  # the state is kept there anyway
            boundary = self._layer.boundary_at(line, step)
            if boundary.evaluate:
                chain.evaluated.add(step)
            touched.setdefault(chain.id, ([], []))[1].append(boundary)
        for chain in self._running.values():
            if chain.stopping:
                continue
            stages, boundaries = self._layer.prolong(chain) if prolong else ([], [])
            if stages or boundaries:
                entry = touched.setdefault(chain.id, ([], []))
                entry[0].extend(stages)
                entry[1].extend(boundaries)
        return [
            AmendChain(Amendment(id, tuple(stages), tuple(boundaries), self._running[id].ref(self._running[id].end)))
            for id, (stages, boundaries) in touched.items()
        ]

    def assign(self, now: float) -> list[Instruction]:
        """Hand ready heads to idle workers, the longest remaining way first."""
        instructions: list[Instruction] = []
        while True:
            idle = [worker for worker in self._workers.values() if worker.is_ready(now)]
            if not idle:
                return instructions
            heads = list(islice(self._tree.heads(), max(_CONSIDERED, len(idle))))
            if not heads:
                return instructions
            seconds, line, step = heads[0]
            worker = next((w for w in idle if self._source(line, step) in w.live), idle[0])
            if len(idle) == 1:
                for other, its_line, its_step in heads:
                    if other < seconds - self._yielding.switch_seconds():
                        break
                    if self._source(its_line, its_step) in worker.live:
                        line, step = its_line, its_step
                        break
            instructions.append(self._start(worker, line, step, now))

    def _source(self, line: Line, step: int) -> StateRef | None:
        """The state that a head starts from; ``None`` is the beginning of training."""
        if step > line.node.start:
            return StateRef(line.node.id, step)
        return None if line.node.parent is None else StateRef(line.node.parent.id, step)

    def _start(self, worker: Worker, line: Line, step: int, now: float) -> StartChain:
        legs = self._layer.route(line, step)
        if not legs:
            raise InternalError(f"a head without a way: step {step} of node {line.node.id}")
        self._started += 1
        source = self._source(line, step)
        chain = RunningChain(
            id=ChainId(f"{self._driver or 'chain'}-{self._started}"),
            worker=worker.id,
            legs=[],
            source=source,
            at=step,
            kept=step,
            since=now,
        )
        stages, boundaries = self._layer.lay(chain, legs)
        worker.chain = chain
        self._running[chain.id] = chain
        return StartChain(
            worker.id,
            Chain(
                id=chain.id,
                source=None if source is None else self._plan.key(self._plan.nodes[source.node], source.step),
                source_ref=source,
                initial=line.node.ancestry()[0].hyperparameters(0),
                stages=tuple(stages),
                boundaries=tuple(boundaries),
                verify_new=self._verify_new,
                keep_every=self._layer.checkpoint_every,
                keep_seconds=self._layer.checkpoint_seconds,
                time_first=self._layer.checkpoint_seconds is not None and not self._plan.totals.steps_trained,
            ),
        )
