"""Runs work in a fork of this process: a copy of its memory, which the work may change, and which then disappears."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import os
import select
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpstage.execution.held import has_own_work, held_by
from hpstage.execution.lifetime import die_with
from hpstage.execution.shared_mappings import make_own, obstacle_in, shared_mappings
from hpstage.training.adapter import Adapter
from hpstage.training.capture.class_dicts import find_classes
from hpstage.training.code.registrations import registered
from hpstage.training.identity import accelerators

_NOT_KEPT = os.O_CREAT | os.O_EXCL | os.O_TRUNC
_COPIED = b"copied"
_PATIENCE = 60.0
"""A fork that takes longer than this many seconds to copy shared memory is considered hung."""


def obstacle(trainable: object = None) -> str:
    """Return the reason why training of ``trainable`` cannot continue in a fork of this process, or an empty string."""
    if sys.platform != "linux":
        return "only Linux has forks that are safe for this"
    torch: Any = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_available() or accelerators.other() is not None):
        return "torch sees a GPU, which a fork cannot use, and has threads for gradients, which a fork lacks"
    jax: Any = sys.modules.get("jax._src.xla_bridge")
    if jax is not None and getattr(jax, "_backends", None):
        return "it computes with JAX, whose threads a fork lacks"
    if "tensorflow" in sys.modules:
        return "it has TensorFlow, whose threads a fork lacks"
    if "torch._inductor.async_compile" in sys.modules:
        return "it compiles in other processes, which a fork would share"
    if multiprocessing.active_children():
        return "it has processes of its own, which a fork would share"
    if has_own_work(threading.enumerate()):
        return "a pool or thread of the user's code is running: a fork lacks it, and would wait for its results forever"
    if held := held_by(*(trainable.in_use() if isinstance(trainable, Adapter) else (trainable,))):
        return f"it holds {held}"
    return ""


class Fork:
    """A fork that works while this process continues. It ends when the thread that created it ends.

    Args:
        work: runs in the fork; returns the answer for this process.

    Raises:
        OSError: the system allows no more processes, or shared memory cannot be copied.
    """

    def __init__(self, work: Callable[[], bytes]) -> None:
        self._channel, theirs = os.pipe()

        def send() -> None:
            answer = memoryview(work())
            while answer:
                answer = answer[os.write(theirs, answer) :]

        try:
            self._pid = forked(send, theirs)
        except BaseException:
            os.close(self._channel)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(self._channel, False)
        self._answer = bytearray()
        self._status: int | None = None

    def wait(self, timeout: float = 0.0) -> bytes | None:
        """Return the answer, or ``None`` if there is none within ``timeout`` seconds.

        Raises:
            ChildProcessError: the fork has ended without an answer.
        """
        deadline = time.monotonic() + timeout
        while self._status is None:
            if not select.select([self._channel], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            part = os.read(self._channel, 1 << 16)
            self._answer += part
            if not part:
                self.close()
        if self._status != 0:
            raise ChildProcessError(f"a fork has ended with status {self._status}")
        return bytes(self._answer)

    def close(self, *, kill: bool = False) -> None:
        """Wait for the end of the fork, or kill it. Idempotent."""
        if self._status is not None:
            return
        if kill:
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._channel)
        try:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except ChildProcessError:  # the user's code has already waited for it
            self._status = 0


def forked(work: Callable[[], object], channel: int) -> int:
    """Run ``work`` in a fork, which shares only the file descriptor ``channel``; return the fork's process id. The fork
    ends when the thread that created it ends.

    The fork gets a copy of memory that processes share. This process waits until the copy is made, since training here
    writes to that memory next.

    Raises:
        OSError: the system allows no more processes, or shared memory cannot be copied.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a stream may be the user's object
            stream.flush()
    _search_classes()
    why = obstacle_in(shared := shared_mappings())
    if why:
        raise OSError(errno.ENOMEM, why)
    if not shared:
        return _forked(work, channel, -1)
    copied, theirs = os.pipe()
    try:
        pid = _forked(work, channel, theirs)
        _wait_for_copy(pid, copied)
        return pid
    finally:
        os.close(copied)
        os.close(theirs)


def _search_classes() -> None:
    """Search all classes here, where the results are kept. A fork that searches them copies each page it reads."""
    find_classes()
    registered()


def _forked(work: Callable[[], object], channel: int, copied: int) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads; the fork needs none of them
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _become_separate(parent, channel, copied)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait_for_copy(pid: int, copied: int) -> None:
    """Wait until the fork has its own copy of shared memory. Nothing may write to that memory until then.

    Raises:
        OSError: the memory cannot be copied, or the fork has ended.
    """
    poll = select.poll()
    poll.register(copied, select.POLLIN)
    try:
        answer = os.read(copied, select.PIPE_BUF) if poll.poll(_PATIENCE * 1000) else b"it takes too long"
        if answer != _COPIED:
            raise OSError(f"a fork cannot copy shared memory: {answer.decode(errors='replace')}")
    except BaseException:
        with suppress(ProcessLookupError, ChildProcessError):  # the user's code has already waited for it
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


def _copy_shared_memory(copied: int) -> None:
    """In the fork: copy all shared memory, and report to the other process that it is copied, or why not."""
    try:
        make_own(shared_mappings())
    except BaseException as error:
        os.write(copied, f"{type(error).__name__}: {error}".encode(errors="replace")[: select.PIPE_BUF])
        raise
    os.write(copied, _COPIED)


def _become_separate(parent: int, channel: int, copied: int) -> None:
    """In the fork: end with the other process, copy shared memory, and detach signals, output and file positions."""
    die_with(parent)
    gc.disable()  # collecting an object could close a connection that the other process uses
    if copied >= 0:
        _copy_shared_memory(copied)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if file > 2 and file != channel and stat.S_ISREG(os.fstat(file).st_mode):
                flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~_NOT_KEPT
                own = os.open(f"/proc/self/fd/{file}", flags)
                os.lseek(own, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, file, inheritable=os.get_inheritable(file))
                os.close(own)
