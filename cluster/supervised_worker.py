"""A worker under a supervisor: ``python -m hpstage.cluster.supervised_worker PID ARGUMENTS-OF-DASK-WORKER``.

The worker ends when its supervisor ends, for whatever reason. Dask also loads this module by ``--preload``: on
SIGTERM, which spot instances and evicted pods receive some time before their end, the worker saves the states of its
running chains and retires. The scheduler then knows that the worker leaves voluntarily, and blames none of its tasks.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

from distributed import Worker

from hpstage.execution.lifetime import die_with

_KEEPING = 8.0
"""Maximum seconds for saving states. With _RETIRING, it is less than the supervisor's limit."""
_RETIRING = 10.0
"""Maximum seconds to wait for the scheduler's answer, since the scheduler may have ended, too."""


async def dask_setup(worker: Worker) -> None:
    """Retire the worker on SIGTERM. Dask calls this when it preloads the module."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()  # the loop holds its tasks weakly
    loop.add_signal_handler(signal.SIGTERM, lambda: tasks.add(loop.create_task(_retire(worker))))


async def _retire(worker: Worker) -> None:
    from hpstage.cluster.worker import TrainingPlugin  # workers that have not trained need not load it

    sites = [plugin.site for plugin in worker.plugins.values() if isinstance(plugin, TrainingPlugin)]
    keeping = asyncio.gather(*(site.leave() for site in sites if site is not None))
    with suppress(TimeoutError):  # steps since the last boundary are then trained again
        await asyncio.wait_for(keeping, _KEEPING)
    # Not worker.close_gracefully(): it never returns if the scheduler does not answer.
    retiring = worker.scheduler.retire_workers(
        workers=[worker.address], close_workers=False, remove=True, stimulus_id="sigterm"
    )
    with suppress(OSError, TimeoutError):  # there is no scheduler to notify
        await asyncio.wait_for(retiring, _RETIRING)
    await worker.close(reason="SIGTERM", executor_wait=False)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from distributed.cli.dask_worker import main

    main(sys.argv[2:], prog_name="hpstage worker")
