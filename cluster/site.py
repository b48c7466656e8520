"""Site: the part of a run on one worker (a training process and its chains), and the Dask tasks that use it.

This code runs on the worker's event loop, and does not block it; training takes place in the training process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

from distributed import Worker, get_worker
from msgspec.structs import asdict

from hpstage.cluster.auditing import Auditing, make_way
from hpstage.cluster.feed import publish
from hpstage.cluster.local_worker import LocalWorker
from hpstage.cluster.meetings import BUSY, Meeting, apart, handler_of
from hpstage.cluster.messages import (
    Amend,
    BeginAudit,
    Description,
    EndAudit,
    Expect,
    Follow,
    Forget,
    Load,
    Loaded,
    Order,
    Problem,
    Stop,
    Train,
    decode_answer,
    decode_chain,
    decode_loaded,
    decode_nothing,
    decode_orders,
    decode_refusal,
    decode_report,
    decode_request,
    encode,
    name_of,
)
from hpstage.cluster.trainer import Trainer, TrainingProcessLost
from hpstage.cluster.turns import Turn
from hpstage.errors import ClusterError
from hpstage.execution.flight import Gathering
from hpstage.execution.gang import GATHER_SECONDS
from hpstage.executor import Environment
from hpstage.plan.facts import ChainId, WorkerId
from hpstage.plan.messages import AuditId, ChainEnded

logger = logging.getLogger("hpstage")

_GRACE = 2.0
"""Seconds for a training process to end its step and close. Dask's nanny kills a worker after 4 s."""
_TURN = 5.0
"""Seconds that a gang waits for a worker on which another run trains."""
_LOOK = 0.02
"""Seconds between two checks whether the last chains of a departing worker have ended."""
_GANG_LEFT = "it waited for the leader of its gang, which has left"
"""The reason for ending a process whose chain is not to blame."""

_turns: WeakKeyDictionary[Worker, Turn] = WeakKeyDictionary()


class _Replaced(TrainingProcessLost):
    """The training process for which a chain was started has been replaced by another one."""


class Site:
    """The part of a run on one worker: a training process, and its current chains.

    A process that has ended is replaced. For the driver, a worker has died and another one has joined. Each process is
    admitted by its own description, since it may have loaded other files than the last one.
    """

    def __init__(self, name: str, worker: Worker, load: Load, silence: float) -> None:
        self.description: Description | None = None
        self.loop = asyncio.get_running_loop()
        self._name = name
        self._worker = worker
        self._load = load
        self._silence = silence
        self._trainer: Trainer | None = None
        self._settled = asyncio.Event()  # unset while a process is starting
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self._leaving = False  # begin no more chains
        self._gone = asyncio.Event()
        self._running: dict[ChainId, str] = {}  # the current chains, and their tasks' keys
        self._direct: set[asyncio.Task[Any]] = set()  # tasks that train chains, but are not Dask tasks
        self._entering = asyncio.Lock()
        self._losing = asyncio.Lock()
        self._sharing = 0  # number of chains that share this run's turn
        self._early: defaultdict[ChainId, list[Order]] = defaultdict(list)  # orders received before their chain
        self._abandoned: set[str] = set()
        self._following: dict[str, ChainId] = {}  # by task key: chains whose gangs this worker belongs to
        self._led = ""  # key of the task for which the process is following a leader
        self._calls: list[asyncio.Task[None]] = []  # calls to the other workers of the last gang that it leads
        self._alone = asyncio.Lock()  # held while the process is following a leader
        self._meetings: defaultdict[ChainId, Meeting] = defaultdict(Meeting)
        self._refusals: dict[ChainId, str] = {}  # by chain: why a worker does not join its gang
        self._auditing = Auditing(name, worker, load, self._environment)
        self._ends: set[asyncio.Task[None]] = set()  # of audits
        worker.handlers[name] = self.control
        worker.handlers[handler_of(name)] = self.meet

    async def open(self) -> None:
        """Start a training process. Return after the driver was notified that it is ready, or why it is not."""
        try:
            await self._bring_up()
        finally:
            self._settled.set()
        self._keeper = asyncio.create_task(self._keep())

    async def _bring_up(self) -> None:
        try:
            loaded = await self._start()
        except TrainingProcessLost as error:
            if self._closed:
                return  # the process was killed by closing
            logger.warning("worker %s: the training process %s while it was set up", self._worker.address, error)
            killed = self._was_killed
            try:
                loaded = await self._start()  # the cause may not have been the trainable
            except TrainingProcessLost as again:
                # A trainable does not kill its process.
                kind: Literal["trainable", "killed"] = "killed" if killed or self._was_killed else "trainable"
                loaded = _unable(f"the training process {again} while it was set up, and so did the one before", kind)
        if self._closed:
            return
        before = self.description
        self.description = Description(
            worker=self._worker.address,
            incarnation=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=self._trainer.pid if isinstance(self._worker, LocalWorker) and self._trainer else os.getpid(),
            # Each chain is a Dask task, and Dask runs as many tasks at a time as the worker has threads.
            **asdict(loaded) | {"slots": min(loaded.slots, self._worker.state.nthreads)},
        )
        if loaded.problem is not None or (before is not None and before.environment != loaded.environment):
            # The driver will refuse this process. End it, so that it trains nothing even if the message is lost.
            trainer, self._trainer = self._trainer, None
            if trainer is not None:
                await trainer.finish(_GRACE)
        publish(self._worker, self._name, {"ready": encode(self.description), "worker": self._worker.address})

    @property
    def _was_killed(self) -> bool:
        return self._trainer is not None and self._trainer.killed

    async def _start(self) -> Loaded:
        """Start a process that unpacks the trainable. Raises :class:`TrainingProcessLost` if the process ends first."""
        try:
            trainer = await Trainer.start(self._worker)
        except OSError as error:
            return _unable(f"no training process can be started ({error})")
        if self._closed:
            await trainer.finish(_GRACE)
            return _unable("the run is over")
        self._trainer = trainer
        trainer.watch(self._silence, lambda: bool(self._running), self._notice)
        trainer.send(self._load)
        return await trainer.answer(decode_loaded)

    def _notice(self, clause: str) -> None:
        """Make the driver log a notice about the training process. ``clause``: a text without its subject."""
        publish(self._worker, self._name, {"notice": f"worker {self._worker.address}: its training process {clause}"})

    async def _keep(self) -> None:
        """Start a new process whenever the current one has ended, until the site is closed."""
        while self._trainer is not None:
            trainer = self._trainer
            await trainer.ended()
            if self._closed:
                return
            await self._lose(trainer)
            try:
                await self._bring_up()
            finally:
                self._settled.set()

    async def _lose(self, trainer: Trainer) -> None:
        """Report the end of a process to the driver, once per process; return after it was reported."""
        async with self._losing:
            if self._trainer is trainer and not self._closed:
                await trainer.read_out()
                self._trainer = None
                self._settled.clear()
                self._report_loss(trainer, await trainer.ended())

    def _report_loss(self, trainer: Trainer, how: str) -> None:
        message = f"its training process {how}"
        if not isinstance(self._worker, LocalWorker):  # otherwise the driver, in this process, logs it
            logger.warning("worker %s: %s", self._worker.address, message)
        to_blame = trainer.given_up != _GANG_LEFT and not trainer.received.isdisjoint(self._running)
        reason = "died" if to_blame else "closed"
        incarnation = "" if self.description is None else self.description.incarnation
        lost = {"lost": self._worker.address, "incarnation": incarnation, "reason": reason, "message": message}
        publish(self._worker, self._name, lost)

    async def _ready(self, incarnation: str | None = None) -> Trainer:
        """Return the training process. Raises :class:`TrainingProcessLost` if it is not of the given incarnation."""
        await self._settled.wait()
        if self._trainer is None or self._closed or self.description is None:
            raise TrainingProcessLost("could not be started again")
        if incarnation not in (None, self.description.incarnation):
            raise _Replaced("was replaced before the chain arrived")
        return self._trainer

    def _environment(self) -> Environment | None:
        return None if self.description is None else self.description.environment

    async def answer(self, key: str, request: bytes) -> dict[str, Any] | None:
        async with self._turn():
            await make_way(self._worker)
            publish(self._worker, self._name, {"trying": key})
            if key in self._abandoned:
                return None
            try:
                trainer = await self._ready()
                trainer.send(decode_request(request))
                return await trainer.answer(decode_answer)
            except TrainingProcessLost:
                return None  # _keep() notifies the driver
            finally:
                self._abandoned.discard(key)

    async def train(self, key: str, encoded: bytes, checkpoints: bytes, slot: str, incarnation: str) -> list[bytes]:
        chain = decode_chain(encoded)
        reports: list[bytes] = []

        def forward(report: bytes) -> None:
            if chain.gang and isinstance(gathering := decode_report(report), Gathering):
                self._calls = [asyncio.create_task(self._call(member, gathering)) for member in chain.gang]
                return
            if chain.id in self._refusals:
                report = apart(report, self._refusals[chain.id])
            # Sent at once over the feed, which may lose reports, and again in the result, which is reliable.
            publish(self._worker, self._name, {"chain": chain.id, "sequence": len(reports), "report": report})
            reports.append(report)

        async with self._shared_turn():
            async with self._alone:
                pass  # the process may still be leaving a gang
            trainer = None
            try:
                trainer = await self._ready(incarnation)
                if self._leaving:
                    await self._gone.wait()  # when the worker has left, the driver trains the chain elsewhere
                    return reports
                self._begin(trainer, key, Train(chain, WorkerId(slot), checkpoints))
                await trainer.answer(decode_nothing, forward, of=chain.id)
            except asyncio.CancelledError:
                # Dask closes the worker. Without this, the process and its followers would continue until it is killed.
                if trainer is not None:
                    trainer.send(Stop(chain.id, keep=False))
                raise
            except _Replaced:
                # The description of the current process was lost with a scheduler. The chain is not to blame.
                forward(encode(ChainEnded(chain.id, WorkerId(slot), "stopped", time.time())))
                publish(self._worker, self._name, {"ready": encode(self.description), "worker": self._worker.address})
            except TrainingProcessLost as error:
                if trainer is not None:
                    await self._lose(trainer)  # before the result: the driver then counts only the loss of the worker
                if not reports or not isinstance(decode_report(reports[-1]), ChainEnded):
                    message = f"the training process {error}"
                    reports.append(encode(ChainEnded(chain.id, WorkerId(slot), "lost", time.time(), message=message)))
            finally:
                self._running.pop(chain.id, None)
                self._refusals.pop(chain.id, None)
            if key in self._abandoned:
                self._abandoned.discard(key)
                if trainer is not None:
                    trainer.send(Forget())  # this may have been the last chain
        return reports

    async def train_directly(self, *arguments: Any) -> list[bytes]:
        """Same as :meth:`train`, but not as a Dask task, which would be cancelled before the site is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._direct.add(task)
        try:
            return await self.train(*arguments)
        finally:
            self._direct.discard(task)

    async def _call(self, member: WorkerId, gathering: Gathering) -> None:
        """Send a worker of the gang the address where the gang meets. If the worker does not join, stop the chain."""
        try:
            comes = await getattr(self._worker.rpc(member), handler_of(self._name))(
                chain=gathering.chain, address=gathering.address
            )
        except OSError:
            logger.warning("worker %s cannot reach %s", self._worker.address, member, exc_info=True)
            return  # if the worker has left, the driver stops the chain
        if not comes and gathering.chain in self._running and self._trainer is not None:
            self._refusals[gathering.chain] = f"worker {member} could not train with others: {BUSY}"
            self._trainer.send(Stop(gathering.chain, keep=False))

    async def meet(self, chain: str, address: str) -> bool:
        """Handle the call of a gang's leader, which passes the meeting address. Return whether this worker joins."""
        comes = await self._meetings[ChainId(chain)].call(address, _TURN)
        if not comes:
            self._meetings.pop(ChainId(chain), None)
        return comes

    async def follow(self, key: str, encoded: bytes, checkpoints: bytes, rank: int, incarnation: str) -> str:
        """Train a chain together with the leader of its gang. Return why joining failed, or an empty string."""
        chain = decode_chain(encoded)
        self._following[key] = chain.id
        try:
            # Wait before taking a turn, and for a limited time: the leader may be waiting for another run, whose leader
            # is this worker.
            async with asyncio.timeout(GATHER_SECONDS):
                address = await self._meetings[chain.id].join()
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(_TURN):
                    await stack.enter_async_context(self._shared_turn())
                await stack.enter_async_context(self._alone)
                if not address or key in self._abandoned:
                    return ""
                trainer = await self._ready(incarnation)
                self._led = key
                trainer.send(Follow(chain, address, rank, checkpoints))
                return await trainer.answer(decode_refusal)
        except TimeoutError:
            return BUSY
        except TrainingProcessLost:
            return ""  # _keep() notifies the driver
        finally:
            self._led = "" if self._led == key else self._led
            del self._following[key]
            self._meetings.pop(chain.id, None)
            self._abandoned.discard(key)

    def _begin(self, trainer: Trainer, key: str, request: Train) -> None:
        chain = request.chain.id
        self._running[chain] = key
        trainer.send(request)
        for order in self._early.pop(chain, ()):
            trainer.send(order)
        if len(self._running) == 1:
            self._early.clear()  # the other orders are for chains that have ended
        if key in self._abandoned:
            trainer.send(Stop(chain, keep=False))

    def _turn(self) -> Turn:
        return _turns.setdefault(self._worker, Turn())

    @asynccontextmanager
    async def _shared_turn(self) -> AsyncIterator[None]:
        """Hold a turn. The chains of this run share it, unless another run is waiting for its turn."""
        turn = self._turn()
        async with self._entering:
            if not self._sharing or turn.waiting:
                await turn.__aenter__()
            self._sharing += 1
        try:
            await make_way(self._worker)
            yield
        finally:
            self._sharing -= 1
            if not self._sharing:
                turn.lock.release()

    def control(self, orders: bytes) -> None:
        """Handle a Dask message with orders for the current or the next chains."""
        for order in decode_orders(orders):
            if isinstance(order, Expect):
                if self._trainer is not None:
                    self._trainer.send(order)
                continue
            if isinstance(order, BeginAudit):
                busy = self._turn().lock.locked() or bool(self._worker.state.executing)
                self._auditing.begin(order, refused=busy or self._leaving or self._closed)
                continue
            if isinstance(order, EndAudit):
                self.make_way(order.audit)
                continue
            chain = order.amendment.chain if isinstance(order, Amend) else order.chain
            if chain in self._running and self._trainer is not None:
                self._trainer.send(order)
            else:
                self._early[chain].append(order)

    def make_way(self, audit: AuditId | None = None) -> None:
        """End the audit of this run. If ``audit`` is given, end only the audit of that name."""
        end = asyncio.create_task(self._auditing.end(audit))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)

    def abandon(self, key: str) -> None:
        if not key.startswith(self._name):
            return
        self._abandoned.add(key)
        if key in self._following:
            self._dismiss(key)
            # If the leader's host was lost without closing its connections, the process would wait for it forever.
            asyncio.get_running_loop().call_later(_GRACE, self._give_up, key)
        for chain in [chain for chain, task in self._running.items() if task == key]:
            if self._trainer is not None:
                self._trainer.send(Stop(chain, keep=False))

    def _dismiss(self, key: str) -> None:
        """Make a task stop waiting for the call of its leader."""
        self._meetings[self._following[key]].announce("")

    def _give_up(self, key: str) -> None:
        if key == self._led and self._trainer is not None:
            self._trainer.give_up(_GANG_LEFT)

    async def leave(self) -> None:
        """Prepare for the end of the worker: begin no more chains. Return once the running chains are saved."""
        self._leaving = True
        await self._auditing.end()
        for chain in self._running:
            if self._trainer is not None:
                self._trainer.send(Stop(chain, keep=True))
        while self._running:
            await asyncio.sleep(_LOOK)

    async def close(self) -> None:
        """Stop the running chain and end the process."""
        self._closed = True
        self._gone.set()
        for direct in self._direct:
            direct.cancel()
        await self._auditing.end()
        self._worker.handlers.pop(self._name, None)
        self._worker.handlers.pop(handler_of(self._name), None)
        for task in self._following:
            self._dismiss(task)
            self._give_up(task)
        trainer = self._trainer
        if trainer is not None:
            for running in self._running:
                trainer.send(Stop(running, keep=False))
            await trainer.finish(_GRACE)
        if self._keeper is not None:
            await self._keeper


def _unable(summary: str, kind: Literal["trainable", "killed"] = "trainable") -> Loaded:
    return Loaded(problem=Problem(kind=kind, summary=summary, traceback=""))


# --- entered by Dask ----------------------------------------------------------------------------------------


async def run_chain(run: str, key: str, chain: bytes, checkpoints: bytes, slot: str, incarnation: str) -> list[bytes]:
    """Train a chain in this incarnation of a worker, and return all its encoded reports. A Dask task."""
    return await _site(run).train(key, chain, checkpoints, slot, incarnation)


async def follow_chain(run: str, key: str, chain: bytes, checkpoints: bytes, rank: int, incarnation: str) -> str:
    """Train a chain in another worker's gang. Return why joining failed, or an empty string. A Dask task."""
    return await _site(run).follow(key, chain, checkpoints, rank, incarnation)


async def answer(run: str, key: str, request: bytes) -> dict[str, Any] | None:
    """Answer an encoded :class:`TryOut`, :class:`Measure` or :class:`LookAt`. A Dask task."""
    return await _site(run).answer(key, request)


def _site(run: str) -> Site:
    plugin = get_worker().plugins.get(name_of(run))
    if plugin is None or plugin.site is None:
        raise ClusterError(f"run {run} has ended, or its trainable never reached {platform.node()}")
    site: Site = plugin.site
    return site


def described(run: str, dask_worker: Worker) -> bytes | None:
    """Return the worker's encoded description; ``None`` if the plugin is not installed yet."""
    plugin = dask_worker.plugins.get(name_of(run))
    if plugin is None or plugin.site is None or plugin.site.description is None:
        return None
    return encode(plugin.site.description)
