"""Values as strings, equal for equal values in every process."""

from __future__ import annotations

import copyreg
import functools
import io
import logging
import os
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any

import xxhash

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError, UsageError
from hpstage.training.code.attributes import has_own_memory, own_of
from hpstage.training.code.known import has_no_state
from hpstage.training.code.made import is_script
from hpstage.training.code.owner import as_run, classes_below, has_name, is_users_code, module_of
from hpstage.training.code.string_digest import hashed
from hpstage.training.identity.files import DataFiles
from hpstage.training.identity.placing import CODE, from_code

NOT_STATE = ("hp", "version", "data_version")
"""Attributes of a trainable that are recorded elsewhere: in the history of values, or separately in the identity."""


def is_recorded_elsewhere(name: str, value: object) -> bool:
    """Return whether an attribute of a trainable is in :data:`NOT_STATE`, or is its ``defaults``, which the plan
    records."""
    return name in NOT_STATE or (name == "defaults" and isinstance(value, Mapping))


_LONG = 200
_MAPPED = 512 << 20
"""Bytes up to which a memory-mapped array counts by all of its content."""
_BLOCKS, _BLOCK = 256, 64 << 10
_HANDLES = (io.IOBase, type(threading.Lock()), type(threading.RLock()), BaseException, weakref.ref)
"""Classes written in C whose instances have no content of their own."""
_MADE_OF = {"_struct.Struct": "format", "torch.finfo": "dtype", "torch.iinfo": "dtype"}
"""Classes in C whose instances never change and cannot be pickled, with the attribute that distinguishes instances."""
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_OF_ENUM = frozenset(("_value_", "_name_", "_sort_order_", "__objclass__"))
_LONG_NUMBER = re.compile(r"\d{9,}")
Refer = Callable[[object], str]


class Values:
    """Converts values to strings. A value without a digest gives ``None``, or in lenient mode the string of its class.

    Args:
        refer: returns the string for code, and for objects that count by their code.
        with_functions: adds to a string the user's functions that an object was built from.
        files: if given, paths count by the files that they name.
        within: objects whose content is not visited.

    Attributes:
        nbytes: size of the digested tensors and arrays.
        sampled: whether only parts of some were digested.
        folder: the folder of the user's code, if known. Paths in it are written relative to it.
        undigested: classes of the objects that have no digest and count by their class.
        opaque: those classes in ``undigested`` that are written in C and whose content may decide training.
    """

    def __init__(
        self,
        refer: Refer,
        with_functions: Callable[[str, object], str],
        *,
        files: DataFiles | None = None,
        within: Iterable[object] = (),
    ) -> None:
        self.nbytes = 0
        self.sampled = False
        self.folder = ""
        self.undigested: set[str] = set()
        self.opaque: set[str] = set()
        self._refer = refer
        self._with_functions = with_functions
        self._files = files
        self._lenient = True
        self._held: list[object] = list(within)  # keeps ids unique
        self._open: set[int] = {id(one) for one in self._held}  # ids of objects being converted
        self._texts: dict[tuple[int, bool], str | None] = {}

    @contextmanager
    def counting(self, *, lenient: bool) -> Iterator[None]:
        """Set lenient mode within the context: values without a digest then count by their class; otherwise their
        container has no digest either."""
        before, self._lenient = self._lenient, lenient
        try:
            yield
        finally:
            self._lenient = before

    def attributes(self, obj: object, *, strict: bool) -> list[str]:
        """Return sorted ``name=value`` strings of the instance's own attributes that have a digest.

        Raises:
            UsageError: ``strict`` is set, and an attribute has no digest.
        """
        found = []
        ignored = {*without_keys(type(obj)), *getattr(obj, "stateless", ())}
        for name, value in sorted(getattr(obj, "__dict__", {}).items()):
            if name in ignored or is_recorded_elsewhere(name, value):
                continue
            text = self.exact(value)
            if text is not None:
                found.append(f"{name}={text}")
            elif strict:
                raise UsageError(
                    f"{type(obj).__name__}.{name} is a {type(value).__qualname__}, which has no digest: two runs may "
                    "differ in it. Make it in a method from plain values (numbers, strings, lists, arrays, objects "
                    "that can be pickled), or state the attribute version and change it whenever the code or this "
                    "object changes"
                )
        return found

    def exact(self, value: Any) -> str | None:
        """Return a string that is equal for equal values in every process, or ``None`` if any part has no digest."""
        with self.counting(lenient=False):
            return self.value(value)

    def content(self, value: Any) -> str:
        """Return a string that is equal for equal values in every process. Parts without digest count by class."""
        with self.counting(lenient=True):
            text = self.value(value)
        assert text is not None, "everything has a class"
        return text

    def value(self, value: Any) -> str | None:
        """Return a value as a string, as :meth:`content` or :meth:`exact` does, depending on the present mode."""
        if isinstance(value, Enum):
            own = {name: item for name, item in own_of(value).items() if name not in _OF_ENUM}
            return f"{self._refer(type(value))}.{value.name}{self.value(own) if own else ''}"
        if isinstance(value, str | PurePath) and (text := self._named_file(value)) is not None:
            return text
        if isinstance(value, bytes) and len(value) > _LONG:
            return f"bytes {len(value)} {xxhash.xxh3_128_hexdigest(value)}"
        if type(value) is logging.Logger:
            return "logger"  # under any name: where its records go decides no bits
        if type(value) is str:
            value = _LONG_NUMBER.sub(_without_address, as_run(value))  # such as NAME = __name__
        if type(value) in _PLAIN or (isinstance(value, tuple(_PLAIN)) and not is_users_code(type(value))):
            return _short(repr(value))
        if isinstance(value, type | ModuleType) or is_function(value) or is_script(value):
            return self._refer(value)
        if value is os.environ:
            return "os.environ"
        if id(value) in self._open:
            return f"within {type(value).__qualname__}"
        known = id(value), self._lenient
        if known not in self._texts:
            self._held.append(value)
            self._open.add(id(value))
            try:
                text = self._composed(value)
                if text is None and self._lenient:
                    text = self._by_class(value)
            finally:
                self._open.discard(id(value))
            self._texts[known] = text
        return self._texts[known]

    def _named_file(self, value: str | PurePath) -> str | None:
        """Return the string for a path: by content for a file, if files count; relative to the code's folder if inside
        it."""
        text = self._files.text(str(value)) if self._files is not None else None
        if text is not None and not text.startswith("folder "):
            return text
        place = from_code(value, self.folder)
        return text if place is None else f"{type(value).__name__} {place}"

    def _composed(self, value: Any) -> str | None:
        import numpy

        if isinstance(value, (list, tuple, set, frozenset, Mapping, *_PLAIN)) and is_users_code(type(value)):
            text = self._reduced(value)  # its class and its attributes count, too
            if text is not None:
                return text
        if isinstance(value, list | tuple):
            return self._plainly(value) or self._joined(type(value).__name__, map(self.value, value))
        if isinstance(value, set | frozenset):
            items = [self.value(item) for item in value]
            return None if None in items else self._joined("set", sorted(filter(None, items)))
        if type(value) is defaultdict:
            return self._reduced(value)
        if isinstance(value, Mapping):
            # In insertion order: that of a dict of layers decides which is initialised first.
            return self._joined("dict", (self._joined("", map(self.value, pair)) for pair in value.items()))
        if isinstance(value, numpy.random.BitGenerator):
            # Not its seeds: `jumped()` gives random ones, and otherwise the state shows them.
            parts = value.state, getattr(value.seed_seq, "n_children_spawned", 0)
            return self._joined(self._refer(type(value)), map(self.value, parts))
        if isinstance(value, weakref.ref | threading.local):
            referred = value() if isinstance(value, weakref.ref) else None
            held = referred, getattr(value, "__dict__", {})
            return self._joined(self._refer(type(value)), map(self.value, held))
        kind = f"{module_of(type(value))}.{type(value).__qualname__}"
        if kind in _MADE_OF:
            return f"{kind} {getattr(value, _MADE_OF[kind])!r}"
        return self._array(value) or self._reduced(value)

    def _plainly(self, values: list[Any] | tuple[Any, ...]) -> str | None:
        """Digest long lists of plain values, of paths, or of tuples of them in one go."""
        if len(values) < _LONG:
            return None
        kinds = set(map(type, values))
        if kinds == {tuple}:
            kinds = {type(item) for items in values for item in items}
        if not kinds <= _PLAIN:
            return None
        listed = self._files.listed(values) if self._files is not None else None
        text = repr(values)
        if self.folder:
            text = text.replace(f"'{self.folder}{os.sep}", f"'{CODE}{os.sep}")
        return listed or f"{type(values).__name__} {len(values)} {hashed(text)}"

    def _array(self, value: Any) -> str | None:
        """Return a digest of all bytes of a tensor or array, or ``None`` for other objects."""
        import numpy

        if isinstance(value, numpy.memmap):
            if value.nbytes > _MAPPED:
                return self._blocks(value)
            value = numpy.asarray(value)
        try:
            text = f"{type(value).__qualname__} {digest(value)}"
        except StateError:
            return None
        self.nbytes += value.nbytes
        return text

    def _blocks(self, mapped: Any) -> str:
        """Describe a large memory-mapped file by blocks of its rows, its size and its modification time."""
        self.sampled = True
        rows = max(1, _BLOCK * len(mapped) // mapped.nbytes)
        starts = [number * (len(mapped) - rows) // (_BLOCKS - 1) for number in range(_BLOCKS)]
        # Copies: whether the blocks are contiguous is not under our control.
        blocks = digest([mapped[start : start + rows].tobytes() for start in starts])
        self.nbytes += rows * _BLOCKS * mapped.nbytes // len(mapped)
        found = os.stat(mapped.filename)
        return f"memmap {mapped.dtype.str} {mapped.shape} {blocks} {found.st_size} {found.st_mtime_ns // 10**9}"

    def _reduced(self, value: Any) -> str | None:
        """Describe an object by what pickling would keep of it: how it is constructed, and its attributes.

        A library's object counts as a whole or by its class: besides locks and connections, it may hold host data.
        """
        lenient = self._lenient and (self._files is not None or is_users_code(type(value)))
        try:
            with self.counting(lenient=lenient):
                known = copyreg.dispatch_table.get(type(value))
                reduced = value.__reduce_ex__(4) if known is None else known(value)
                if isinstance(reduced, str):
                    return self._with_functions(f"global {reduced}", value)
                make, arguments, *rest = reduced
                state, items, pairs = (*rest[:3], None, None, None)[:3]
                hidden = _hidden(value, state)
                if isinstance(state, dict):
                    state = sorted(state.items())
                parts = [state, *(None if part is None else list(part) for part in (items, pairs))]
                texts = [self.value(arguments), self.value(parts)]
            with self.counting(lenient=True):
                texts += [f"{name}={self.value(item)}" for name, item in hidden]
            return self._joined(f"{self._refer(type(value))} {self._refer(make)}", texts)
        except UsageError:
            raise
        except Exception:  # an object that cannot be pickled may raise anything
            return None

    def _by_class(self, value: Any) -> str:
        """Describe an object without a digest by its class and, if that is the user's, its attributes."""
        kind = type(value)
        if isinstance(value, ContextVar):
            # A new thread has an empty context.
            settings = [self.value(context.run(_setting, value)) for context in (Context(), copy_context())]
            return f"{self._refer(kind)}{settings}"
        self.undigested.add(f"{kind.__module__}.{kind.__qualname__}")
        if not is_users_code(kind):
            if has_own_memory(kind) and not has_no_state(kind) and not issubclass(kind, _HANDLES):
                self.opaque.add(f"{module_of(kind)}.{kind.__qualname__}")
            return self._with_functions(self._refer(kind), value)
        attributes = [f"{name}={self.value(item)}" for name, item in sorted(own_of(value).items())]
        return f"{self._refer(kind)}({', '.join(attributes)})"

    @staticmethod
    def _joined(kind: str, items: Iterable[str | None]) -> str | None:
        found = list(items)
        return None if None in found else _short(f"{kind}({', '.join(map(str, found))})")


def _without_address(found: re.Match[str]) -> str:
    """Replace a number that is the id of a class, as in the schemas of pydantic's models; return other numbers as they
    are."""
    return "address" if int(found[0]) in map(id, (object, *classes_below(object))) else found[0]


def _hidden(value: object, state: object) -> list[tuple[str, object]]:
    """Return the attributes that a method of the user's leaves out of a pickle. They may still decide training, so
    their values count, as far as they have a digest."""
    methods = (getattr(type(value), name, None) for name in ("__reduce__", "__reduce_ex__", "__getstate__"))
    if not any(map(is_users_code, methods)):
        return []
    shown = state if isinstance(state, dict) else {}
    return sorted((name, item) for name, item in own_of(value).items() if shown.get(name, shown) is not item)


def _setting(variable: ContextVar[object]) -> object:
    """Return the variable's value in the current context, or ``None`` if it has none."""
    try:
        return variable.get()
    except LookupError:
        return None


def without_keys(cls: type) -> tuple[str, ...]:
    """Return the names of a class's attributes that decide only how fast it trains. They are not part of keys."""
    found = (vars(base)["_without_keys"] for base in cls.__mro__ if "_without_keys" in vars(base))
    names: tuple[str, ...] = next(found, ())
    return names


def is_function(obj: object) -> bool:
    return isinstance(obj, FunctionType | MethodType | functools.partial) or (
        callable(obj) and not isinstance(obj, type) and has_name(obj)
    )


def _short(text: str) -> str:
    """Replace a long string by its hash, unless it refers to entities."""
    return text if len(text) <= _LONG or "\0" in text else f"{text[:20]}... {hashed(text)}"
