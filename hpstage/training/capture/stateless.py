"""Paths as users name them: in messages, and in ``stateless``, which excludes what training does not depend on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType, MethodType

LOCAL = "local variable "
"""Path prefix of local variables of paused code, and of what they hold."""


MOST = 20
"""Limit on the number of changes that a message names."""


def to_exclude(*paths: str) -> str:
    """Return the line of code that excludes the first of these paths, or the smallest named objects around them."""
    names = dict.fromkeys(_name(path) for path in paths[:MOST])
    return _line(names)


_UNLESS = "if training does not depend on it, name it in `stateless`: "


@contextmanager
def stated_on(subject: object) -> Iterator[None]:
    """Make code in messages about ``subject`` valid where users paste it: in its class, or below its function."""
    name = subject.__qualname__.rpartition("<locals>.")[2] if isinstance(subject, FunctionType | MethodType) else ""
    token = _owner.set(f"{name}." if name and "<" not in name else "")
    try:
        yield
    finally:
        _owner.reset(token)


_owner: ContextVar[str] = ContextVar("owner", default="")


def _line(names: Iterable[str]) -> str:
    return f"`{_owner.get()}stateless = {(*names,)!r}`"


def excluding(*paths: str) -> str:
    """Return the remedy for changes that do not matter."""
    return f"{_UNLESS}{to_exclude(*paths)}"


def joined(texts: Sequence[str]) -> str:
    """Return one message for several about changes that no state can hold, with one line that excludes all of them."""
    if len(texts) == 1:
        return texts[0]
    parts = [text.partition(f"; {_UNLESS}") for text in texts[:MOST]]
    lines = "".join(f"\n  {text}" for text, *_ in parts)
    more = f"\n  and {len(texts) - MOST} more" if len(texts) > MOST else ""
    names = dict.fromkeys(
        name for _, _, line in parts if line for name in ast.literal_eval(line.strip("`").partition(" = ")[2])
    )
    unless = f"\nIf training does not depend on them, name them in `stateless`: {_line(names)}"
    return (
        f"no state can hold {len(texts)} of the changes that training has made:{lines}{more}{unless if names else ''}"
    )


def root_of(path: str) -> str:
    """Return the variable that a path begins with."""
    return _bare(path).partition(".")[0].partition("[")[0]


def _name(path: str) -> str:
    name = re.sub(r"(\[[^]]*\])+$", "", _bare(path))
    attribute = name.removeprefix("self.")
    return attribute if "." not in attribute and not path.startswith(LOCAL) else name


def _bare(path: str) -> str:
    return unmarked(path.removeprefix(LOCAL))


def unmarked(path: str) -> str:
    """Return a path without the quotes at its end that distinguish objects met on the same path."""
    return re.sub(r"'+(?=\.|\[|$)", "", path) if "'" in path else path
