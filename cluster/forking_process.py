"""The process of a fork server (:mod:`hpstage.cluster.fork_server`), which imports modules and forks on request."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

MOST = 1 << 20
"""Maximum number of bytes of a message."""


def main(channel: int, parent: int, modules: list[str], with_threads: bool) -> NoReturn:
    """Import the modules, then fork on request, until the process that has started this one ends.

    Args:
        channel: file descriptor of this process's end of a socket.
        parent: process id of the process that has started this one.
        modules: names of the modules.
        with_threads: see :class:`~hpstage.cluster.fork_server.ForkServer`.
    """
    os.set_inheritable(channel, False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (signal.SIGINT, signal.SIGTERM):  # the other process handles both, and ends this one
        signal.signal(number, signal.SIG_IGN)
    for name in modules:
        # Imports may fail: not every name in the other process's sys.modules can be imported.
        with suppress(Exception):
            importlib.import_module(name)
    if "torch" in sys.modules:
        from hpstage.torch.environment import warm_up

        warm_up()
    with suppress(Exception):  # done once here; after a failure, each fork does it
        from hpstage.training.code.patches import look_ahead

        look_ahead()
    try:
        _Server(socket.socket(fileno=channel), parent, with_threads).serve()
    except OSError:
        os._exit(1)  # the other process has ended
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class _Server:
    """Forks in the thread that calls :meth:`serve`, which is the only thread of the process."""

    def __init__(self, channel: socket.socket, parent: int, with_threads: bool) -> None:
        self._with_threads = with_threads
        self._channel = channel
        self._parent = os.pidfd_open(parent)
        self._ended, wake = os.pipe()
        for end in (self._ended, wake):
            os.set_blocking(end, False)
        self._own = [channel.fileno(), self._parent, self._ended, wake]
        self._forks: set[int] = set()
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # it may be blocked in the process that started us

    def serve(self) -> None:
        poll = select.poll()
        for file in (self._channel.fileno(), self._parent, self._ended):
            poll.register(file, select.POLLIN)
        while True:
            for file, _ in poll.poll():
                if file == self._parent:
                    return
                if file == self._ended:
                    os.read(self._ended, 1 << 16)
                    self._bury()
                elif not self._take_request():
                    return

    def _take_request(self) -> bool:
        message, files, _, _ = socket.recv_fds(self._channel, MOST, 3)
        if not message:
            return False
        try:
            self._fork(json.loads(message), files)
        finally:
            for file in files:
                os.close(file)
        return True

    def _fork(self, request: dict[str, Any], files: list[int]) -> None:
        if obstacle := _obstacle(self._with_threads):
            self._send({"refused": f"a module that the fork server has imported {obstacle}"})
            return
        server = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise a fork would print the buffered text again
        try:
            pid = os.fork()
        except OSError as error:
            self._send({"refused": f"the system allows no more processes ({error})"})
            return
        if pid == 0:
            try:
                _train(server, request, files, self._own)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self._forks.add(pid)
        self._send({"forked": pid})

    def _bury(self) -> None:
        """Report the exit statuses of forks that have ended."""
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._forks.discard(pid)
            self._send({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.send(json.dumps(message).encode())


def _obstacle(with_threads: bool) -> str:
    """Return the reason why this process cannot be forked safely, or an empty string."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1 and not with_threads:
        return f"has started {threads - 1} threads"
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        if any("/libcuda.so" in line for line in maps):
            return "has loaded the CUDA driver"  # torch does not use devices in forks of a process that has queried one
    return ""


def _train(server: int, request: dict[str, Any], files: list[int], servers: list[int]) -> None:
    """Make a fork equivalent to a new process, and train in it."""
    from hpstage.cluster import training_process

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for file in servers:
        os.close(file)
    channel, out, err = files
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:], sys.argv[:] = request["path"], request["argv"]
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()
    training_process.main(channel, server, request["worker"])
