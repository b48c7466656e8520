"""The workers of an executor, as one driver knows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpstage.chains import RunningChain
from hpstage.events import ChainId, StateRef, WorkerId

# States that a worker may still hold live; only a preference hangs on it.
_REMEMBERED = 64


@dataclass(slots=True)
class Worker:
    """What runs on a worker, and which states it may hold live."""

    id: WorkerId
    chain: RunningChain | None = None
    other: ChainId | None = None  # another driver's chain that runs there
    live: dict[StateRef, None] = field(default_factory=dict)

    def remember(self, ref: StateRef) -> None:
        self.live.pop(ref, None)
        self.live[ref] = None
        if len(self.live) > _REMEMBERED:
            del self.live[next(iter(self.live))]

    @property
    def idle(self) -> bool:
        return self.chain is None and self.other is None
