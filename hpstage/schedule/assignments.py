"""Reading values and schedules of hyperparameters from text such as ``lr=cosine(0.1, 60)``, without executing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from hpstage import schedule
from hpstage.errors import ScheduleError, UsageError
from hpstage.errors.text import clean, shortened

_CONSTRUCTORS = (
    *("constant", "piecewise", "multistep", "step", "exponential", "linear", "polynomial", "cosine"),
    *("cosine_restarts", "onecycle", "wsd", "sampled", "plateau"),
)
_MEANT = {"true": "True", "false": "False", "none": "None", "null": "None"} | dict.fromkeys(
    ("nan", "inf", "infinity"), "a finite number"
)
"""What to give instead of words of other languages and of numbers that are not finite, which would otherwise be
accepted silently, as plain words."""
_METHODS = ("until", "then", "since")
_WORD = re.compile(r"[^\W\d][\w./:+-]*")  # such as adam, resnet-18 or data/train


def values_of(given: Sequence[str]) -> dict[str, Any]:
    """Return the values by name, given words such as ``lr=cosine(0.1, 60).until(20).then(0.01)``, ``seed=[0,1]`` and
    ``optimizer=adam``.

    Raises:
        UsageError: a word cannot be read, or a name is given twice.
    """
    found: dict[str, Any] = {}
    for word in given:
        name, equals, text = word.partition("=")
        name = name.strip()
        if not equals or not name or not text.strip():
            raise UsageError(f"--set {clean(word)!r}: give NAME=VALUE, such as lr=0.1 or 'lr=cosine(0.1, 60)'")
        if name in found:
            raise UsageError(f"--set gives {clean(name)!r} twice; several values are a list, {clean(name)}=[0.1,0.2]")
        found[name] = _value(word, text.strip())
    return found


def _value(word: str, text: str) -> Any:
    if (meant := _MEANT.get(text.lower())) is not None and text != meant:
        raise UsageError(f"--set {clean(word)!r}: give {meant}, or the word in quotes, {clean(text)!r}")
    if _WORD.fullmatch(text) and text not in (*_MEANT.values(), *_CONSTRUCTORS):
        return text
    try:
        expression = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a text that is no Unicode
        raise UsageError(f"--set {clean(shortened(word))!r} cannot be read; quote it: 'lr=cosine(0.1, 60)'") from None
    try:
        return _read(expression)
    except (ScheduleError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"--set {clean(word)!r}: {clean(error)}") from None


def _read(node: ast.expr) -> Any:
    match node:
        case ast.List(elements) | ast.Tuple(elements):
            return [_read(element) for element in elements]
        case ast.Dict(keys, values):
            return {_read(key): _read(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.Call(called, arguments, keywords):
            return _called(called)(*map(_read, arguments), **{str(one.arg): _read(one.value) for one in keywords})
        case ast.BinOp() | ast.Name():
            raise UsageError(f"{ast.unparse(node)} is not a value; {_REMEDY}")
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise UsageError(f"{ast.unparse(node)} is not a value; {_REMEDY}") from None


def _called(node: ast.expr) -> Any:
    match node:
        case ast.Name(name) | ast.Attribute(ast.Name("s"), name) if name in _CONSTRUCTORS:
            return getattr(schedule, name)
        case ast.Attribute(ast.Call() as inner, name) if name in _METHODS:
            return getattr(_read(inner), name)
    raise UsageError(f"{ast.unparse(node)} is not a schedule; {_REMEDY}")


_REMEDY = f"give plain values, or schedules of {', '.join(_CONSTRUCTORS)}, with .until(), .then() and .since()"
