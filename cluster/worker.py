"""The worker's side: a plugin that holds the trainable, and the task that trains a chain on it."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import platform
import socket
import sys
import threading
import traceback

from distributed import Worker, WorkerPlugin
from distributed.threadpoolexecutor import ThreadPoolExecutor
from msgspec.structs import replace

from hpstage.checkpoints import CheckpointStore, LiveCache
from hpstage.cluster import memory
from hpstage.cluster.messages import (
    Amend,
    Description,
    Problem,
    decode_chain,
    decode_orders,
    decode_values,
    encode,
    name_of,
)
from hpstage.environment import describe
from hpstage.errors import ClusterError
from hpstage.events import ChainId, WorkerId
from hpstage.runner import ChainRunner, Control
from hpstage.trainable import Trainable, as_trainable

# The default generators of random numbers belong to the process: two runs on one worker train by turns.
_turn = threading.Lock()
_sites: dict[str, Site] = {}


class TrainingPlugin(WorkerPlugin):  # type: ignore[misc]
    """Brings a run's trainable to every worker, also to those that join later.

    Args:
        run: names the run.
        trainable: what the user passed, cloudpickled.
        driver: the driver's host and process. Signals to its group (Ctrl-C on its terminal, ``timeout``) are for it
            alone, not for workers that it has started.
    """

    def __init__(self, run: str, trainable: bytes, *, driver: tuple[str, int]) -> None:
        self._driver = driver
        self.name = name_of(run)
        self._run = run
        self._trainable = trainable

    async def setup(self, worker: Worker) -> None:
        """Unpack the trainable, then tell the driver that this worker is ready, or why it is not.

        A failure is told, not raised: a worker that joins while its plugin raises would not start.
        """
        if self._driver == (socket.gethostname(), os.getppid()):
            if os.getpgid(0) == os.getpgid(os.getppid()):
                os.setpgid(0, 0)
            logging.getLogger("distributed.worker.state_machine").addFilter(_is_news)
        site = _sites[self._run] = Site(self._run, worker)
        await asyncio.wrap_future(site.executor.submit(site.load, self._trainable))
        worker.log_event(self.name, {"ready": encode(site.description)})

    def teardown(self, worker: Worker) -> None:
        _sites.pop(self._run).close()
        if not _sites:
            memory.let_go()

    def transition(self, key: str, start: str, finish: str, **_: object) -> None:
        # Nobody holds the future any more: the driver has closed, or is dead. Dask would let the task run on.
        site = _sites.get(self._run)
        if start == "executing" and finish in ("cancelled", "released") and site is not None:
            site.abandon(key)


def _is_news(record: logging.LogRecord) -> bool:
    """That a worker which its driver closes cuts its chain off is none."""
    return not record.getMessage().endswith("ended with CancelledError")


class Site:
    """What one run has on one worker: trainable, live cache, the running chain and a thread to train in.

    All of the user's code runs in that one thread, whatever the number of Dask's own: what torch and others keep
    per thread is then the same for every chain.
    """

    def __init__(self, run: str, worker: Worker) -> None:
        self.description = Description(worker=worker.address, host=socket.gethostname(), pid=os.getpid())
        self._worker = worker
        self._name = name_of(run)
        memory.hold()  # before the thread is made and picks an arena
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        worker.executors[self._name] = self.executor
        worker.handlers[self._name] = self.control
        self._trainable: Trainable | None = None
        self._checkpoints = b""
        self._runner: ChainRunner | None = None
        self._lock = threading.Lock()
        self._controls: dict[ChainId, Control] = {}
        self._chains: dict[str, ChainId] = {}
        self._abandoned: set[str] = set()

    def load(self, trainable: bytes) -> None:
        """Unpack the trainable and describe this process as it would train; told in ``description``."""
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = "1"  # read by libraries that are imported from here on
        try:
            self._trainable = as_trainable(pickle.loads(trainable))  # noqa: S301  # the user's own code, by design
            torch = sys.modules.get("torch")
            self.description = replace(
                self.description,
                cuda=torch is not None and torch.cuda.is_available(),
                environment=describe(self._trainable),
            )
        except Exception as error:
            problem = Problem(
                kind="import" if isinstance(error, ImportError) else "trainable",
                summary=traceback.format_exception_only(error)[-1].strip(),
                traceback="".join(traceback.format_exception(error)),
            )
            self.description = replace(self.description, problem=problem)

    def try_out(self, initial: bytes, checkpoints: bytes) -> dict[str, float] | None:
        self._worker.log_event(self._name, {"trying": True})
        with _turn:
            return self._runner_for(checkpoints).try_out(decode_values(initial))

    def train(self, key: str, encoded: bytes, checkpoints: bytes) -> list[bytes]:
        chain = decode_chain(encoded)
        with self._lock:
            # Orders may have come before their chain; those for other chains are late and of no use.
            control = self._controls.get(chain.id) or Control()
            self._controls = {chain.id: control}
            self._chains = {key: chain.id}
            if key in self._abandoned:
                control.stop()
        reports: list[bytes] = []
        with _turn:
            for report in self._runner_for(checkpoints).run(chain, control):
                if report is None:
                    continue  # nobody pauses a chain here
                told = encode(report)
                # At once over the feed, which may lose; together in the result, which may not.
                self._worker.log_event(self._name, {"chain": chain.id, "sequence": len(reports), "report": told})
                reports.append(told)
        if key in self._abandoned:
            self._abandoned.discard(key)
            self._runner = None  # nobody knows whether there will be another chain: free the states in memory
        return reports

    def _runner_for(self, checkpoints: bytes) -> ChainRunner:
        if self._runner is None or checkpoints != self._checkpoints:
            assert self._trainable is not None, "a worker with a problem is given no chains"
            store: CheckpointStore = pickle.loads(checkpoints)  # noqa: S301  # the store, sent by the driver
            self._checkpoints = checkpoints
            self._runner = ChainRunner(self._trainable, store, LiveCache(), worker=WorkerId(self.description.worker))
        return self._runner

    def control(self, orders: bytes) -> None:
        """Handler of Dask messages: orders for chains that run or are about to."""
        for order in decode_orders(orders):
            chain = order.amendment.chain if isinstance(order, Amend) else order.chain
            with self._lock:
                control = self._controls.setdefault(chain, Control())
            if isinstance(order, Amend):
                control.amend(order.amendment)
            else:
                control.stop(keep=order.keep)

    def abandon(self, key: str) -> None:
        with self._lock:
            if key.startswith(self._name):
                self._abandoned.add(key)
            if key in self._chains:
                self._controls[self._chains[key]].stop()

    def close(self) -> None:
        """Stop what runs and forget everything."""
        with self._lock:
            for control in self._controls.values():
                control.stop()
        self._worker.handlers.pop(self._name, None)
        self._worker.executors.pop(self._name, None)
        close = getattr(self._trainable, "close", None)
        if close is not None:
            self.executor.submit(close)
        self.executor.shutdown(wait=False)


def run_chain(run: str, key: str, chain: bytes, checkpoints: bytes) -> list[bytes]:
    """The Dask task: train a chain and return all its reports, encoded."""
    return _site(run).train(key, chain, checkpoints)


def try_out(run: str, initial: bytes, checkpoints: bytes) -> dict[str, float] | None:
    """The Dask task: set up and evaluate untrained."""
    return _site(run).try_out(initial, checkpoints)


def _site(run: str) -> Site:
    site = _sites.get(run)
    if site is None:
        raise ClusterError(f"run {run} is over, or its trainable never reached {platform.node()}")
    return site


def described(run: str) -> bytes | None:
    """What this worker says of itself, encoded; ``None`` if the plugin is not there yet."""
    site = _sites.get(run)
    return encode(site.description) if site is not None else None
