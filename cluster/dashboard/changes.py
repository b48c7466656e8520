"""Records what has changed since each reader last looked, for any number of readers. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Changes(Generic[Key]):
    """The keys that were marked, in the order in which each was marked last."""

    def __init__(self) -> None:
        self._last: dict[Key, int] = {}
        self.position = 0
        """Increases with every mark."""

    def mark(self, key: Key) -> None:
        self.position += 1
        self._last.pop(key, None)
        self._last[key] = self.position

    def since(self, position: int) -> list[Key]:
        """Return the keys marked after a position, those marked first first. O(size of the result)."""
        found = []
        for key in reversed(self._last):
            if self._last[key] <= position:
                break
            found.append(key)
        return found[::-1]
