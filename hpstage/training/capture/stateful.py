"""Kinds of stateful objects of Python and NumPy: iterators, files, locks, random sources, caches."""

from __future__ import annotations

import contextvars
import functools
import gc
import inspect
import io
import itertools
import mmap
import os
import random
import stat
import types
import warnings
from collections.abc import Iterator
from typing import Any

import xxhash

from hpstage.checkpoints.state_tree import digest
from hpstage.training.capture.generators import OF_PROCESS, of_process
from hpstage.training.capture.instances import Cell
from hpstage.training.capture.kind import Child, Kept, Kind, is_atom, numpy, same_mapping

_SOURCES: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(0), range(1 << 70))
ITERATORS: tuple[Any, ...] = (
    *(type(iter(source)) for source in _SOURCES),
    type(reversed([])),
    enumerate,
    zip,
    map,
    filter,
    *(
        made
        for made in vars(itertools).values()
        if isinstance(made, type) and made is not itertools.tee and "__next__" in vars(made)
    ),
)


class RandomSource(Kind):
    """Random number generators: their state as plain values. The state of a generator of the process does not count: it
    is seeded before each step, and before each evaluation."""

    name = "random state"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        if any(obj is generator for generator in of_process().values()):
            return OF_PROCESS
        numbers = numpy().random
        if isinstance(obj, random.Random):
            return obj.getstate()
        if isinstance(obj, numbers.RandomState):
            return obj.get_state(legacy=False)
        if isinstance(obj, numbers.SeedSequence):
            return {"spawned": obj.n_children_spawned}
        if isinstance(obj, numbers.Generator | numbers.BitGenerator):
            source = _source(obj)
            return {**source.state, "spawned": getattr(source.seed_seq, "n_children_spawned", 0)}
        return obj.get_state()  # torch's

    def same(self, old: Any, new: Any) -> bool:
        return digest(old) == digest(new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        numbers = numpy().random
        if content == OF_PROCESS:
            return
        if isinstance(obj, random.Random):
            obj.setstate(content)
        elif isinstance(obj, numbers.SeedSequence):
            _set_spawned(obj, content["spawned"])
        elif isinstance(obj, numbers.Generator | numbers.BitGenerator):
            source, state = _source(obj), dict(content)
            _set_spawned(source.seed_seq, state.pop("spawned"))
            source.state = state
        else:
            obj.set_state(content)  # torch's, or NumPy's RandomState


def _source(obj: Any) -> Any:
    return getattr(obj, "bit_generator", obj)


def _set_spawned(sequence: Any, count: int) -> None:
    if getattr(sequence, "n_children_spawned", 0) == count:
        return
    names = "entropy", "n_children_spawned", "pool", "pool_size", "spawn_key"
    parts = sequence.__reduce__()[2]  # the fields in alphabetical order, as they are pickled
    if len(parts) != len(names):
        raise TypeError("hpstage cannot set the number of spawned generators in this version of NumPy")
    sequence.__setstate__((parts[0], count, *parts[2:]))


class Moving(Kind):
    """Generators and iterators: their position can be read, but not restored."""

    name = "iterator"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        if isinstance(obj, types.GeneratorType):
            frame = obj.gi_frame
            if frame is None:
                return (-1, {})
            # Iterators of its loops are on its stack, which cannot be inspected: they may have moved unnoticed.
            begun = inspect.getgeneratorstate(obj) != inspect.GEN_CREATED
            return (object() if begun else 0, dict(frame.f_locals))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # in 3.12, for iterators of itertools
            try:
                reduced = obj.__reduce__()
            except TypeError:  # in 3.14
                return (0, {})
            except RuntimeError:  # what it iterates over has another size by now, so that it only raises errors
                return (_BROKEN, {})
        parts = _remaining(obj, reduced[1:])
        return (repr([part for part in parts if is_atom(part)]), {str(i): part for i, part in enumerate(parts)})

    def same(self, old: Any, new: Any) -> bool:
        return old[0] == new[0] and same_mapping(old[1], new[1])

    def children(self, content: Any) -> Iterator[Child]:
        for name, value in content[1].items():
            yield f".{name}", value


_BROKEN = "broken"


def _remaining(iterator: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts that an iterator can be made of, with a tuple for each list that is made on the fly.

    Iterators of sets and dicts list the items that are left. They have not moved as long as these are the same."""
    if not parts or type(parts[0]) is not tuple:
        return parts
    held = set(map(id, gc.get_referents(iterator)))
    return tuple(tuple(p) if type(p) is list and id(p) not in held else p for p in parts[0]), *parts[1:]


class File(Kind):
    """Open files, and read-only maps of files: their position; for those in memory, also their content."""

    name = "file"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        if obj.closed:
            return -1, ""
        if isinstance(obj, mmap.mmap):
            return obj.tell(), ""
        if isinstance(obj, io.StringIO):
            return obj.tell(), xxhash.xxh3_128_hexdigest(obj.getvalue().encode("utf-8", "surrogatepass"))
        if isinstance(obj, io.BytesIO):
            return obj.tell(), xxhash.xxh3_128_hexdigest(obj.getbuffer())
        try:
            return (obj.tell() if obj.seekable() else -1), ""
        except OSError:  # a file does not report its position while its lines are iterated over
            return object(), ""

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        if not stands_only(obj, content, self.read(obj, skip)):
            raise TypeError("it has been written to, closed, or read up to an unknown position")
        obj.seek(content[0])


def stands_only(file: Any, old: Any, new: Any) -> bool:
    """Return whether two contents of a file differ only in position, and position alone decides what is read next."""
    known = type(old[0]) is int and type(new[0]) is int and -1 not in (old[0], new[0])
    return known and old[1] == new[1] and (type(file) in _IN_MEMORY or is_for_reading(file))


_IN_MEMORY = (io.BytesIO, io.StringIO, mmap.mmap)


def is_for_reading(file: Any) -> bool:
    """Return whether an open file is one of Python's own file objects on a regular file, and read-only."""
    if type(file) is io.TextIOWrapper:
        file = file.buffer
    if type(file) is io.BufferedReader:
        file = file.raw
    return type(file) is io.FileIO and file.mode == "rb" and stat.S_ISREG(os.fstat(file.fileno()).st_mode)


class View(Kind):
    """``memoryview``: the object whose bytes it views."""

    name = "memory"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        try:
            return obj.obj
        except ValueError:
            return None  # released

    def children(self, content: Any) -> Iterator[Child]:
        yield ".obj", content


class Lock(Kind):
    """Whether a lock is held; for locks between processes, the count."""

    name = "lock"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return obj.locked() if hasattr(obj, "locked") else obj._get_value()


class Context(Cell):
    """A context variable as seen by this thread."""

    def read(self, obj: contextvars.ContextVar[Any], skip: frozenset[str]) -> Any:
        try:
            return (obj.get(),)
        except LookupError:
            return ()

    def write(self, obj: contextvars.ContextVar[Any], content: Any, skip: frozenset[str] = frozenset()) -> None:
        if content:
            obj.set(content[0])
        elif self.read(obj, skip):
            raise TypeError("a context variable can be unset only by the code that has set it")


class Cache(Kept):
    """A function under ``functools.lru_cache``, whose results are assumed to depend on its arguments alone. So its
    cache is not part of the state. But cached objects may change, which is detected."""

    name = "cache"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return _kept(obj)

    def same(self, old: Any, new: Any) -> bool:
        return True

    def again(self, obj: Any, skip: frozenset[str], old: Any) -> Any:
        new = _kept(obj)
        return old if list(map(id, old)) == list(map(id, new)) else new

    def children(self, content: Any) -> Iterator[Child]:
        yield ".__wrapped__", content[0]

    def cached(self, content: Any) -> Iterator[Child]:
        for index, value in enumerate(content[1:]):
            yield f"{CACHED}[{index}]", value


CACHED = ".cached"
"""Path suffix for what ``functools.lru_cache`` keeps for a function."""
_EMPTY = functools.lru_cache(maxsize=None)(lambda: None)
CACHE_TYPE: Any = type(_EMPTY)


def _kept(obj: Any) -> list[Any]:
    """Return the wrapped function, then the results that its cache keeps. A bounded cache refers to key, value and type
    of each link in turn, then to the dict of links."""
    found = [obj.__wrapped__]
    held = gc.get_referents(obj)
    for index, part in enumerate(held):
        if part is _LINK:
            found.append(held[index - 1])
        elif type(part) is dict:
            found += [value for value in part.values() if type(value) is not _LINK]
            break
    return found


def results_kept(obj: Any) -> dict[Any, Any] | None:
    """Return the dict itself in which a cached function keeps its results by arguments; ``None`` if it is bounded: then
    its results are also in a list, in the order of use."""
    if obj.cache_parameters()["maxsize"] is not None:
        return None
    return next(part for part in gc.get_referents(obj) if type(part) is dict)


def arguments_kept(obj: Any) -> Iterator[Any]:
    """Yield the arguments for which a cached function keeps a result."""
    held = gc.get_referents(obj)
    keys = [held[index - 2] for index, part in enumerate(held) if part is _LINK]
    keys += [key for part in held if type(part) is dict for key in part]
    for key in keys:
        yield from key if isinstance(key, list | tuple) else (key,)


_LINK = next((part for part in gc.get_referents(_EMPTY) if getattr(part, "__name__", "") == "_lru_list_elem"), None)
