"""Code that counts its calls, in a module that nothing names: it is imported while a model is made."""

from __future__ import annotations

import functools
from collections.abc import Callable


class Counted:
    """A class that counts its calls."""

    calls = 0

    def __call__(self) -> int:
        Counted.calls += 1
        return Counted.calls


def _numbered(function: Callable[[], int]) -> Callable[[], int]:
    calls = [0]

    @functools.wraps(function)
    def wrapper() -> int:
        calls[0] += 1
        return function() * calls[0]

    return wrapper


@_numbered
def numbered() -> int:
    return 1
