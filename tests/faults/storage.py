"""Faults of the checkpoints, of the way to them, and of the storage of the studies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from optuna.storages.journal import JournalFileOpenLock

from tests.faults.site import PATIENCE
from tests.faults.spoiling import PACK_SPOILING, SPOILING, spoil, spoil_pack

if TYPE_CHECKING:
    from tests.faults.injector import Injector

DISKS = ("disk full", "disk of studies full")


class Storage:
    def __init__(self, injector: Injector) -> None:
        self._at = injector
        self._full: set[Path] = set()  # disks
        self._is_away = False
        self._cut_off: set[str] = set()  # workers that cannot use the checkpoints
        self._locked: set[str] = set()  # studies

    def _fill_disk(self, place: Path) -> str | None:
        if place in self._full:
            return None
        filler = place / ".filler"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue  # full: on with smaller pieces
        self._full.add(place)
        seconds = self._at.rng.uniform(0.5, 2.0)
        self._at.later(seconds, partial(self._free_disk, place))
        return f"for {seconds:.1f} s"

    def _free_disk(self, place: Path) -> None:
        (place / ".filler").unlink()
        self._full.discard(place)

    def _cut_off_worker(self, how: Callable[[str], Callable[[], None]]) -> str | None:
        worker = self._at.pick([worker for worker in self._at.site.workers if worker.name not in self._cut_off])
        if worker is None:
            return None
        name = worker.name
        self._cut_off.add(name)
        mend = how(name)

        def admit() -> None:
            mend()
            self._cut_off.discard(name)

        seconds = self._at.rng.uniform(0.5, 5.0) * PATIENCE  # its next one of that name is cut off as well
        self._at.later(seconds, admit)
        return f"{name} for {seconds:.1f} s"

    def _refuse(self, name: str) -> Callable[[], None]:
        self._at.site.refuse("EACCES", name)
        return partial(self._at.site.admit, name)

    def _unmount(self, name: str) -> Callable[[], None]:
        self._at.site.mount(name, missing=True)
        return partial(self._at.site.mount, name)

    def _take_storage_away(self) -> str | None:
        if self._is_away:
            return None
        error = self._at.rng.choice(["ETIMEDOUT", "EIO", "ESTALE"])
        self._at.site.refuse(error)
        self._is_away = True
        seconds = self._at.rng.uniform(0.3, 3.0) * PATIENCE
        self._at.later(seconds, self._bring_storage_back)
        return f"{error} for {seconds:.1f} s"

    def _bring_storage_back(self) -> None:
        self._at.site.admit()
        self._is_away = False

    def _damage(self, how: str) -> str | None:
        published = self._at.site.published()
        if not published:
            return None
        # One of the latest: those of past rounds are read by nobody.
        folder = self._at.rng.choice(sorted(published, key=lambda path: path.stat().st_mtime)[-12:])
        self._at.damaged.add(folder.name)  # before: it may be read at once
        spoil(folder, how, self._at.rng.randrange(2**32))
        return folder.name

    def _damage_pack(self, how: str) -> str | None:
        if not (packs := self._at.site.packs()):
            return None
        pack = self._at.rng.choice(packs[-6:])
        try:
            names = spoil_pack(pack, how, self._at.rng.randrange(2**32))
        except FileNotFoundError:
            return None  # it is compacted at this moment
        self._at.damaged |= names
        return f"{pack.name}: {len(names)} entries"

    def _lock_study(self) -> str | None:
        """Another process that writes to a study does not come to its end for a while."""
        studies = sorted(path for path in self._at.site.logs_of_studies() if path.name not in self._locked)
        if not studies:
            return None
        path = self._at.rng.choice(studies)
        lock = JournalFileOpenLock(str(path), grace_period=4)
        lock.acquire()
        self._locked.add(path.name)

        def release() -> None:
            lock.release()
            self._locked.discard(path.name)

        seconds = self._at.rng.uniform(0.2, 2.0)
        self._at.later(seconds, release)
        return f"{path.name} for {seconds:.1f} s"

    ACTS: ClassVar[dict[str, Callable[[Storage], str | None]]] = {
        **{f"checkpoint {how}": lambda self, how=how: self._damage(how) for how in SPOILING},
        **{f"pack {how}": lambda self, how=how: self._damage_pack(how) for how in PACK_SPOILING},
        DISKS[0]: lambda self: self._fill_disk(self._at.site.checkpoints),
        DISKS[1]: lambda self: self._fill_disk(self._at.site.studies),
        "credentials refused": lambda self: self._cut_off_worker(self._refuse),
        "mount missing": lambda self: self._cut_off_worker(self._unmount),
        "storage away": _take_storage_away,
        "study locked": _lock_study,
    }
