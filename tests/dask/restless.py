"""A Dask worker that draws random numbers. Its process, which has no torch, imports this module."""

from __future__ import annotations

import asyncio
import random

import numpy as np
from dask.sizeof import sizeof
from distributed import Worker


def keep_drawing(dask_worker: Worker) -> None:
    """Have a worker's event loop do until it ends what it does now and then: estimate sizes, key generators."""

    async def draw() -> None:
        values = list(range(100))
        while True:
            sizeof(values)  # draws from ``random``
            np.random.random()
            random.random()
            await asyncio.sleep(0.0005)

    dask_worker.loop.add_callback(draw)
