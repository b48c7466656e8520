"""Ordered lists for the planner: plain lists kept sorted with ``bisect``.

There is one per node, and most hold one or two items, so cheap construction matters most (those of sortedcontainers
take 15 microseconds each and burden the cyclic collector). Inserting moves memory: 20 microseconds at 100,000 items.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, TypeVar

T = TypeVar("T", int, "tuple[int, int]")


class Ordered(list[T]):
    """Distinct items in ascending order."""

    __slots__ = ()

    def add(self, item: T) -> None:
        if item not in self:
            insort(self, item)

    def discard(self, item: T) -> None:
        at = bisect_left(self, item)
        if at < len(self) and self[at] == item:
            del self[at]

    def __contains__(self, item: Any) -> bool:
        at = bisect_left(self, item)
        return at < len(self) and bool(self[at] == item)

    def irange(
        self,
        low: T | None = None,
        high: T | None = None,
        inclusive: tuple[bool, bool] = (True, True),
        most: int | None = None,
    ) -> list[T]:
        """Return the items from ``low`` to ``high``, at most ``most`` of them (``None``: no limit)."""
        start = 0 if low is None else (bisect_left if inclusive[0] else bisect_right)(self, low)
        stop = len(self) if high is None else (bisect_right if inclusive[1] else bisect_left)(self, high)
        return self[start : stop if most is None else min(stop, start + most)]

    def first(self, low: T, *, inclusive: bool = True) -> T | None:
        """Return the first item not below ``low``, or above it if not ``inclusive``."""
        at = bisect_left(self, low) if inclusive else bisect_right(self, low)
        return self[at] if at < len(self) else None

    def last(self, high: T) -> T | None:
        """Return the last item not above ``high``."""
        at = bisect_right(self, high) - 1
        return self[at] if at >= 0 else None
