"""Hyperparameters that no code mentions: most likely misspelt."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator

from hpstage.errors.text import nearest
from hpstage.schedule.space import MIXTURE
from hpstage.training.code.bytecode import inner, instructions_of
from hpstage.training.code.graph import functions_reached
from hpstage.training.code.names import texts_among

_READ_BY_HPSTAGE = {"seed", "batch_size", "beta1", "beta2", MIXTURE}
_SPREADS = {"DICT_MERGE", "DICT_UPDATE"}  # f(**hp), {**hp}: passed on
_THROUGH = {"items", "keys", "values", "update"}  # methods of a dict
_MAKING = {"__init__", "__post_init__"}
_JOINTS = "_/."
_PARTS = re.compile(r"[\W_]")

_CODE = (type, types.FunctionType, types.MethodType, functools.partial)


def unread(subject: object, names: Iterable[str]) -> dict[str, str]:
    """Return the hyperparameters that a trainable's code does not mention, each with the similar name that it does
    mention.

    Names and strings in the user's code count, and the fields of torch's optimizers. A hyperparameter without a similar
    name is not returned: it may be read in a way that cannot be followed. Code that passes on all values at once
    (``Net(**hp)``) may read any: then none is returned.

    Args:
        subject: what the user passed: an object with its attributes, or a function.
    """
    ours = _READ_BY_HPSTAGE | set(getattr(subject, "_read_by_library", ()))
    words = set(ours)
    for root in _roots(subject):
        if isinstance(root, type):
            words |= getattr(root, "__annotations__", {}).keys()
        for function in functions_reached(root):
            if _spreads(function):
                return {}
            words.update(_words(function.__code__))
    if words == ours:
        return {}  # no code of the user's
    unknown = [name for name in names if not _mentioned(name, words)]
    if unknown:
        words |= _optimizers_fields()
    close = {name: nearest(name, words) for name in unknown if name not in words}
    return {name: found for name, found in close.items() if found is not None}


def may_read(code: object, name: str) -> bool:
    """Return whether the user's code, a class or function and all that it leads to, mentions a hyperparameter or may
    read any: it iterates over the values, or passes them on."""
    functions = functions_reached(code)
    return not functions or _may_read(functions, name)


def _may_read(functions: list[types.FunctionType], name: str) -> bool:
    words = {word for function in functions for word in _words(function.__code__)}
    return any(map(_spreads, functions)) or bool(words & _THROUGH) or _mentioned(name, words)


def may_report(subject: object, metric: str) -> bool:
    """Return whether the user's code contains the name of a metric as a string, or its beginning or end, as in
    ``f"{part}_loss"``. Such a metric may be reported only after some training.

    Args:
        subject: what the user passed.
    """
    functions = [function for root in _roots(subject) for function in functions_reached(root)]
    texts = {text for one in functions for part in inner(one.__code__) for text in texts_among(part.co_consts)}
    return any(_is_of_name(text, metric) for text in texts)


def _is_of_name(text: str, name: str) -> bool:
    if len(text) < 3:
        return False
    return text == name or (
        (text[0] in _JOINTS and name.endswith(text)) or (text[-1] in _JOINTS and name.startswith(text))
    )


def read_at_first(subject: object, name: str) -> bool:
    """Return whether the user's code mentions a hyperparameter only where model and optimizer are made, that is, with
    its value at step 0. Return ``False`` if that is not certain: for a training function, and for fields of torch's
    optimizers.

    Args:
        subject: what the user passed.
    """
    if isinstance(subject, _CODE) or name in _READ_BY_HPSTAGE or name in getattr(subject, "_read_by_library", ()):
        return False
    at_first = _MAKING | ({"setup"} if hasattr(subject, "setup") else {"model", "optimizer", "dataset"})
    functions = [function for root in _roots(subject) for function in functions_reached(root)]
    later = [function for function in functions if function.__name__ not in at_first]
    if _may_read(later, name) or name in _optimizers_fields():
        return False
    return any(_mentioned(name, {*_words(function.__code__)}) for function in functions)


def _mentioned(name: str, words: set[str]) -> bool:
    """Return whether the words contain a name, or the constant beginning of it, as in ``hp[f"width{i}"]`` and
    ``hp[f"encoder.{key}"]``."""
    return (
        name in words
        or name.rstrip("0123456789") in words
        or any(name[: end.end()] in words for end in _PARTS.finditer(name))
    )


def _roots(subject: object) -> Iterator[object]:
    for value in (subject, *getattr(subject, "__dict__", {}).values()):
        yield value if isinstance(value, _CODE) else type(value)


def _words(code: types.CodeType) -> Iterator[str]:
    for part in inner(code):
        yield from part.co_names
        yield from part.co_varnames
        yield from texts_among(part.co_consts)


def _spreads(function: types.FunctionType) -> bool:
    return any(instruction.opname in _SPREADS for instruction in instructions_of(function.__code__))


def _optimizers_fields() -> set[str]:
    torch = sys.modules.get("torch")
    if torch is None:
        return set()
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return {name for kind in kinds for name in inspect.signature(kind).parameters}
