"""Which of the user's functions name what is not the same in every process: the time, entropy, addresses."""

from __future__ import annotations

import builtins
from types import FunctionType, ModuleType
from typing import Any

from hpstage.bytecode import references
from hpstage.training.reach import functions_reached

_NAMES = frozenset(
    (
        *("id", "hash", "open", "glob.glob", "os.environ", "os.getenv", "platform.node", "random.SystemRandom"),
        *("posix.getpid", "posix.getppid", "posix.urandom", "posix.listdir", "posix.scandir"),
        *("numpy.random.default_rng", "torch.Generator", "torch.random.seed"),
    )
)
_MODULES = frozenset(
    (
        *("time", "datetime", "secrets", "uuid", "threading", "multiprocessing", "concurrent"),
        *("subprocess", "socket", "tempfile"),
    )
)


def suspects(subject: object) -> list[str]:
    """``Digits.loss (search.py, line 12) names time.time``, for each of them."""
    root = subject if isinstance(subject, FunctionType) else type(subject)
    found: dict[str, None] = {}
    for function in functions_reached(root):
        named = references(
            function.__code__, {**vars(builtins), **function.__globals__}, {}, is_open=lambda module: True
        ).named
        for name in named:
            if _is_suspect(name.content, name.path):
                file = function.__code__.co_filename.rpartition("/")[2]
                place = f"{function.__qualname__} ({file}, line {function.__code__.co_firstlineno})"
                found[f"{place} names {name.path}"] = None
    return list(found)


def _is_suspect(content: Any, path: str) -> bool:
    """By where it is from; by its path, for what is an object without a name."""
    if isinstance(content, ModuleType):
        return content.__name__ in _MODULES
    owner = getattr(content, "__module__", None) or ""
    name = f"{owner}.{getattr(content, '__qualname__', '')}".removeprefix("builtins.")
    return path in _NAMES or name in _NAMES or owner.partition(".")[0] in _MODULES
