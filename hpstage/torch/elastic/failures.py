"""Encoding of an exception of the user's code in a virtual node for the other processes of the gang.

It is not pickled, since unpickling runs code. The class of an exception is looked up among what is imported anyway, and
its arguments are plain values; an exception that these do not make again arrives as a :class:`TrainingError`.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from hpstage.errors import TrainingError


def encode_failure(error: Exception, node: int) -> bytes:
    """Encode an exception for :func:`decode_failure`."""
    plain = all(isinstance(value, str | int | float | bool | None) for value in error.args)
    kind = type(error)
    return json.dumps(
        [
            kind.__module__,
            kind.__qualname__,
            [*error.args] if plain else None,
            str(error),
            f"in virtual node {node}, in another process:\n{''.join(traceback.format_exception(error))}",
        ]
    ).encode()


def decode_failure(text: bytes) -> Exception:
    module, name, arguments, message, note = json.loads(text)
    error = _same(_class(module, name), arguments, message) or TrainingError(f"{name}: {message}")
    error.add_note(note)
    return error


def _class(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _same(kind: Any, arguments: list[Any] | None, message: str) -> Exception | None:
    """Return an exception with these arguments, if it then has this message."""
    if arguments is None or not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        error: Exception = kind.__new__(kind, *arguments)  # which sets them; __init__ may take others
        return error if str(error) == message else None
    except Exception:
        return None  # it needs what its __init__ would have set
