"""DaskExecutor: trains chains on the workers of a Dask cluster, each as one Dask task."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any
from urllib.parse import urlsplit

from distributed import CancelledError, Client, Future, LocalCluster
from distributed.security import Security

from hpstage.checkpoints import CheckpointStore
from hpstage.cluster import site
from hpstage.cluster.adaptive import DemandFeed
from hpstage.cluster.connection import Connection
from hpstage.cluster.courier import Courier
from hpstage.cluster.dashboard import page_of
from hpstage.cluster.dashboard.follower import Follower
from hpstage.cluster.direct import DirectChain, site_of
from hpstage.cluster.feed import receivers
from hpstage.cluster.followers import Followers
from hpstage.cluster.fork_server import ForkServer
from hpstage.cluster.inbox import Inbox
from hpstage.cluster.inquiries import Inquiries
from hpstage.cluster.membership import Membership
from hpstage.cluster.messages import (
    Amend,
    BeginAudit,
    EndAudit,
    Expect,
    LookAt,
    Measure,
    Order,
    Stop,
    TryOut,
    decode_audited,
    decode_description,
    encode,
    name_of,
)
from hpstage.cluster.place import Cluster, Place
from hpstage.cluster.script import this_script
from hpstage.cluster.shipping import pack
from hpstage.cluster.worker import TrainingPlugin
from hpstage.errors import ClusterError, InternalError, UsageError
from hpstage.errors.arguments import WORKERS, checked, instance, optional, seconds, whole
from hpstage.executor import Environment, Executor
from hpstage.plan.facts import ChainId, StateKey, WorkerId
from hpstage.plan.messages import Amendment, Audit, AuditId, Chain, Report, host_of
from hpstage.plan.step_times import pooled
from hpstage.schedule import Scalar
from hpstage.store import Journal
from hpstage.trainable import Elastic
from hpstage.training.identity.code_identity import identify
from hpstage.training.trainables import as_trainable

logger = logging.getLogger("hpstage")

_STARTING = 60.0
"""Seconds to wait for a cluster's first worker."""
_SETUPS = 5
"""Maximum number of attempts to set up the workers, if one is lost during setup."""
_LOOK = 0.5
"""Seconds between two checks of the connection while there are no reports, and between two attempts to reconnect."""
_ATTEMPTS = (2.0, 10.0)
"""Seconds to wait for a lost scheduler in an attempt to reconnect: in the first attempt, and at most. The first limit
is short, since Dask retries ever more rarely within an attempt; the maximum is longer, since a large cluster answers
slowly while it starts."""


class DaskExecutor(Executor):
    """Trains on a Dask cluster, with one worker per GPU, or per core if there is no GPU; see ``workers_per_gpu``.

    Reports arrive over a feed of events as they happen. The result of a chain's Dask task repeats them, since the feed
    may lose some. Workers that join later are also used, if they match the first ones.

    If the scheduler is lost, so are its workers. The executor waits for another scheduler at the same address, and
    continues with the workers that join it.

    Args:
        client: the cluster to use, or a client of it. The executor opens a separate connection, and neither modifies
            nor closes the cluster or client. If ``None``, a local cluster is started, and closed by :meth:`close`.
        n_workers: number of workers of the local cluster.
        gpus: number of GPUs that the local cluster uses; for a given cluster, minimum number of workers that must have
            a GPU. ``None``: as many as there are.
        workers_per_gpu: number of workers of the local cluster that share each GPU, for models that leave most of it
            idle. Each worker is a process; before a search, one of them measures how much memory it needs.
        worker_timeout: seconds for which a search waits for workers when all have left, including the time to restart a
            scheduler; by default 300, and 60 for a local cluster. A training process that neither answers nor computes
            for this time (at least 10 s) is killed and replaced.

    Raises:
        UsageError: ``n_workers`` or ``workers_per_gpu`` was given with a client.
    """

    @checked(
        client=optional(instance((Client, Cluster), "a dask.distributed.Client or a cluster")),
        n_workers=optional(WORKERS),
        gpus=optional(whole(0)),
        workers_per_gpu=optional(WORKERS),
        worker_timeout=optional(seconds(above=0)),
    )
    def __init__(
        self,
        client: Client | Cluster | None = None,
        *,
        n_workers: int | None = None,
        gpus: int | None = None,
        workers_per_gpu: int | None = None,
        worker_timeout: float | None = None,
    ) -> None:
        self._place = Place(client, n_workers, gpus, workers_per_gpu)
        self._gpus = gpus
        self.can_audit = workers_per_gpu in (None, 1)  # otherwise audits would take GPU memory from training
        self._run = uuid.uuid4().hex[:12]
        self._name = name_of(self._run)
        default = 60.0 if client is None else 300.0
        self.worker_timeout = default if worker_timeout is None else worker_timeout
        self._where: str | LocalCluster = ""
        self._security: Security | None = None
        self._plugin: TrainingPlugin | None = None
        self._connection: Connection | None = None
        self._reconnecting: threading.Thread | None = None
        self._closed = threading.Event()
        self._courier: Courier | None = None
        self._inbox = Inbox()
        self._demand = DemandFeed()
        self._inquiries = Inquiries(self._inquire, lambda: self._inbox.workers, lambda: self._connected)
        self._checkpoints = b""
        self._started = 0
        self._most_slots = 1  # maximum over the workers present in open()
        self._futures: dict[ChainId, Future | DirectChain] = {}
        self._audits: dict[AuditId, WorkerId] = {}  # audits that were started; some may have ended
        self._followers = Followers(self._on_refused)
        self._lock = threading.Lock()  # protects the futures
        self._loaded: dict[str, str] = {}
        self._members = Membership(self._inbox, self._lost, self._demand.joined)

    def take(self, server: ForkServer | None) -> None:
        """Use a fork server, started before this module was imported, for the training processes of a local cluster.
        The cluster closes the server. Call this before :meth:`open`."""
        self._place.fork_server = server

    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        adapted = as_trainable(trainable)
        self.widest = adapted.virtual_nodes if isinstance(adapted, Elastic) else 1
        try:
            identity = identify(adapted)
        except UsageError:
            pack(trainable, ())  # if it cannot be sent either, this raises a clearer error, which names the attribute
            raise
        self._loaded = identity.loaded
        packed = pack(trainable, identity.packages)
        try:
            return self._open(packed, checkpoints, getattr(trainable, "devices_per_stage", 1))
        except BaseException:
            self.close()
            raise

    def _open(self, packed: bytes, checkpoints: CheckpointStore | None, gpus_per_worker: int) -> Environment:
        self._where, self._security = self._place.open(gpus_per_worker)
        driver = socket.gethostname(), os.getpid()
        self._plugin = TrainingPlugin(
            self._run, packed, driver=driver, script=this_script(), silence=self.worker_timeout
        )
        if isinstance(self._where, LocalCluster):
            receivers[self._name] = self._on_feed
        try:
            connection = self._connect()
            connection.forget_the_dead(name_of(""))
        except OSError as error:
            raise ClusterError(
                f"no scheduler answers at {self._where} ({error}); start the cluster and run the same command again"
            ) from error
        client = connection.client
        self._install(client, self._plugin)
        try:
            answers: dict[str, bytes | None] = client.run(site.described, self._run, on_error="ignore")
        except OSError as error:
            raise ClusterError(
                f"the scheduler at {self._where} was lost while the workers were being set up ({error}); run the same "
                f"command again"
            ) from error
        found = {WorkerId(name): decode_description(text) for name, text in answers.items() if text is not None}
        environment, self._most_slots = self._members.begin(found, self._gpus, self._loaded, self.devices)
        if checkpoints is not None:
            self.use(checkpoints)
        return environment

    def _install(self, client: Client, plugin: TrainingPlugin) -> None:
        """Install the plugin on all workers; retry if one is lost during setup."""
        for attempt in range(_SETUPS):
            try:
                client.wait_for_workers(1, timeout=_STARTING)
                client.register_plugin(plugin)
                return
            except TimeoutError as error:
                raise ClusterError(
                    f"the cluster at {client.scheduler.address} has had no workers for {_STARTING:.0f} s; start some"
                ) from error
            except ImportError as error:
                raise UsageError(
                    f"the workers cannot import hpstage ({error}); install the same version there"
                ) from error
            except OSError as error:
                if attempt + 1 == _SETUPS or not self._connected:
                    raise ClusterError(
                        f"a worker was lost while it was being set up ({error}); run the same command again"
                    ) from error

    def _connect(self, timeout: float | None = None) -> Connection:
        # A separate connection: the given client may be asynchronous, restarted, or subscribed to the same topics.
        connection = self._connection = Connection(
            self._where,
            self._security,
            self._name,
            on_feed=self._on_feed,
            present=self._members.incarnation_of,
            on_left=self._members.left,
            timeout=timeout,
        )
        self._courier = Courier(connection.client, self._name)
        connection.listen()
        self._demand.connect(connection.client)
        return connection

    @property
    def pool(self) -> str:
        assert self._connection is not None, "open() comes first"
        return self._connection.pool

    def use(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = pickle.dumps(checkpoints)

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        request = TryOut(dict(initial), self._checkpoints)
        return next(iter(self._inquiries.answers(self._inbox.workers[:1], request)), None)

    def measure(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float] | None:
        workers = self._inbox.workers
        together = [worker for worker in workers if urlsplit(worker).hostname == urlsplit(workers[0]).hostname]
        found = self._inquiries.answers(together, Measure(dict(initial), steps))
        return pooled(found) if found else None

    def look_at(self, inputs: Iterable[str]) -> dict[str, str]:
        return next(iter(self._inquiries.answers(self._inbox.workers[:1], LookAt(tuple(inputs)))), {})

    def _inquire(self, worker: WorkerId, request: bytes) -> tuple[str, Future]:
        key = self._new_key()
        return key, self._submit(worker, key, site.answer, self._run, key, request)

    @property
    def present(self) -> int:
        return len(self._inbox.workers)

    @property
    def slots(self) -> int:
        return self._most_slots

    def start(self, worker: WorkerId, chain: Chain) -> None:
        incarnations = self._inbox.begin(chain.id, worker, chain.gang, last=chain.last)
        if not incarnations:
            return  # the worker has left, as a report informs the driver
        if not self._connected:
            return  # wait() will report that all workers have left
        encoded = encode(chain)
        future = self._begin(host_of(worker), self._new_key(), encoded, self._checkpoints, worker, incarnations[0])
        followers = {}
        for rank, member in enumerate(chain.gang, 1):
            key = self._new_key()
            arguments = self._run, key, encoded, self._checkpoints, rank, incarnations[rank]
            followers[member] = self._submit(member, key, site.follow_chain, *arguments)
        with self._lock:
            self._futures[chain.id] = future
        self._followers.add(chain.id, followers)
        self._see_gangs()
        if self._inbox.runs_on(chain.id) is None:
            self._release([chain.id])  # the worker has just left
        future.add_done_callback(lambda done: self._on_done(chain.id, done))

    def _begin(self, worker: WorkerId, key: str, *arguments: object) -> Future | DirectChain:
        assert self._connection is not None, "open() comes first"
        here = site_of(self._connection.client, self._name, worker)
        if here is not None:
            return DirectChain(here, key, *arguments)
        return self._submit(worker, key, site.run_chain, self._run, key, *arguments)

    def _new_key(self) -> str:
        """Return a unique key: Dask would confuse two tasks with the same key."""
        self._started += 1
        return f"{self._name}-{self._started}"

    def _submit(self, worker: WorkerId, key: str, function: Any, *arguments: object) -> Future:
        assert self._connection is not None, "open() comes first"
        return self._connection.client.submit(
            function, *arguments, key=key, workers=[worker], allow_other_workers=False, pure=False, retries=0
        )

    def amend(self, amendment: Amendment) -> None:
        self._order(amendment.chain, Amend(amendment))

    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        self._order(chain, Stop(chain, keep))

    def expect(self, worker: WorkerId, keys: Sequence[StateKey]) -> None:
        assert self._courier is not None, "open() comes first"
        if self._connected:
            self._courier.send(host_of(worker), Expect(tuple(keys)))

    def audit(self, worker: WorkerId, audit: Audit) -> None:
        assert self._courier is not None, "open() comes first"
        if self._connected:
            self._audits[audit.id] = worker
            self._courier.send(worker, BeginAudit(audit, self._checkpoints))

    def stop_audit(self, audit: AuditId) -> None:
        worker = self._audits.get(audit)
        if worker is not None and self._courier is not None and self._connected:
            self._courier.send(worker, EndAudit(audit))

    def _order(self, chain: ChainId, order: Order) -> None:
        assert self._courier is not None, "open() comes first"
        worker = self._inbox.runs_on(chain)
        if worker is not None:
            self._courier.send(host_of(worker), order)

    def adapt(self, demand: Callable[[float, float], int]) -> None:
        self._demand.follow(demand)

    def wait(self, timeout: float | None) -> list[Report]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if not self._connected:
                self._on_disconnected()
            self._demand.look(self.clock())
            left = _LOOK if deadline is None else min(_LOOK, max(0.0, deadline - time.monotonic()))
            reports = self._inbox.wait(left)
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports

    @property
    def _connected(self) -> bool:
        return self._connection is not None and self._connection.alive

    def _on_disconnected(self) -> None:
        if not self._place.is_given:
            self._inbox.fail(
                ClusterError("the local Dask cluster died; all progress is saved. Run the same command again to resume")
            )
        elif self._reconnecting is None or not self._reconnecting.is_alive():
            logger.warning(
                "The connection to Dask's scheduler at %s is lost, and its workers with it; waiting for its "
                "return, up to %.0f s",
                self._where,
                self.worker_timeout,
            )
            self._abandon()
            self._reconnecting = threading.Thread(target=self._reconnect, name="hpstage-reconnect", daemon=True)
            self._reconnecting.start()

    def _abandon(self) -> None:
        """Close the connection, and treat all workers as lost, even if they are still running."""
        if self._connection is not None:
            self._connection.close()
        for worker in self._inbox.workers:
            self._release(self._inbox.leave(worker, "unreachable"))

    def _reconnect(self) -> None:
        """Retry until a scheduler is connected and has the plugin. Runs in a thread, to not block the driver."""
        timeout, longest = _ATTEMPTS
        while not self._closed.is_set():
            try:
                client = self._connect(timeout).client
                client.register_plugin(self._plugin)
            except ImportError as error:
                logger.warning("Workers that cannot import hpstage (%s) are not used; install it there", error)
            except (OSError, ClusterError, AssertionError):
                # Dask's client asserts that a scheduler's first message comes alone; a starting one may send more.
                logger.debug("No scheduler answers yet.", exc_info=True)
            except Exception as error:
                problem = InternalError(f"reconnecting to Dask's scheduler failed: {error!r}")
                problem.__cause__ = error
                self._inbox.fail(problem)
                return
            if self._connected:
                logger.warning("Dask's scheduler at %s is back; continuing with the workers that join it", self._where)
                return
            self._abandon()
            timeout = min(1.5 * timeout, longest)
            self._closed.wait(_LOOK)

    def show(self, journal: Journal) -> AbstractContextManager[Follower]:
        return closing(Follower(journal, self._present_client))

    @property
    def page(self) -> str | None:
        client = self._present_client()
        return None if client is None else page_of(client)

    def _present_client(self) -> Client | None:
        connection = self._connection
        return connection.client if connection is not None and connection.alive else None

    def clock(self) -> float:
        return time.time()

    def close(self) -> None:
        self._closed.set()
        receivers.pop(self._name, None)
        if self._reconnecting is not None:
            self._reconnecting.join()
        connection = self._connection
        if connection is not None:
            if self._place.is_given and connection.alive:
                try:
                    connection.client.unregister_worker_plugin(self._name)
                except (OSError, ValueError, KeyError):
                    logger.warning("The workers could not be notified of the end of the run.", exc_info=True)
            self._release(list(self._futures))
            connection.close()
            self._connection = None
        self._place.close()

    # --- on Dask's threads --------------------------------------------------------------------------------

    def _on_feed(self, message: dict[str, Any]) -> None:
        if "trying" in message:
            self._inquiries.begun(message["trying"])
        elif "audited" in message:
            ended = decode_audited(message["audited"])
            self._audits.pop(ended.audit, None)
            self._inbox.audited(ended)
        elif "notice" in message:
            logger.warning("%s", message["notice"])
        elif "ready" in message:
            self._members.ready(decode_description(message["ready"]))
        elif "lost" in message:
            logger.warning("Worker %s: %s; its training continues elsewhere", message["lost"], message["message"])
            worker = WorkerId(message["lost"])
            self._members.left(worker, message["reason"], message["incarnation"], message["message"])
        else:
            self._inbox.receive(ChainId(message["chain"]), message["sequence"], [message["report"]])

    def _lost(self, chains: list[ChainId]) -> None:
        self._release(chains)
        self._see_gangs()

    def _see_gangs(self) -> None:
        """Stop the chains whose gang has lost a worker. Release the lost worker's task, which would otherwise wait for
        another worker at its address."""
        for chain in self._inbox.orphaned():
            self._followers.keep(chain, self._inbox.workers)
            self.stop(chain)

    def _on_refused(self, chain: ChainId, worker: WorkerId, why: str) -> None:
        """Stop a chain if a worker could not join its gang, which would otherwise wait for the worker."""
        if self._inbox.refuse(chain, f"worker {worker} could not train with others: {why}"):
            self.stop(chain)

    def _release(self, chains: list[ChainId]) -> None:
        for chain in chains:
            with self._lock:
                future = self._futures.pop(chain, None)
            if future is not None:
                future.release()
            self._followers.release(chain)

    def _on_done(self, chain: ChainId, future: Future | DirectChain) -> None:
        worker = self._inbox.runs_on(chain)
        cancelled = future.cancelled()
        if worker is not None and not cancelled:
            # The chain's end was not reported: the feed has lost reports, or hpstage's code on the worker has failed.
            try:
                self._inbox.receive(chain, 0, future.result())
            except CancelledError:
                cancelled = True
            except Exception as error:
                problem = InternalError(f"{chain} failed on {worker} outside of your code: {error!r}")
                problem.__cause__ = error
                self._inbox.fail(problem)
                return
        if cancelled and not self._connected:
            return  # wait() will report that all workers have left
        self._inbox.forget(chain)
        self._release([chain])
