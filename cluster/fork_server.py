"""A process that imports packages once, and then forks training processes, each within milliseconds.

A fork must be equivalent to a new process. Therefore the server imports only installed packages, never the user's
modules, which may be edited while it runs. It uses no device, draws no random numbers, and forks only while it has a
single thread. Forks are refused if environment variables or the module search path have changed since it was started;
a process is then spawned instead (:mod:`hpstage.cluster.trainer`).

Linux only: other systems have no safe fork, or cannot end a fork together with the process that it trains for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from hpstage.cluster import malloc
from hpstage.cluster.forking_process import MOST
from hpstage.errors import UsageError
from hpstage.training.code.owner import is_users
from hpstage.training.identity.threads import VARIABLES

logger = logging.getLogger("hpstage")

_SHARED = frozenset({"numpy", "optuna", "safetensors", "scipy", "torch", "torchvision"})
"""Packages that the server imports if the process that starts it has imported them. Importing them only defines
functions and classes. pandas and scikit-learn are excluded: they load pyarrow, if it is installed, which starts
threads."""
PRELOADED = ("hpstage.torch", *sorted(_SHARED))
"""Packages that the server can import on request, even if the process that starts it has not imported them."""
_TRAINING = "hpstage.cluster.training_process"
_OURS = ("hpstage.checkpoints", "hpstage.schedule", "hpstage.torch")
_BUSY = (
    "torch._inductor",
    "torch.utils.tensorboard",
    "optuna.importance",
    "optuna.integration",
    "optuna.storages._rdb",
    "optuna.study._dataframe",
    "optuna.visualization",
)
"""Modules of these packages that are not imported: they start processes or threads, or load packages that may, or take
long to import and have no use in training (SQLAlchemy: a tenth of all imports)."""
_BUSY_WITH = {"hpstage.torch.skorch": "pyarrow", "hpstage.torch.transformers": "datasets"}
"""Modules whose import starts threads if the given package is installed, since the library that they adapt loads it."""
_READ_BY_NO_IMPORT = frozenset(
    {"COLUMNS", "LINES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "PYTHONHASHSEED", "SHLVL", "_", "__DASK_PARENT_PID"}
)
"""Variables that may change while a server runs. Dask sets two of them when it starts a nanny."""
_SET_BY_LIBRARIES = frozenset({"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"})
"""Variables that threadpoolctl and scikit-learn set when they are imported, perhaps after the server was started. They
affect how Intel's OpenMP treats a second copy of itself and forks, but no results."""
_START = (
    "import json, sys; path, arguments = json.load(sys.stdin); sys.path[:] = path; "
    "from hpstage.cluster.forking_process import main; main(*arguments)"
)
# The module search path must be set before the first module of hpstage is imported.
_START_TRAINING = (
    "import json, sys; path, sys.argv, arguments = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from hpstage.cluster.training_process import main; main(*arguments)"
)
_KILLED = -signal.SIGKILL
_IMPORTS = 300.0
"""Seconds to wait for a server's first answer, after its imports."""
_ANSWERS = 60.0
"""Seconds to wait for each later answer."""
_STATUS = 5.0
"""Seconds to wait for a server to report the exit status of a fork that has ended."""
_REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "6640"}
"""Variables that make training repeatable, unless the user has set them. cuBLAS reads the first at the first matrix
product. By the second, all processes iterate a set of strings in the same order; Dask's nannies set the same value."""


def python() -> list[str]:
    """Return the command that starts an interpreter like this one, as multiprocessing does."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [multiprocessing.spawn.get_executable(), *flags]


def training_environment() -> dict[str, str]:
    """Return the environment variables that this process gives to training processes."""
    return {**_REPEATABLE, **os.environ, **malloc.ENVIRONMENT, **dict.fromkeys(VARIABLES, "1")}


def search_path() -> list[str]:
    """Return the strings in ``sys.path``. Imports ignore other entries, such as a ``Path``."""
    return [folder for folder in sys.path if isinstance(folder, str)]


def spawning(channel: int, worker: str, folders: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a training process without a fork server.

    Args:
        channel: file descriptor of the process's end of a socket.
        folders: folders that the process searches for modules before those of this process.
    """
    arguments = [[*folders, *search_path()], sys.argv, [channel, os.getpid(), worker]]
    return [*python(), "-c", _START_TRAINING, json.dumps(arguments)]


@contextmanager
def outputs() -> Iterator[tuple[int, int]]:
    """Yield file descriptors for the standard output and error of a process to be started.

    A process may run without standard streams. A file that it opens later may then get descriptor 0, 1 or 2, and
    training would print into a database, or into the socket of a training process. Therefore descriptors from 0 to 2
    that are free are occupied first, as long as this process lives.
    """
    while (nothing := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    try:
        yield 1 if sys.__stdout__ is not None else nothing, 2 if sys.__stderr__ is not None else nothing
    finally:
        os.close(nothing)


class NotForked(Exception):
    """A process cannot be forked; the message is the reason."""


class NoAnswer(NotForked):
    """The server does not answer, and may be stopped."""


def fork_server(preload: Iterable[str] = ()) -> ForkServer | None:
    """Start a fork server; return ``None`` if the system does not support one.

    Args:
        preload: packages to import in addition to those that this process has imported; only those of ``PRELOADED``.

    Raises:
        UsageError: ``preload`` names a package that is not in ``PRELOADED``, is not installed, or is hidden by a file
            of the user. Importing other packages may start threads, or load modules of the user.
    """
    names = [preload] if isinstance(preload, str) or not isinstance(preload, Iterable) else [*preload]
    for name in names:
        if name not in PRELOADED:
            raise UsageError(
                f"preload names {name!r}; only {', '.join(PRELOADED)} can be preloaded: training processes import "
                f"everything else themselves, in its current version"
            )
        spec = find_spec(name.removeprefix("hpstage."))
        if spec is None:
            raise UsageError(f"preload names {name!r}, but no such package is installed; install it, or leave it out")
        if is_users(name):
            raise UsageError(f"preload names {name!r}, but your file {spec.origin} hides it; rename the file")
    return ForkServer([*_imported(), *names]) if can_fork() else None


def can_fork() -> bool:
    """Return whether a server can fork safely on this system."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class Forked:
    """A forked process, with some of the methods of :class:`asyncio.subprocess.Process`."""

    def __init__(self, pid: int, status: Future[int]) -> None:
        self.pid = pid
        self._status = status
        # A handle, since the server reaps the process, and its number may be reused; and the server may be stopped.
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, which the server reports next
            self._handle = -1
        else:
            weakref.finalize(self, os.close, self._handle)

    def poll(self) -> int | None:
        """Return its exit status, ``None`` while it runs."""
        return self._status.result() if self._status.done() else None

    async def wait(self) -> int:
        """Return its exit status once it has ended. Called once."""
        status = asyncio.wrap_future(self._status)
        if self._handle < 0:
            return await status
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[int] = loop.create_future()

        def note() -> None:
            loop.remove_reader(self._handle)
            gone.set_result(0)

        loop.add_reader(self._handle, note)
        try:
            await asyncio.wait([status, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._handle)
        await asyncio.wait([status], timeout=_STATUS)
        return status.result() if status.done() else _KILLED

    def kill(self) -> None:
        if self._handle >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class ForkServer:
    """A fork server. Creating this object starts the server, which imports in the background. Thread-safe.

    The server and its forks end when this process ends, for whatever reason.

    Args:
        modules: modules that the server imports.
        variables: additional environment variables of the server and its forks, which imports may read.
        with_threads: fork even if imports have started threads. The forks do not have these threads.
    """

    def __init__(
        self,
        modules: Iterable[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
        *,
        with_threads: bool = False,
    ) -> None:
        self._variables = dict(variables)
        self._environment, self._path = training_environment() | self._variables, search_path()
        self._lock = threading.Lock()  # protects the attributes below, and the order of requests
        self._requests: deque[Future[Forked]] = deque()
        self._running: dict[int, Future[int]] = {}
        self._has_answered = self._is_silent = False
        with ExitStack() as stack:
            out, err = stack.enter_context(outputs())
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(theirs)
            # All names of modules would be too long for a command line.
            settings = stack.enter_context(open(os.memfd_create("hpstage"), "w+"))
            json.dump([self._path, [theirs.fileno(), os.getpid(), [_TRAINING, *modules], with_threads]], settings)
            settings.flush()
            settings.seek(0)
            self._process = subprocess.Popen(
                [*python(), "-c", _START],
                stdin=settings,
                stdout=out,
                stderr=err,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                process_group=0,  # Ctrl-C on a terminal must reach only this process
            )
        os.register_at_fork(after_in_child=self._socket.close)  # otherwise it would stay open after this process's end
        threading.Thread(target=self._listen, name="hpstage-forks", daemon=True).start()

    async def fork(
        self, files: Sequence[int], worker: str, *, variables: Mapping[str, str], path: Sequence[str]
    ) -> Forked:
        """Fork a process that trains for ``worker``.

        Args:
            files: file descriptors of the process's end of a socket, of its standard output and of its standard error.
            variables: additional environment variables of the process, which no import reads.
            path: folders that the process searches for modules before those of this process.

        Raises:
            NotForked: the fork would differ from a new process, or the server has ended.
            NoAnswer: the server does not answer. If it forks later, the fork finds its channel closed, and ends.
        """
        forked = asyncio.wrap_future(self._begin(files, worker, variables, path))
        try:
            return await asyncio.wait_for(forked, self._limit)
        except TimeoutError:
            raise self._no_answer() from None

    def fork_and_wait(
        self, files: Sequence[int], worker: str, *, variables: Mapping[str, str], path: Sequence[str]
    ) -> Forked:
        """Same as :meth:`fork`, for callers without an event loop."""
        try:
            return self._begin(files, worker, variables, path).result(self._limit)
        except TimeoutError:
            raise self._no_answer() from None

    @property
    def _limit(self) -> float:
        return _ANSWERS if self._has_answered else _IMPORTS

    def _no_answer(self) -> NoAnswer:
        self._is_silent = True
        return NoAnswer(f"the fork server (process {self._process.pid}) does not answer; it may be stopped")

    def _begin(
        self, files: Sequence[int], worker: str, variables: Mapping[str, str], path: Sequence[str]
    ) -> Future[Forked]:
        if self._is_silent:
            raise self._no_answer()
        environment = training_environment() | self._variables
        changed = sorted(
            name
            for name in {*environment, *self._environment} - _READ_BY_NO_IMPORT - _SET_BY_LIBRARIES
            if environment.get(name) != self._environment.get(name)
        )
        if changed:
            raise NotForked(
                f"environment variables have changed since the fork server was started: {', '.join(changed)}"
            )
        if search_path() != self._path:
            raise NotForked("sys.path has changed since the fork server was started")
        request = {
            "worker": worker,
            "environment": {**environment, **variables},
            "path": [*path, *self._path],
            "argv": sys.argv,
            "folder": os.getcwd(),
        }
        return self._request(request, files)

    def _request(self, request: dict[str, Any], files: Sequence[int]) -> Future[Forked]:
        answer: Future[Forked] = Future()
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            except OSError as error:
                raise NotForked(f"the fork server cannot be reached ({error})") from error
            self._requests.append(answer)
        return answer

    def close(self) -> None:
        """Kill the server, and with it all its forks."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        """Receive the server's messages until it ends. Runs in a thread of its own."""
        try:
            while message := self._socket.recv(MOST):
                with self._lock:
                    self._has_answered, self._is_silent = True, False
                    match json.loads(message):
                        case {"forked": pid}:
                            self._running[pid] = Future()
                            _settle(self._requests.popleft(), Forked(pid, self._running[pid]))
                        case {"refused": why}:
                            _settle(self._requests.popleft(), NotForked(why))
                        case {"ended": pid, "status": code}:
                            self._running.pop(pid).set_result(code)
        except OSError:
            logger.debug("The fork server has ended.", exc_info=True)
        with self._lock:
            while self._requests:
                _settle(self._requests.popleft(), NotForked("the fork server has ended"))
            for status in self._running.values():
                status.set_result(_KILLED)  # the kernel kills forks with their server
            self._socket.close()


def _settle(request: Future[Forked], answer: Forked | NotForked) -> None:
    """Pass an answer to a request, unless the request was cancelled."""
    if not request.set_running_or_notify_cancel():
        return
    if isinstance(answer, Forked):
        request.set_result(answer)
    else:
        request.set_exception(answer)


def _imported() -> list[str]:
    """Return the modules that this process has imported and that are safe to import in the server."""
    shared = {package for package in _SHARED & sys.modules.keys() if not is_users(package)}
    found = [name for name in list(sys.modules) if name.partition(".")[0] in shared or name.startswith(_OURS)]
    busy = (*_BUSY, *(name for name, package in _BUSY_WITH.items() if find_spec(package)))
    return [name for name in found if not name.startswith(busy)]
