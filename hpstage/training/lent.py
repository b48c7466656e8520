"""The user's object while it is trained, and as the user holds it.

The object itself is trained, not a copy: what it holds may refer back to it (bound methods in a table, callbacks,
closures), and nothing could make all of these refer to a copy. So it has two sets of attributes, the user's and those
of training, of which one is put aside: what training sets on it touches neither its identity, nor what the user sees
afterwards, nor its next training.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hpstage.errors import UsageError
from hpstage.training.capture.kind import own_of, write_own

_T = TypeVar("_T")
_TAKEN: dict[int, Lent] = {}
"""What is being trained in this process, by id."""
_LOCK = threading.RLock()  # the garbage collector may give one back at any line


class Lent:
    """The attributes of one object, lent to one holder at a time.

    Args:
        obj: what is trained.
        holder: who trains it; when it is no more, the object is the user's again.
    """

    def __init__(self, obj: object, holder: object) -> None:
        self._obj: Any = obj
        self._aside: dict[str, Any] | None = None  # those of training; while it is taken, the user's
        self._is_taken = False
        weakref.finalize(holder, self.give_back).atexit = False

    def take(self) -> None:
        """The object has the attributes of training from here on. Idempotent.

        Raises:
            UsageError: another holder has it.
        """
        with _LOCK:
            if not self._is_taken:
                see_free(self._obj)
                _TAKEN[id(self._obj)] = self
                self._is_taken = True
                self._swap()

    def give_back(self) -> None:
        """The object has the user's attributes again. Idempotent."""
        with _LOCK:
            if self._is_taken:
                self._swap()
                self._is_taken = False
                del _TAKEN[id(self._obj)]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take it, and afterwards leave it as it was met."""
        met = self._is_taken
        self.take()
        try:
            yield
        finally:
            if not met:
                self.give_back()

    def within(self, method: Callable[[], _T]) -> Callable[[], _T]:
        """A method of the object's, called while it is taken."""

        def called() -> _T:
            with self.taken():
                return method()

        return called

    def _swap(self) -> None:
        present = own_of(self._obj)
        if self._aside is not None:
            write_own(self._obj, self._aside)
        self._aside = present


def see_free(obj: object) -> None:
    """Raises :class:`UsageError` if an object is being trained in this process: it has the attributes of training."""
    with _LOCK:
        if id(obj) in _TAKEN:
            gc.collect()  # it may be held by what nobody refers to any more
        if id(obj) in _TAKEN:
            name = type(obj).__name__
            raise UsageError(
                f"this {name} is being trained already in this process, and what training sets on it would get mixed "
                f"up: pass an object of its own, {name}(...), to each search that runs at the same time"
            )
