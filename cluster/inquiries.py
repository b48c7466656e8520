"""Requests to workers apart from chains: try out a model, measure step backends, compute digests of inputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from distributed import Future

from hpstage.cluster.messages import LookAt, Measure, TryOut, encode
from hpstage.plan.facts import WorkerId

_TURN = 5.0
"""Seconds that a request waits for its turn on a worker, since other searches may use the worker."""
_LOOK = 0.5
"""Seconds between two checks whether a worker is still present."""


class Inquiries:
    """Sends requests to workers, and waits for their answers.

    Args:
        submit: starts a Dask task on a worker that answers an encoded request; returns its key and its future.
        present: returns the workers that have joined and not left.
        connected: returns whether Dask's scheduler is connected.
    """

    def __init__(
        self,
        submit: Callable[[WorkerId, bytes], tuple[str, Future]],
        present: Callable[[], Sequence[WorkerId]],
        connected: Callable[[], bool],
    ) -> None:
        self._submit = submit
        self._present = present
        self._connected = connected
        self._begun: set[str] = set()

    def begun(self, key: str) -> None:
        """Record that a worker has begun to answer. Called on Dask's threads."""
        self._begun.add(key)

    def answers(self, workers: Sequence[WorkerId], request: TryOut | Measure | LookAt) -> list[dict[str, Any]]:
        """Send a request to these workers, and return their answers. Some workers may not answer."""
        self._begun.clear()
        encoded = encode(request)
        sent = []
        for worker in workers:
            key, future = self._submit(worker, encoded)
            # In a thread, since waiting for the result of a lost worker never ends. Not by result(timeout=...): each
            # timeout would leave a future behind, whose error Dask's loop logs.
            result: futures.Future[dict[str, Any] | None] = futures.Future()
            threading.Thread(target=_fetch, args=(future, result), name="hpstage-try-out", daemon=True).start()
            sent.append((worker, key, future, result))
        # The task of a worker that left would wait for another one at its address. A task that is still queued would
        # wait for another search's chain, which may take hours.
        limit = time.monotonic() + _TURN
        answers = []
        try:
            for worker, key, _, result in sent:
                while not futures.wait([result], _LOOK).done and worker in self._present() and self._connected():
                    if key not in self._begun and time.monotonic() > limit:
                        break
                if result.done() and (answer := result.result()) is not None:
                    answers.append(answer)
        finally:
            for _, _, future, result in sent:
                if result.done():
                    future.release()
                elif self._connected():
                    future.cancel()  # ends the thread
        return answers


def _fetch(future: Future, result: futures.Future[dict[str, Any] | None]) -> None:
    """Wait for the result of a task, or until the task is cancelled."""
    try:
        result.set_result(future.result())
    except BaseException as error:
        result.set_exception(error)
