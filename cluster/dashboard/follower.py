"""The driver's side of the dashboard's page: sends it new records of the journal, and the time left."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable

from distributed import Client

from hpstage.errors import HistoryChanged, StoreError
from hpstage.store import Cursor, Journal
from hpstage.store.opening import address_of

logger = logging.getLogger("hpstage")

PAGE = "hpstage"
"""Name of the page on the dashboard."""
HANDLER = "hpstage_facts"
"""Name of the scheduler's handler for records."""
INSTALLED = "hpstage-dashboard"
"""Key in the scheduler's metadata from which drivers know that it has the page, since calling a missing handler would
leave a warning in its log each time. Value: ``"page"``, or ``"metrics"`` if there are only metrics."""

NO_MORE = -1
"""Answer for a plan that cannot be shown."""

_LOOK = 0.25
_LOOK_UNWATCHED = 1.0
"""Seconds between two checks of the journal, while somebody looks at the page and while nobody does."""
_AGAIN = 3.0
"""Seconds between two checks for a page, and between two offers to it while there are no new records, by which a
restarted scheduler is noticed."""
RECORDS = 200
"""Number of records sent at once. Folding them blocks the scheduler for 2 to 10 ms."""
OLD = 30.0
"""Seconds after which an estimate of the time left is no longer shown, unless there is a newer one."""
_PATIENCE = 3.0
"""Maximum seconds of a last offer when the search has ended."""


class Follower:
    """Keeps the page of a cluster's dashboard up to date with a journal, in a separate thread.

    It makes no decisions and nothing waits for it: if there is no page, or it cannot be reached, it tries again later.
    The page answers with the position of the next record it needs. So several followers of one plan send each record
    once or twice, and a page that has lost everything is sent everything again.

    Args:
        client: returns the current connection to the scheduler; ``None`` if there is none.
    """

    def __init__(self, journal: Journal, client: Callable[[], Client | None]) -> None:
        self._journal = journal
        self._client = client
        self._plan = ""
        self._wanted = Cursor()
        self._found: Client | None = None  # the connection on which a page was found
        self._next_look = 0.0
        self._next_offer = 0.0
        self._watched = False
        self._estimate: tuple[str, float | None, float] | None = None  # study, its end, and when that was estimated
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpstage-dashboard", daemon=True)
        self._thread.start()

    @property
    def is_watched(self) -> bool:
        """Whether somebody looked at the page when it answered last."""
        return self._watched

    def show(self, study: str, seconds_left: float | None) -> None:
        """Send a new estimate of a study with the next records, or within seconds if there are none; returns at
        once."""
        now = time.monotonic()
        self._estimate = study, None if seconds_left is None else now + seconds_left, now

    def close(self) -> None:
        """Stop after sending the records written so far, without waiting long."""
        self._closing.set()
        self._thread.join(2 * _PATIENCE)

    def _run(self) -> None:
        last = False
        while not last and self._wanted.position != NO_MORE:
            last = self._closing.wait(_LOOK if self._watched else _LOOK_UNWATCHED)
            try:
                while self._send(at_once=last):
                    pass
            except StoreError:
                logger.debug("the dashboard page is waiting for the store", exc_info=True)
            except Exception:  # errors between us and the page must not affect the search
                logger.debug("the dashboard page could not be reached", exc_info=True)
                self._found, self._watched = None, False

    def _send(self, *, at_once: bool) -> bool:
        """Send the records that the page wants next; return whether there may be more."""
        client = self._client()
        if client is None or not self._is_installed(client, at_once=at_once):
            return False
        self._plan = self._plan or self._name()
        discard = False
        try:
            records, _ = self._journal.read_on(self._wanted, RECORDS)
        except HistoryChanged:
            discard, self._plan, self._wanted = True, self._name(), Cursor()
            records, _ = self._journal.read_on(self._wanted, RECORDS)
        if not self._plan or (not records and time.monotonic() < self._next_offer):
            return False
        self._next_offer = time.monotonic() + _AGAIN

        first = self._wanted.position
        left = self._time_left()

        async def offered() -> tuple[int, bytes, bool]:
            answer: tuple[int, bytes, bool] = await getattr(client.scheduler, HANDLER)(
                plan=self._plan, first=first, records=records, anew=discard, store=address_of(self._journal), left=left
            )
            return answer

        position, hash, self._watched = client.sync(offered, callback_timeout=_PATIENCE)
        wanted = Cursor(position, hash)
        progress = wanted != self._wanted
        self._wanted = wanted
        return progress and wanted.position != NO_MORE

    def _time_left(self) -> tuple[str, float | None] | None:
        """Return the study that was estimated, and the seconds until its end, unless that is unknown."""
        if self._estimate is None or not self._watched:
            return None
        (study, end, made), now = self._estimate, time.monotonic()
        return study, None if end is None or now - made > OLD else max(0.0, end - now)

    def _is_installed(self, client: Client, *, at_once: bool) -> bool:
        if client is self._found:
            return True
        if not at_once and time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _AGAIN
        if client.get_metadata([INSTALLED], False):
            self._found = client
            return True
        return False

    def _name(self) -> str:
        """Return a name that is unique to the journal, regardless of where it is stored. All plans of a workload start
        with the same record, but the second contains a driver or a search, and when it started."""
        first = self._journal.read(0, 2)
        return hashlib.blake2b(b"\n".join(first), digest_size=16).hexdigest() if len(first) == 2 else ""
