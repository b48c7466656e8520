"""DaskExecutor: trains chains on the workers of a Dask cluster, one task each."""

from __future__ import annotations

import logging
import pickle
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import dask
from distributed import CancelledError, Client, Future, LocalCluster

from hpstage.checkpoints import CheckpointStore
from hpstage.cluster import worker as side
from hpstage.cluster.admission import environment_of, refusal
from hpstage.cluster.courier import Courier
from hpstage.cluster.inbox import Inbox
from hpstage.cluster.launch import local_cluster
from hpstage.cluster.messages import (
    Amend,
    Description,
    Order,
    Stop,
    decode_description,
    encode,
    name_of,
)
from hpstage.cluster.shipping import pack
from hpstage.errors import ClusterError, InternalError, UsageError
from hpstage.events import Amendment, Chain, ChainId, Report, WorkerId
from hpstage.executor import Environment, Executor
from hpstage.schedule import Scalar

logger = logging.getLogger("hpstage")

_STARTING = 60.0
"""Seconds that a cluster which has no worker yet is given."""
_LOOK = 0.5
"""Seconds between two looks at the connection while nothing is heard."""


class DaskExecutor(Executor):
    """Trains on a Dask cluster, one worker process per device.

    Reports come over a feed of events as they happen, and again as the result of the chain's task, which says what
    the feed has lost. Workers that join later are used too, if they are like those that were there first.

    Args:
        client: whose cluster to use. A connection of its own is made; the client is left as it is, and never closed.
            Without a client a local cluster is started, and closed in :meth:`close`.
        n_workers: size of the local cluster.
        gpus: local cluster: how many GPUs to use; else: how many workers must have one. ``None``: what there is.

    Raises:
        UsageError: ``n_workers`` was given with a client.
    """

    def __init__(self, client: Client | None = None, *, n_workers: int | None = None, gpus: int | None = None) -> None:
        if client is not None and n_workers is not None:
            raise UsageError(
                "n_workers sizes the local cluster; the cluster of a client is sized by client.cluster.scale"
            )
        self._given = client
        self._n_workers = n_workers
        self._gpus = gpus
        self._run = uuid.uuid4().hex[:12]
        self._name = name_of(self._run)
        self._cluster: LocalCluster | None = None
        self._client: Client | None = None
        self._connection: object = None  # another one means another scheduler
        self._courier: Courier | None = None
        self._inbox = Inbox()
        self._checkpoints = b""
        self._registered = False
        self._started = 0
        self._futures: dict[ChainId, Future] = {}
        self._lock = threading.Lock()  # over futures, and what is below
        self._environment: Environment | None = None
        self._early: dict[WorkerId, Description | None] = {}  # came (or left: None) while open() was under way
        self._feeding = threading.Event()

    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        packed = pack(trainable)
        try:
            return self._open(packed, checkpoints)
        except BaseException:
            self.close()
            raise

    def _open(self, packed: bytes, checkpoints: CheckpointStore | None) -> Environment:
        client = self._client = self._connect()
        self._courier = Courier(client, self._name)
        self._listen(client)
        try:
            client.wait_for_workers(1, timeout=_STARTING)
        except TimeoutError as error:
            raise ClusterError(
                f"the cluster at {client.scheduler.address} has had no workers for {_STARTING:.0f} s; start some"
            ) from error
        self._registered = True
        try:
            client.register_plugin(side.TrainingPlugin(self._run, packed, ours=self._given is None))
        except ImportError as error:
            raise UsageError(f"the workers cannot import hpstage ({error}); install the same version there") from error
        except OSError as error:
            raise ClusterError(
                f"a worker was lost while it was being set up ({error}); run the same command again"
            ) from error
        told: dict[str, bytes | None] = client.run(side.described, self._run, on_error="ignore")
        with self._lock:
            found = {WorkerId(name): decode_description(text) for name, text in told.items() if text is not None}
            present = [text for text in (found | self._early).values() if text is not None]
            if not present:
                raise ClusterError("all workers have left while they were being set up; look at their logs")
            self._environment = environment_of(present, self._gpus)
            for description in present:
                self._inbox.join(WorkerId(description.worker))
        if checkpoints is not None:
            self.use(checkpoints)
        return self._environment

    def _connect(self) -> Client:
        if self._given is None:
            self._cluster = local_cluster(self._n_workers, gpus=self._gpus)
            client = Client(self._cluster, set_as_default=False)
        else:
            # A connection of our own: the given one may be asynchronous, restarted, or listen to the same topics.
            if self._given.status != "running":
                raise UsageError(f"the given client is {self._given.status}; connect it first")
            client = Client(self._given.scheduler.address, security=self._given.security, set_as_default=False)
        # Dask's client collects messages for 10 ms; a worker would stand idle meanwhile.
        client.scheduler_comm.interval = 0.001
        self._connection = client.scheduler_comm
        return client

    def _listen(self, client: Client) -> None:
        """Hear of workers and chains from now on; returns when it is sure to."""
        client.subscribe_topic("all", self._on_cluster)
        client.subscribe_topic(self._name, self._on_feed)
        deadline = time.monotonic() + _STARTING
        while not self._feeding.is_set():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the scheduler at {client.scheduler.address} passes on no events; is it overloaded?"
                )
            client.log_event(self._name, {"echo": True})
            self._feeding.wait(0.01)

    @property
    def pool(self) -> str:
        assert self._client is not None, "open() comes first"
        return str(self._client.scheduler_info(n_workers=0)["id"])

    def use(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = pickle.dumps(checkpoints)

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        if not self._inbox.workers:
            return None
        worker = self._inbox.workers[0]
        future = self._submit(
            worker, self._new_key(), side.try_out, self._run, encode(dict(initial)), self._checkpoints
        )
        # Not result(timeout=...): each time-out leaves a future behind whose error Dask's loop complains of.
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        # The task of a worker that left would wait for another at its address.
        while not done.wait(_LOOK) and worker in self._inbox.workers and self._connected():
            pass
        metrics: dict[str, float] | None = future.result() if done.is_set() else None
        future.release()
        return metrics

    def start(self, worker: WorkerId, chain: Chain) -> None:
        if not self._inbox.begin(chain.id, worker):
            return
        key = self._new_key()
        future = self._submit(worker, key, side.run_chain, self._run, key, encode(chain), self._checkpoints)
        with self._lock:
            self._futures[chain.id] = future
        if self._inbox.runs_on(chain.id) is None:
            self._release([chain.id])  # its worker has left meanwhile
        future.add_done_callback(lambda done: self._on_done(chain.id, done))

    def _new_key(self) -> str:
        """A key that is never used again: Dask would mistake one task for the other."""
        self._started += 1
        return f"{self._name}-{self._started}"

    def _submit(self, worker: WorkerId, key: str, function: Any, *arguments: object) -> Future:
        assert self._client is not None, "open() comes first"
        with dask.annotate(executor=self._name):  # the plugin's thread
            return self._client.submit(
                function, *arguments, key=key, workers=[worker], allow_other_workers=False, pure=False, retries=0
            )

    def amend(self, amendment: Amendment) -> None:
        self._order(amendment.chain, Amend(amendment))

    def stop(self, chain: ChainId) -> None:
        self._order(chain, Stop(chain))

    def _order(self, chain: ChainId, order: Order) -> None:
        assert self._courier is not None, "open() comes first"
        worker = self._inbox.runs_on(chain)
        if worker is not None:
            self._courier.send(worker, order)

    def wait(self, timeout: float | None) -> list[Report]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK if deadline is None else min(_LOOK, max(0.0, deadline - time.monotonic()))
            reports = self._inbox.wait(left)
            if reports or (deadline is not None and time.monotonic() >= deadline):
                return reports
            if not self._connected():
                self._inbox.fail(_scheduler_lost())

    def _connected(self) -> bool:
        client = self._client
        return client is not None and client.status == "running" and client.scheduler_comm is self._connection

    def clock(self) -> float:
        return time.time()

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            if self._registered and self._cluster is None and client.status == "running":
                try:
                    client.unregister_worker_plugin(self._name)
                except (OSError, ValueError):
                    logger.warning("the workers could not be told that the run is over", exc_info=True)
            self._release(list(self._futures))
            if client.status == "running":
                # Else the scheduler would tell us of our own leaving, and log that it cannot.
                client.unsubscribe_topic("all")
            client.close()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    # --- on Dask's threads --------------------------------------------------------------------------------

    def _on_feed(self, event: tuple[float, dict[str, Any]]) -> None:
        _, message = event
        if "echo" in message:
            self._feeding.set()
        elif "ready" in message:
            self._on_ready(decode_description(message["ready"]))
        else:
            self._inbox.hear(ChainId(message["chain"]), message["sequence"], [message["report"]])

    def _on_ready(self, description: Description) -> None:
        worker = WorkerId(description.worker)
        with self._lock:
            if self._environment is None:
                self._early[worker] = description
                return
        reason = refusal(description, self._environment)
        if reason is None:
            self._inbox.join(worker)
        else:
            logger.warning("worker %s is not used: %s", worker, reason)

    def _on_cluster(self, event: tuple[float, dict[str, Any]]) -> None:
        _, message = event
        if message.get("action") != "remove-worker":
            return
        worker = WorkerId(message["worker"])
        with self._lock:
            if self._environment is None:
                self._early[worker] = None
                return
        self._release(self._inbox.leave(worker))  # else their tasks would wait for ever for a worker of that address

    def _release(self, chains: list[ChainId]) -> None:
        for chain in chains:
            with self._lock:
                future = self._futures.pop(chain, None)
            if future is not None:
                future.release()

    def _on_done(self, chain: ChainId, future: Future) -> None:
        worker = self._inbox.runs_on(chain)
        if worker is not None:
            # The feed has lost something, or our own code on the worker has failed, or the task was cancelled.
            try:
                self._inbox.hear(chain, 0, future.result())
            except CancelledError:
                if not self._connected():
                    self._inbox.fail(_scheduler_lost())
                    return
            except Exception as error:
                problem = InternalError(f"{chain} failed on {worker} outside of your code: {error!r}")
                problem.__cause__ = error
                self._inbox.fail(problem)
                return
        self._inbox.forget(chain)
        self._release([chain])


def _scheduler_lost() -> ClusterError:
    return ClusterError(
        "the connection to Dask's scheduler is lost; start the cluster again and run the same command again: nothing "
        "that was reached is lost"
    )
