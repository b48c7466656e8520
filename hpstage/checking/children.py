"""The processes of checks: starting them, at most two at a time, and receiving their records."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from hpstage.checking.ways import Process
from hpstage.cluster.fork_server import ForkServer, can_fork
from hpstage.cluster.fresh import FreshProcess
from hpstage.cluster.messages import Load
from hpstage.execution.runs import Record

_TOGETHER = 2
Take = Callable[[Record], None]


class Children:
    """The processes of checks. A context manager, which kills the processes still running at its end.

    Args:
        libraries: libraries that the trainables need, imported once for several checks.
    """

    def __init__(self, libraries: Iterable[str] = ()) -> None:
        self._libraries = tuple(libraries)
        self._servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}
        self._running: set[FreshProcess] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="hpstage-check-")
        self._pool = ThreadPoolExecutor(_TOGETHER)
        self._delivering, self._starting = Lock(), Lock()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting:
            for process in list(self._running):
                process.end()
        self._pool.shutdown(cancel_futures=True)
        for server in self._servers.values():
            server.close()
        self._folder.cleanup()

    def folder(self) -> Path:
        """Create a folder for the states of one check."""
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def perform(
        self, trainable: bytes, making: bytes | None, states: Path, processes: Iterable[Process], take: Take
    ) -> None:
        """Have these processes train a cloudpickled trainable, and wait for all of them.

        Those that are to make it themselves unpickle ``making``. ``take`` is called with each record, by one thread at
        a time.
        """

        def perform(process: Process) -> None:
            with self._starting:
                server = self._server(process.variables)
                packed = making if making is not None and process.makes_it else trainable
                fresh = FreshProcess(Load(packed, {}), server=server, variables=process.variables)
                self._running.add(fresh)
            try:
                environment = fresh.described()
                for run in process.runs:
                    record = fresh.perform(run, str(states))
                    if run is process.runs[0] and environment is not None:
                        record.workload = environment.described | environment.identity
                        record.code = environment.loaded
                    with self._delivering:
                        take(record)
                    if fresh.has_ended or (record.problem is not None and run.kept):
                        return  # the other runs begin with the states it keeps
            finally:
                self._running.discard(fresh)
                fresh.kill()

        for future in [self._pool.submit(perform, process) for process in processes]:
            future.result()

    def _server(self, variables: Mapping[str, str]) -> ForkServer | None:
        key = tuple(sorted(variables.items()))
        if key not in self._servers and can_fork():
            self._servers[key] = ForkServer(self._libraries, variables, with_threads=True)
        return self._servers.get(key)
