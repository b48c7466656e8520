"""Turns: the runs on one worker, which share its device and core, train one after the other."""

from __future__ import annotations

import asyncio


class Turn:
    """A lock by which the runs on one worker, which share its device and core, take turns training."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0

    async def __aenter__(self) -> None:
        self.waiting += 1
        try:
            await self.lock.acquire()
        finally:
            self.waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        self.lock.release()
