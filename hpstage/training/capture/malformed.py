"""Errors of states that no capture has written, from a damaged or forged checkpoint: each is an error by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpstage.errors import HpstageError, StateError

Kinds = tuple[type, ...]


@contextmanager
def cannot_be_read(what: str) -> Iterator[None]:
    """Convert whatever Python and libraries raise for parts of a state that cannot be read to :class:`StateError`, with
    ``what`` in its message and the error as its cause. No code of the user's runs within, but comparisons of keys.

    Raises:
        StateError: a part cannot be read.
    """
    try:
        yield
    except (HpstageError, MemoryError):
        raise
    except Exception as error:
        raise StateError(f"{what}: {type(error).__name__}: {error}") from error


def see_form(state: Mapping[str, Any], form: Mapping[str, Kinds]) -> None:
    """Check the types of the parts of a state.

    Raises:
        StateError: a part is of another type.
    """
    for name, kinds in form.items():
        if type(state[name]) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise StateError(f"the state has a {type(state[name]).__name__} as its {name}, which must be a {expected}")
