"""The driver's side of the dashboard's page: sends it the journal as it grows."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable

from distributed import Client

from hpstage.errors import HistoryChanged, StoreError
from hpstage.store import Cursor, Journal

logger = logging.getLogger("hpstage")

PAGE = "hpstage"
"""The page's name among those of the dashboard."""
HANDLER = "hpstage_facts"
"""The scheduler's handler for records."""
INSTALLED = "hpstage-dashboard"
"""Names the scheduler's metadata by which drivers know that it has the page: to call a handler that is not there would
leave a warning in its log each time. Their value: ``"page"``, or ``"metrics"`` where those are all."""

NO_MORE = -1
"""The answer of a page that cannot show a plan."""

_LOOK = 0.25
"""Seconds between two looks into the journal."""
_AGAIN = 3.0
"""Seconds between two looks for a page, and between two offers to it while there is nothing new: by these a scheduler
that was started anew is noticed."""
RECORDS = 200
"""Records sent at once. The scheduler does nothing else for the 2 to 10 ms in which it folds them."""
_PATIENCE = 3.0
"""Seconds that a last offer may take when the search is over."""


class Follower:
    """Keeps the page of a cluster's dashboard up to date with a journal, from a thread of its own.

    It decides nothing and nobody waits for it: where there is no page, or none that can be reached, it looks again
    later. The page says which record it wants next. So several followers of one plan send each record once or twice,
    and a page that has forgotten all is sent all.

    Args:
        client: the present connection to the scheduler; ``None`` if there is none.
    """

    def __init__(self, journal: Journal, client: Callable[[], Client | None]) -> None:
        self._journal = journal
        self._client = client
        self._plan = ""
        self._wanted = Cursor()
        self._asked: Client | None = None  # the connection on which a page was found
        self._next_look = 0.0
        self._next_offer = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpstage-dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, once what is written is sent; do not wait long for that."""
        self._closing.set()
        self._thread.join(2 * _PATIENCE)

    def _run(self) -> None:
        last = False
        while not last and self._wanted.position != NO_MORE:
            last = self._closing.wait(_LOOK)
            try:
                while self._send(at_once=last):
                    pass
            except StoreError:
                logger.debug("the dashboard's page waits for the store", exc_info=True)
            except Exception:  # whatever goes wrong between us and the page is no matter of the search
                logger.debug("the dashboard's page could not be reached", exc_info=True)
                self._asked = None

    def _send(self, *, at_once: bool) -> bool:
        """Send what the page wants next; returns whether there may be more."""
        client = self._client()
        if client is None or not self._is_installed(client, at_once=at_once):
            return False
        self._plan = self._plan or self._name()
        anew = False
        try:
            records, _ = self._journal.read_on(self._wanted, RECORDS)
        except HistoryChanged:
            anew, self._plan, self._wanted = True, self._name(), Cursor()
            records, _ = self._journal.read_on(self._wanted, RECORDS)
        if not self._plan or (not records and time.monotonic() < self._next_offer):
            return False
        self._next_offer = time.monotonic() + _AGAIN

        first = self._wanted.position

        async def offered() -> tuple[int, bytes]:
            answer: tuple[int, bytes] = await getattr(client.scheduler, HANDLER)(
                plan=self._plan, first=first, records=records, anew=anew
            )
            return answer

        wanted = Cursor(*client.sync(offered, callback_timeout=_PATIENCE))
        progress = wanted != self._wanted
        self._wanted = wanted
        return progress and wanted.position != NO_MORE

    def _is_installed(self, client: Client, *, at_once: bool) -> bool:
        if client is self._asked:
            return True
        if not at_once and time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _AGAIN
        if client.get_metadata([INSTALLED], False):
            self._asked = client
            return True
        return False

    def _name(self) -> str:
        """Names the journal among all, whatever it is stored in: its first record is that of every plan of the
        workload, but the second tells of a driver or a search, and when it began."""
        first = self._journal.read(0, 2)
        return hashlib.blake2b(b"\n".join(first), digest_size=16).hexdigest() if len(first) == 2 else ""
