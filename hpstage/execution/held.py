"""Detects pipes, sockets, processes and threads of training that a fork would share with its parent, or lack.

If a fork shares one end of a pipe, the other end answers only one of the two processes, and the other process waits
forever.
"""

from __future__ import annotations

import _socket
import concurrent.futures.thread
import functools
import gc
import io
import os
import stat
import subprocess
import sys
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from hpstage.training.capture.containers import BULK
from hpstage.training.code.attributes import dict_of
from hpstage.training.code.graph import Graph
from hpstage.training.code.namespaces import ClassAttributes
from hpstage.training.code.owner import by_type, is_users_code, module_of, of_user


def held_by(*subjects: object) -> str:
    """Return a description of an object that a fork would share or lack, or an empty string.

    Searches the objects that the subjects and their code refer to, up to a maximum number, without calling their code.
    Containers with many items are searched last. Very large lists, dicts and sets are taken for data and skipped, and
    so are objects of libraries that take no part in a step.
    """
    code = Graph()
    seen: dict[int, object] = {}  # kept, so that ids stay unique
    todo: deque[Any] = deque(reversed(subjects))
    effort = 0
    while todo and effort < _MOST:
        obj = todo.pop()
        if id(obj) in seen:
            continue
        seen[id(obj)] = obj
        kind = type(obj)
        effort += 1
        if _may_be_held(kind) and (found := _lacking(obj) if issubclass(kind, threading.Thread) else _shared(obj)):
            return found
        if _is_code(kind):
            todo += _reached_by(obj, code)
            continue
        is_data = kind in _CONTAINERS and len(obj) > BULK
        if is_data or (_leads_nowhere(kind) and not any(obj is subject for subject in subjects)):
            continue
        items = gc.get_referents(obj)
        effort += len(items) // _ITEMS
        (todo.extendleft if len(items) > _LONG else todo.extend)(filter(gc.is_tracked, items))
    return ""


_CONTAINERS = frozenset((list, tuple, dict, set, frozenset))
"""Very long containers of these types hold data."""
_LONG = 100
"""An object with more items than this counts as long."""
_MOST, _ITEMS = 100_000, 32
"""Maximum number of objects to visit, which takes tenths of a second; and the number of items that can be skipped in
the time of one visit."""


@by_type
def _is_code(kind: Any) -> bool:
    return issubclass(kind, types.ModuleType | types.FunctionType | type)


@by_type
def _leads_nowhere(kind: Any) -> bool:
    module = module_of(kind)
    return module.partition(".")[0] in _OF_NO_STEP and not module.startswith("hpstage.torch.")


@by_type
def _may_be_held(kind: Any) -> bool:
    connections: Any = sys.modules.get("multiprocessing.connection")
    more = () if connections is None else (connections._ConnectionBase,)
    return issubclass(kind, (subprocess.Popen, io.FileIO, _socket.socket, threading.Thread, *more))


def _reached_by(code: Any, graph: Graph) -> Iterator[Any]:
    """Yield objects that a function, class or module refers to and that the graph does not contain already."""
    if isinstance(code, types.FunctionType):
        held = (*(code.__closure__ or ()), code.__defaults__, code.__kwdefaults__, code.__dict__)
        yield from filter(gc.is_tracked, held)
    if not (of_user(code.__name__) if isinstance(code, types.ModuleType) else is_users_code(code)):
        return
    functions, spaces = len(graph.functions), len(graph.namespaces)
    graph.add(code)
    yield from graph.functions[functions:]
    for space in islice(graph.namespaces.values(), spaces, None):
        content: Any = space.get()
        yield from content.values() if isinstance(space, ClassAttributes) else (content,)


_OF_NO_STEP = frozenset(("hpstage", "optuna", "dask", "distributed", "logging", "tqdm", "inspect", "typing"))
"""Libraries whose objects run, show or describe training, but take no part in a step."""


def _shared(obj: Any) -> str:
    """Return a description of the object if both sides of a fork would use it, else an empty string."""
    kind, own = type(obj), dict_of(obj) or {}
    if issubclass(kind, subprocess.Popen):
        return "a process of its own" if own.get("returncode", 0) is None else ""
    if issubclass(kind, io.FileIO):
        number = _number(functools.partial(io.FileIO.fileno, obj))
    elif issubclass(kind, _socket.socket):
        number = _number(functools.partial(_socket.socket.fileno, obj))
    else:  # a connection of multiprocessing
        number = own.get("_handle")  # an int, unless it is closed
    return f"a {kind.__module__}.{kind.__qualname__}, which is one end of a connection" if _has_ends(number) else ""


def _number(read: Any) -> int | None:
    try:
        return int(read())
    except (OSError, ValueError):  # closed
        return None


def _has_ends(number: int | None) -> bool:
    """Return whether a file descriptor is a pipe, a socket or a terminal, other than a standard stream."""
    if type(number) is not int or number <= 2:
        return False
    try:
        mode = os.fstat(number).st_mode
    except (OSError, OverflowError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and os.isatty(number))


def _lacking(thread: threading.Thread) -> str:
    """Return a description of the thread if a fork would lack it, else an empty string."""
    runs = any(thread is running for running in threading.enumerate())
    return "a thread, which no fork has" if runs and not _is_not_of_user(thread) else ""


def _is_not_of_user(thread: threading.Thread) -> bool:
    """Return whether this is the training thread, the main thread, or a thread to which no step gives work."""
    name = (dict_of(thread) or {}).get("_name")  # a class may have another ``name``
    of_pool = type(name) is str and name.startswith(("hpstage", "Dask-"))
    return of_pool or thread is threading.current_thread() or thread is threading.main_thread()


def has_own_work(threads: Iterable[threading.Thread]) -> bool:
    """Return whether a training step may wait for one of these threads: one in a pool that user code submits work to,
    or one that runs user code."""
    pools: Any = concurrent.futures.thread._threads_queues
    pooled = {id(reference()) for reference in pools.keyrefs()}
    dummies: Any = sys.modules.get("multiprocessing.dummy")
    of_loops: set[int] = set()
    for thread in threads:
        kind, own = type(thread), dict_of(thread) or {}
        if _is_not_of_user(thread):
            continue
        if id(thread) in pooled:
            if not str(own.get("_name")).startswith(("asyncio", "uvloop")):
                return True
            of_loops.add(id(thread))
            continue
        target: Any = own.get("_target")
        while issubclass(type(target), functools.partial) and not is_users_code(type(target)):
            target = target.func
        if dummies is not None and issubclass(kind, dummies.DummyProcess):
            return True
        if is_users_code(kind) or is_users_code(type(target)) or is_users_code(target):
            return True
    return bool(of_loops) and not of_loops.issubset(_of_running_loops())


def _of_running_loops() -> Iterator[int]:
    """Yield the ids of threads in pools of running event loops, which no step uses until they have finished."""
    events: Any = sys.modules.get("asyncio.events")
    if events is None:
        return
    for loop in gc.get_objects():
        if issubclass(type(loop), events.AbstractEventLoop) and _runs(loop):
            for pool in (*gc.get_referents(loop), *(dict_of(loop) or {}).values()):
                if issubclass(type(pool), concurrent.futures.ThreadPoolExecutor):
                    yield from map(id, [*(dict_of(pool) or {}).get("_threads", ())])  # a copy: it may grow


def _runs(loop: Any) -> bool:
    names = (vars(base) for base in type(loop).__mro__ if not is_users_code(base))
    try:
        return bool(next(own["is_running"] for own in names if "is_running" in own)(loop))
    except (AttributeError, NotImplementedError):  # a loop whose creation failed, or an abstract one
        return False
