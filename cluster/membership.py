"""The workers of a search: those present at its start, and those that join later and match them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from hpstage.cluster.admission import environment_of, explain, other_device, refusal, seen
from hpstage.cluster.inbox import Inbox
from hpstage.cluster.messages import Description
from hpstage.errors import ClusterError
from hpstage.executor import Environment
from hpstage.plan.devices import Devices
from hpstage.plan.facts import ChainId, Departure, WorkerId

logger = logging.getLogger("hpstage")


class Membership:
    """Reports workers that join and leave to the inbox. Thread-safe.

    Args:
        inbox: the driver's inbox.
        lost: called with the chains lost with a worker, after it has left.
        joined: called once a worker has joined.
    """

    def __init__(self, inbox: Inbox, lost: Callable[[list[ChainId]], None], joined: Callable[[], None]) -> None:
        self._inbox = inbox
        self._lost = lost
        self._joined = joined
        self._lock = threading.Lock()  # protects the attributes below
        self._environment: Environment | None = None
        self._loaded: Mapping[str, str] = {}
        self._devices = Devices()
        self._early: dict[WorkerId, Description | None] = {}  # workers that came before begin(); None: and left
        self._present: dict[WorkerId, Description] = {}  # workers that joined

    def begin(
        self, found: Mapping[WorkerId, Description], gpus: int | None, loaded: Mapping[str, str], devices: Devices
    ) -> tuple[Environment, int]:
        """Admit the first workers. Return their common environment, and the maximum number of slots of a worker.

        Args:
            found: the descriptions of the workers.
            gpus: minimum number of workers that must have a GPU.
            loaded: versions of code and packages that the driver has loaded.
            devices: the devices on which the search trains.

        Raises:
            ClusterError: there are no workers, or they differ, or none has one of these devices, or their training
                processes were killed while they were set up.
            UsageError: the trainable cannot be set up on the workers.
        """
        with self._lock:
            present = [description for description in (dict(found) | self._early).values() if description is not None]
            if not present:
                raise ClusterError("all workers have left while they were being set up; see their logs")
            able = [found for found in present if found.problem is None or found.problem.kind != "killed"]
            if not able:
                raise ClusterError(explain(present[0]))
            self._loaded, self._devices = loaded, devices
            devices.check(found.environment.described for found in able if found.environment is not None)
            able = [seen(found, devices) for found in able if other_device(found, devices) is None]
            self._environment = environment_of(able, gpus, loaded)
            used = {description.worker for description in able}
            for description in present:
                if description.worker not in used:
                    why = other_device(description, devices) or explain(description)
                    logger.warning("worker %s is not used: %s", description.worker, why)
            present = able
        for description in present:
            self._join(description)
        return self._environment, max(description.slots for description in present)

    def ready(self, description: Description) -> None:
        """Admit a worker that has the trainable, or warn that it is not used."""
        worker = WorkerId(description.worker)
        with self._lock:
            if self._environment is None:
                self._early[worker] = description
                return
        reason = other_device(description, self._devices)
        if reason is None:
            description = seen(description, self._devices)
            reason = refusal(description, self._environment, self._loaded, list(self._present.values()))
        if reason is None:
            self._join(description)
        else:
            logger.warning("worker %s is not used: %s", worker, reason)
            self.left(worker, "closed")  # it may have been used before, with another training process

    def _join(self, description: Description) -> None:
        self._present[WorkerId(description.worker)] = description
        self._lost(self._inbox.join(WorkerId(description.worker), description.incarnation, description.slots))
        self._joined()

    def incarnation_of(self, worker: WorkerId) -> str:
        """Return the current incarnation of a worker; ``""`` if it is unknown."""
        with self._lock:
            early = self._early.get(worker) if self._environment is None else None
        return early.incarnation if early is not None else self._inbox.incarnation_of(worker)

    def left(self, worker: WorkerId, reason: Departure, incarnation: str | None = None, message: str = "") -> None:
        """Record that a worker has left. If ``incarnation`` is given and is not its current one, do nothing."""
        with self._lock:
            if self._environment is None:
                early = self._early.get(worker)
                if early is None or incarnation in (None, early.incarnation):
                    self._early[worker] = None
                return
        if incarnation in (None, getattr(self._present.get(worker), "incarnation", None)):
            self._present.pop(worker, None)
        # Release its chains, whose tasks would wait forever for another worker at that address.
        self._lost(self._inbox.leave(worker, reason, message, incarnation=incarnation))
