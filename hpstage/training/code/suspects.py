"""The user's functions that name what differs between processes: the time, entropy, addresses."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

from hpstage.training.code.bytecode import inner, operations_of, references
from hpstage.training.code.graph import functions_reached

_NAMES = frozenset(
    (
        *("id", "hash", "open", "glob.glob", "os.environ", "os.getenv", "platform.node", "random.SystemRandom"),
        *("posix.getpid", "posix.getppid", "posix.urandom", "posix.listdir", "posix.scandir"),
        "torch.random.seed",
    )
)
_MODULES = frozenset(
    (
        *("time", "datetime", "secrets", "uuid", "threading", "multiprocessing", "concurrent"),
        *("subprocess", "socket", "tempfile"),
    )
)

_SEEDED = ("default_rng", "Random", "RandomState", "SeedSequence")


def suspects(subject: object) -> list[str]:
    """List all as ``Digits.loss (search.py, line 12) names time.time``."""
    root = subject if isinstance(subject, FunctionType) else type(subject)
    found: dict[str, None] = {}
    for function in functions_reached(root):
        code = function.__code__
        place = f"{function.__qualname__} ({code.co_filename.rpartition('/')[2]}, line {code.co_firstlineno})"
        for maker in unseeded(code):
            found[f"{place} calls {maker}() without a seed"] = None
        named = references(code, {**vars(builtins), **function.__globals__}, {}, is_open=lambda module: True).named
        for name in named:
            if _is_suspect(name.content, name.path):
                found[f"{place} names {name.path}"] = None
    return list(found)


def unseeded(code: CodeType) -> Iterator[str]:
    """Yield the generators that a code object, or one nested in it, creates without an argument."""
    for part in inner(code):
        for made, call in pairwise(operations_of(part)):
            if made.argval in _SEEDED and call.opname == "CALL" and call.arg == 0:
                yield made.argval


def _is_suspect(content: Any, path: str) -> bool:
    """Return whether it is suspect by its origin or, for an object without a name, by its path."""
    if isinstance(content, ModuleType):
        return content.__name__ in _MODULES
    owner = getattr(content, "__module__", None) or ""
    name = f"{owner}.{getattr(content, '__qualname__', '')}".removeprefix("builtins.")
    return path in _NAMES or name in _NAMES or owner.partition(".")[0] in _MODULES
