"""The meeting of a gang's workers: the leader calls the other workers, whose Dask tasks wait for this call."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from hpstage.cluster.messages import decode_report, encode
from hpstage.plan.messages import ChainEnded

BUSY = "it is busy with another search"
"""The reason if a worker does not join in time."""


class Meeting:
    """Passes a gang's address from the leader's call to the waiting task of a worker that follows the leader. Used on
    the worker's event loop."""

    def __init__(self) -> None:
        self._address: asyncio.Future[str] = asyncio.Future()
        self._has_come = asyncio.Event()

    def announce(self, address: str) -> None:
        """Pass the gang's meeting address to the worker's task. An empty string makes the task stop waiting."""
        if not self._address.done():
            self._address.set_result(address)

    async def call(self, address: str, timeout: float) -> bool:
        """Announce the gang's meeting address, and return whether the worker joins within ``timeout`` seconds. It does
        not join while a task of another run occupies it."""
        self.announce(address)
        try:
            await asyncio.wait_for(self._has_come.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def join(self) -> str:
        """Wait for the leader's call, and return the gang's meeting address. Called in the worker's task."""
        self._has_come.set()
        return await asyncio.shield(self._address)


def apart(report: bytes, why: str) -> bytes:
    """Return a chain's report. If it reports that the chain was stopped, change the outcome: the gang did not meet,
    because of ``why``."""
    ended = decode_report(report)
    if not isinstance(ended, ChainEnded) or ended.outcome != "stopped":
        return report
    return encode(replace(ended, outcome="apart", message=why))


def handler_of(name: str) -> str:
    """Return the name of the Dask handler that receives a run's calls."""
    return f"{name}-meeting"
