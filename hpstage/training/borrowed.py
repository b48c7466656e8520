"""The attributes of a user's object, kept separate from those it has while it is trained.

The object itself is trained, not a copy: its attributes may refer back to it (bound methods in a table, callbacks,
closures), and these references cannot all be redirected to a copy. So it has two sets of attributes, the user's and
training's, one of which is set aside. Attributes set during training affect neither the object's identity, nor what the
user sees afterwards, nor its next training.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hpstage.errors import UsageError
from hpstage.training.code.attributes import own_of, write_own

_T = TypeVar("_T")
_TAKEN: dict[int, Borrowed] = {}
"""Objects being trained in this process, by id."""
_LOCK = threading.RLock()  # reentrant: garbage collection may call give_back at any line


class Borrowed:
    """The attributes of one object, borrowed by one holder at a time.

    Args:
        obj: the object to train.
        holder: its trainer; when the holder is garbage-collected, the user's attributes are restored.
    """

    def __init__(self, obj: object, holder: object) -> None:
        self._obj: Any = obj
        self._aside: dict[str, Any] | None = None  # training's attributes; while taken, the user's
        self._is_taken = False
        weakref.finalize(holder, self.give_back).atexit = False

    def take(self) -> None:
        """Set training's attributes on the object. Idempotent.

        Raises:
            UsageError: another holder has the object.
        """
        with _LOCK:
            if not self._is_taken:
                see_free(self._obj)
                _TAKEN[id(self._obj)] = self
                self._is_taken = True
                self._swap()

    def give_back(self) -> None:
        """Restore the user's attributes of the object. Idempotent."""
        with _LOCK:
            if self._is_taken:
                self._swap()
                self._is_taken = False
                del _TAKEN[id(self._obj)]

    def hand_over(self) -> None:
        """Let the object keep training's attributes permanently."""
        with _LOCK:
            if self._is_taken:
                self._is_taken, self._aside = False, None
                del _TAKEN[id(self._obj)]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the object within the context, and give it back afterwards unless it was taken before."""
        met = self._is_taken
        self.take()
        try:
            yield
        finally:
            if not met:
                self.give_back()

    def within(self, method: Callable[[], _T]) -> Callable[[], _T]:
        """Wrap a method of the object so that it runs within :meth:`taken`."""

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
    """Raise :class:`UsageError` if ``obj`` is being trained in this process, and so has training's attributes."""
    with _LOCK:
        if id(obj) in _TAKEN:
            gc.collect()  # the holder may be unreachable but not yet collected
        if id(obj) in _TAKEN:
            name = type(obj).__name__
            raise UsageError(
                f"this {name} is being trained already in this process, and the attributes that both trainings set "
                f"would get mixed up: pass an object of its own, {name}(...), to each search that runs at the same time"
            )
