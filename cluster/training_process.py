"""The process in which a run trains on one worker.

The Dask worker is another process, since its event loop draws random numbers and holds Python's lock, and other runs
describe their workloads in it. Chains run in the main thread. A second thread receives messages, a third one writes
states and sends the reports that had to wait for them, and a fourth one fetches states for the next chains. These
threads run no user code and draw no random numbers, and so do not affect training.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

# Imported before any step: its random generator is then keyed before each step, even if a step is the first to use it.
import numpy as np  # noqa: F401

from hpstage.checkpoints import CheckpointStore, LiveCache
from hpstage.checkpoints.host_memory import LIVE, HostMemory
from hpstage.cluster.devices import identities
from hpstage.cluster.messages import (
    PYTHON,
    Amend,
    Done,
    Expect,
    Finish,
    Follow,
    Forget,
    Load,
    Loaded,
    LookAt,
    Measure,
    Perform,
    Ping,
    Pong,
    Problem,
    Raised,
    Received,
    Reply,
    Reported,
    Request,
    Retrain,
    Stop,
    Train,
    TryOut,
    decode_request,
    encode,
    framed,
    unframed,
)
from hpstage.cluster.script import import_script
from hpstage.errors import CheckpointError, GangApart, GangLost, UsageError
from hpstage.errors.arguments import BYTES
from hpstage.execution.bundle import Bundle, slots_in
from hpstage.execution.control import Control
from hpstage.execution.flight import Gathering
from hpstage.execution.lifetime import die_with
from hpstage.execution.retraining import retrain
from hpstage.execution.runs import Runs
from hpstage.execution.shared_device import see_room, sharers
from hpstage.execution.trying_out import measured
from hpstage.execution.untrained import UntrainedFork
from hpstage.plan.facts import ChainId, StateKey, WorkerId
from hpstage.plan.messages import ChainEnded, ChainReport
from hpstage.trainable import Trainable, is_bundling
from hpstage.training.identity.environment import describe
from hpstage.training.identity.inputs import inputs_of
from hpstage.training.trainables import as_trainable

logger = logging.getLogger("hpstage")

_LOOK = 0.5
"""Seconds between two checks whether memory is scarce."""
_ORPHANED = 1
"""Exit status if the worker has ended. Nothing reads it then."""


def main(channel: int, parent: int, worker: str) -> None:
    """Serve the Dask worker's requests, until it sends ``Finish`` or has ended.

    Args:
        channel: file descriptor of this process's end of a socket.
        parent: process id of the worker.
        worker: address of the worker, for reports.
    """
    die_with(parent)
    faulthandler.enable()
    _leave_signals_to_the_worker()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # output is shown even if this process dies
    _close_in_children(channel)
    requests: SimpleQueue[tuple[Request, Control]] = SimpleQueue()
    training = _Training(WorkerId(worker), lambda reply: _write(channel, framed(reply)))
    threading.Thread(target=_listen, args=(channel, requests, training), name="hpstage-orders", daemon=True).start()
    try:
        training.serve(requests)
        atexit._run_exitfuncs()
    except BrokenPipeError:
        _end(_ORPHANED)
    except SystemExit as error:  # raised by the user's code
        traceback.print_exc()
        _end(error.code if isinstance(error.code, int) else int(error.code is not None))
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def _end(status: int) -> NoReturn:
    """Exit immediately: threads of the user's code could keep the process alive, and libraries shut down slowly."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _leave_signals_to_the_worker() -> None:
    """Ignore Ctrl-C on the terminal, and SIGTERM to all processes of a job: the worker handles both, and ends this
    process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # workers of local clusters block it
    # Not SIG_IGN, which would be inherited by processes that the user's code starts and may end with SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _close_in_children(channel: int) -> None:
    """Close the channel in forked processes, which would otherwise hold it open after the end of this process. It is
    closed only if it is still the same file: in a fork of a fork, its number may belong to another file."""
    own = os.fstat(channel)

    def close() -> None:
        with suppress(OSError):
            if os.path.samestat(os.fstat(channel), own):
                os.close(channel)

    os.register_at_fork(after_in_child=close)


def _listen(channel: int, requests: SimpleQueue[tuple[Request, Control]], training: _Training) -> None:
    """Pass requests to the main thread and orders to their chains, and end this process when its worker ends."""
    controls: dict[WorkerId, tuple[ChainId, Control]] = {}  # by slot: the control of its last chain
    try:
        while True:
            match decode_request(unframed(channel)):
                case Stop() as stop:
                    for control in _of(controls, stop.chain):
                        control.stop(keep=stop.keep)
                case Amend(amendment):
                    for control in _of(controls, amendment.chain):
                        control.amend(amendment)
                case Expect(keys):
                    training.expect(keys)
                case Ping():
                    training.send(Pong())
                case Train() as request:
                    control = Control()
                    controls[request.slot] = request.chain.id, control
                    training.send(Received(request.chain.id))
                    requests.put((request, control))
                    training.wake()
                case request:
                    requests.put((request, Control()))
    except EOFError:
        os._exit(_ORPHANED)
    except BaseException:
        traceback.print_exc()
        os._exit(_ORPHANED)  # without this thread, the process would never end


def _of(controls: Mapping[WorkerId, tuple[ChainId, Control]], chain: ChainId) -> list[Control]:
    return [control for id, control in controls.values() if id == chain]


class _Training:
    """Executes requests in the main thread, which calls :meth:`serve`."""

    def __init__(self, worker: WorkerId, send: Callable[[Reply], None]) -> None:
        self._worker = worker
        self._reply = send
        self._replying = threading.Lock()
        self._trainable: Trainable | None = None
        self._checkpoints = b""
        self._bundle: Bundle | None = None
        self._runs: Runs | None = None

    def send(self, reply: Reply) -> None:
        """Send a reply. May be called by any thread."""
        with self._replying:
            self._reply(reply)

    def _report(self, report: ChainReport | Gathering) -> None:
        self.send(Reported(encode(report), report.chain))

    def _report_late(self, report: ChainReport) -> None:
        """Send a report that had to wait until a state was written. Called in the thread that writes states."""
        try:
            self._report(report)
        except BrokenPipeError:
            os._exit(_ORPHANED)

    def wake(self) -> None:
        """Have a requested chain join the running chains at their next step. May be called by any thread."""
        if self._bundle is not None:
            self._bundle.pause()

    def expect(self, keys: Sequence[StateKey]) -> None:
        """Start fetching the states from which the next chains will start. May be called by any thread."""
        bundle = self._bundle
        if bundle is not None:
            bundle.expect(keys)

    def serve(self, requests: SimpleQueue[tuple[Request, Control]]) -> None:
        while True:
            if self._bundle and requests.empty():
                self._run_bundle(self._bundle)
                continue
            request, control = requests.get()
            if isinstance(request, Finish):
                while self._bundle:  # its chains were stopped
                    self._run_bundle(self._bundle)
                close = getattr(self._trainable, "close", None)
                if close is not None:
                    close()
                return
            if isinstance(request, Forget):
                self._bundle = self._bundle or None
                continue
            of = request.chain.id if isinstance(request, Train) else None
            try:
                value = self._carry_out(request, control)
            except BrokenPipeError:
                raise  # the worker has ended
            except Exception as error:
                self.send(_raised(error, of))
            else:
                if of is None:
                    self.send(Done(msgspec.Raw(encode(value))))

    def _run_bundle(self, bundle: Bundle) -> None:
        """Train until the next report, and send it."""
        try:
            report = bundle.run()
        except Exception as error:
            self._bundle = None
            for chain in bundle.close():
                self.send(_raised(error, chain))
            return
        if report is None:
            return
        self._report(report)
        if isinstance(report, ChainEnded):
            self.send(Done(of=report.chain))

    def _carry_out(self, request: Request, control: Control) -> object:
        match request:
            case Load():
                return self._load(request)
            case Measure():
                assert self._trainable is not None, "a worker with a problem measures nothing"
                return measured(self._trainable, request.initial, request.steps)
            case LookAt():
                assert self._trainable is not None, "a worker with a problem trains nothing"
                return inputs_of(self._trainable).now(request.inputs)
            case TryOut():
                assert self._trainable is not None, "a worker with a problem tries nothing out"
                see_room(self._trainable, request.initial)
                return self._bundle_for(request.checkpoints).try_out(request.initial)
            case Train():
                self._bundle_for(request.checkpoints).start(request.slot, request.chain, control)
            case Follow():
                try:
                    self._bundle_for(request.checkpoints).follow(request.chain, request.address, request.rank)
                except GangLost:
                    logger.debug(
                        "%s has lost a worker of its gang", request.chain.id, exc_info=True
                    )  # its lead reports it
                except (GangApart, CheckpointError) as error:
                    return str(error)
                return ""
            case Retrain():
                assert self._trainable is not None, "a process with a problem trains nothing again"
                return retrain(self._trainable, pickle.loads(request.checkpoints), request.segment)  # noqa: S301
            case Perform():
                assert self._trainable is not None, "a process with a problem trains no runs"
                self._runs = self._runs or Runs(self._trainable, request.states)
                return self._runs.perform(request.run)
        return None

    def _load(self, request: Load) -> Loaded:
        """Unpack the trainable, and describe this process as it is during training."""
        try:
            if request.python != PYTHON:
                raise UsageError(
                    f"it runs Python {PYTHON}, and the search Python {request.python}: code cannot be sent from one to "
                    f"the other. Start the workers with Python {request.python}, or the search with Python {PYTHON}"
                )
            if request.arguments is not None:
                sys.argv[:] = request.arguments
            import_script(request.script)
            subject = pickle.loads(request.trainable)  # noqa: S301  # the user's own, by design
            self._trainable = as_trainable(subject)
            environment = describe(self._trainable)
        except UsageError as error:  # its message has a remedy, and needs no traceback
            return Loaded(problem=Problem(kind="trainable", summary=str(error), traceback=""))
        except (Exception, SystemExit) as error:
            return Loaded(
                problem=Problem(
                    kind="import" if isinstance(error, ImportError) else "trainable",
                    summary=traceback.format_exception_only(error)[-1].strip(),
                    traceback="".join(traceback.format_exception(error)),
                )
            )
        torch = sys.modules.get("torch")
        cuda = torch is not None and torch.cuda.is_available()
        count = getattr(subject, "devices_per_stage", 1)
        uses_cuda = cuda and environment.described.get("device", "").startswith("cuda")
        return Loaded(
            cuda=cuda,
            environment=environment,
            slots=slots_in(self._trainable),
            devices=identities(count) if uses_cuda and sharers() == 1 else (),
        )

    def _bundle_for(self, checkpoints: bytes) -> Bundle:
        if self._bundle is None or checkpoints != self._checkpoints:
            assert self._trainable is not None, "a worker with a problem is given no chains"
            store: CheckpointStore = pickle.loads(checkpoints)  # noqa: S301  # the store, sent by the driver
            place = urlsplit(self._worker)
            # The workers of a local cluster have no network address.
            host = "127.0.0.1" if place.scheme == "inproc" else place.hostname or "127.0.0.1"
            live = _live_cache()
            untrained = None
            if not (self._checkpoints or is_bundling(self._trainable)):  # before the first step is trained
                untrained = UntrainedFork.made(self._trainable)
            self._checkpoints = checkpoints
            self._bundle = Bundle(
                self._trainable,
                store,
                live,
                worker=self._worker,
                on_report=self._report_late,
                host=host,
                untrained=untrained,
            )
        return self._bundle


def _live_cache() -> LiveCache:
    """Return a cache that releases memory when memory becomes scarce, even during a step."""
    memory = HostMemory()
    own = os.environ.get(LIVE)
    host_bytes = memory.live_bytes() if own is None else BYTES.of(LIVE, own)
    live = LiveCache(host_bytes, (2 << 30) // sharers(), memory=memory)
    threading.Thread(target=_relieve, args=(live,), name="hpstage-memory", daemon=True).start()
    return live


def _relieve(live: LiveCache) -> None:
    while True:
        time.sleep(_LOOK)
        live.relieve()


def _raised(error: Exception, of: ChainId | None) -> Raised:
    return Raised(type(error).__name__, str(error), "".join(traceback.format_exception(error)), of)


def _write(channel: int, text: bytes) -> None:
    rest = memoryview(text)
    while rest:
        rest = rest[os.write(channel, rest) :]
