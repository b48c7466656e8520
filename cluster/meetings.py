"""Where the workers of a gang meet: the leader calls each of the others, whose task waits for its call."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from hpstage.cluster.messages import decode_report, encode
from hpstage.plan.messages import ChainEnded

BUSY = "it is busy with another search"
"""Why a worker does not come."""


class Meeting:
    """Of one chain, on a worker that is to follow. For the worker's event loop."""

    def __init__(self) -> None:
        self._address: asyncio.Future[str] = asyncio.Future()
        self._has_come = asyncio.Event()

    def announce(self, address: str) -> None:
        """Give the worker's task the address at which the gang meets; with ``""`` it stops waiting."""
        if not self._address.done():
            self._address.set_result(address)

    async def call(self, address: str, timeout: float) -> bool:
        """Announce where the gang meets; return whether the worker comes. It does not while another run's task
        holds the worker."""
        self.announce(address)
        try:
            await asyncio.wait_for(self._has_come.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def join(self) -> str:
        """Wait, as the worker's task, for the leader's call; return where the gang meets."""
        self._has_come.set()
        return await asyncio.shield(self._address)


def apart(report: bytes, why: str) -> bytes:
    """Return a chain's report; if it is that of its stop, one with the reason why its gang has not met."""
    ended = decode_report(report)
    if not isinstance(ended, ChainEnded) or ended.outcome != "stopped":
        return report
    return encode(replace(ended, outcome="apart", message=why))


def handler_of(name: str) -> str:
    """Return the name of the Dask handler of such calls to a run."""
    return f"{name}-meeting"
