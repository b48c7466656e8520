"""Faults, drawn by a seed: what breaks, where, and for how long."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from hpstage.checkpoints import Manifest
from hpstage.checkpoints import format as files
from tests.faults.oracles import raw_journal, record_hash
from tests.faults.site import LEASE, PATIENCE, WORKER_TTL, Process, Site, members

HOUR = 3600.0
DISK = "disk full"


def in_common(before: Sequence[bytes], after: Sequence[bytes]) -> int:
    """How many records, from the first on, are in both."""
    return next(
        (place for place, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
        min(len(before), len(after)),
    )


def evicted(records: Sequence[bytes], start: int) -> set[str]:
    """Keys of the states that these records, from ``start`` on, say to be evicted."""
    keys: dict[tuple[int, int], str] = {}
    found = set()
    for place, fact in enumerate(map(json.loads, records)):
        ref = (fact.get("node"), fact.get("step"))
        if fact["type"] == "StateReached" and fact.get("kept") is not None:
            keys[ref] = fact["kept"]["key"]
        elif fact["type"] == "StateLost" and fact["reason"] == "evicted" and place >= start:
            found.add(keys[ref])
    return found


class Injector:
    """Breaks something of a site each time that it is asked; puts right in time what does not end by itself.

    The order of faults follows from the seed; when each comes, and what it meets, does not.
    """

    def __init__(self, site: Site, drivers: Callable[[], list[Process]], *, seed: int, kinds: set[str]) -> None:
        """``drivers``: those that are at work now."""
        self.counts: Counter[str] = Counter()
        self.damaged: set[str] = set()  # keys of checkpoints that were spoilt
        self.lost: set[tuple[int, str]] = set()  # places and hashes of acknowledged records that Redis lost
        self.story: list[str] = []
        self.clock_of_next: dict[str, float] = {}  # of a driver, by name: the error of its clock when it starts again
        self._site = site
        self._drivers = drivers
        self._rng = random.Random(seed)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._began = time.monotonic()
        self._redis_is_frozen = False
        self._disk_is_full = False
        self._is_away = False
        self._cut_off: set[str] = set()  # workers that cannot use the checkpoints
        self._is_to_lose = False
        self._kinds = {kind: act for kind, act in self._acts().items() if kind in kinds}

    def _acts(self) -> dict[str, Callable[[], str | None]]:
        return {
            "worker killed": lambda: self._signal_worker(signal.SIGKILL),
            "worker terminated": lambda: self._signal_worker(signal.SIGTERM),
            "worker segfaulted": lambda: self._signal_worker(signal.SIGSEGV),
            "training process killed": self._kill_training_process,
            "worker frozen": self._freeze_worker,
            "worker's clock wrong": self._shift_worker,
            "driver killed": lambda: self._kill_driver(0.0),
            "driver frozen": self._freeze_driver,
            "driver's clock wrong": lambda: self._kill_driver(self._rng.choice([-HOUR, HOUR])),
            "redis killed": self._kill_redis,
            "redis frozen": self._freeze_redis,
            "records lost": self._save_records,
            **{f"checkpoint {how}": partial(self._damage, how) for how in _SPOILING},
            DISK: self._fill_disk,
            "credentials refused": partial(self._cut_off_worker, self._refuse),
            "mount missing": partial(self._cut_off_worker, self._unmount),
            "storage away": self._take_storage_away,
            "scheduler killed": self._kill_scheduler,
        }

    def inject(self) -> None:
        """One fault, of a kind that finds something to break."""
        for kind in self._rng.sample(sorted(self._kinds), len(self._kinds)):
            what = self._kinds[kind]()
            if what is not None:
                self.counts[kind] += 1
                self.story.append(f"{time.monotonic() - self._began:8.2f} s  {kind}: {what}")
                return

    def mend(self) -> None:
        """Do what is due: thaw, free the disk, start Redis again."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def mend_all(self) -> None:
        while self._due:
            heapq.heappop(self._due)[2]()

    @property
    def busy(self) -> bool:
        """Is something to be put right yet?"""
        return bool(self._due)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), action))

    def _pick(self, processes: list[Process]) -> Process | None:
        able = [p for p in processes if not p.frozen and p.popen.poll() is None]
        return self._rng.choice(able) if able else None

    # --- workers ------------------------------------------------------------------------------------------

    def _signal_worker(self, number: int) -> str | None:
        worker = self._pick(self._site.workers)
        if worker is None:
            return None
        worker.signal(number)
        return f"{worker.name} ({worker.popen.pid})"

    def _kill_training_process(self) -> str | None:
        worker = self._pick(self._site.workers)
        training = [] if worker is None else [pid for pid in members(worker.popen.pid) if is_training(pid)]
        if worker is None or not training:
            return None
        pid = self._rng.choice(training)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return f"of {worker.name} ({pid})"

    def _freeze_worker(self) -> str | None:
        if any(worker.frozen for worker in self._site.workers):
            return None
        worker = self._pick(self._site.workers)
        if worker is None:
            return None
        worker.freeze()
        # The scheduler looks once in each WORKER_TTL.
        seconds = self._rng.uniform(0.5, 2.2) * WORKER_TTL
        self._later(seconds, worker.thaw)
        return f"{worker.name} for {seconds:.1f} s"

    def _shift_worker(self) -> str | None:
        worker = self._pick(self._site.workers)
        if worker is None:
            return None
        shift = self._rng.choice([-HOUR, HOUR])
        self._site.restart_worker(self._site.workers.index(worker), clock=shift)
        return f"{worker.name} by {shift:+.0f} s"

    # --- drivers ------------------------------------------------------------------------------------------

    def _kill_driver(self, shift: float) -> str | None:
        driver = self._pick(self._drivers())
        if driver is None:
            return None
        self.clock_of_next[driver.name] = shift
        driver.kill()
        return f"{driver.name} ({driver.popen.pid})" + (f", comes back {shift:+.0f} s off" if shift else "")

    def _freeze_driver(self) -> str | None:
        drivers = self._drivers()
        if any(driver.frozen for driver in drivers):
            return None
        driver = self._pick(drivers)
        if driver is None:
            return None
        driver.freeze()
        seconds = self._rng.uniform(0.3, 2.0) * LEASE
        self._later(seconds, driver.thaw)
        return f"{driver.name} for {seconds:.1f} s"

    # --- what they stand on -------------------------------------------------------------------------------

    def _kill_redis(self) -> str | None:
        if self._redis_is_frozen:
            return None
        self._site.redis.kill()
        self._redis_is_frozen = True
        seconds = self._rng.uniform(0.1, 1.5)
        self._later(seconds, self._start_redis)
        return f"away for {seconds:.1f} s"

    def _start_redis(self) -> None:
        self._site.redis.start()
        self._redis_is_frozen = False

    def _freeze_redis(self) -> str | None:
        if self._redis_is_frozen:
            return None
        self._site.redis.freeze()
        self._redis_is_frozen = True
        seconds = self._rng.uniform(1.0, 3.0)
        self._later(seconds, self._thaw_redis)
        return f"for {seconds:.1f} s"

    def _thaw_redis(self) -> None:
        self._site.redis.thaw()
        self._redis_is_frozen = False

    def _save_records(self) -> str | None:
        """What a failover to a replica does that lags behind: whatever is acknowledged from now on is lost in a while,
        and those who write on fill its place."""
        if self._redis_is_frozen or self._is_to_lose or len(self._journal()) < 20:
            return None
        self._is_to_lose = True
        copy = self._site.redis.save()
        seconds = self._rng.uniform(0.5, 3.0)
        self._later(seconds, partial(self._lose_records, copy))
        return f"those of the next {seconds:.1f} s"

    def _lose_records(self, copy: Path) -> None:
        redis = self._site.redis
        if self._redis_is_frozen:
            self._later(0.2, partial(self._lose_records, copy))
            return
        with redis.client() as client:
            client.client_pause(60_000, all=False)  # from here on nothing is acknowledged that we do not see
        before = self._journal()
        redis.kill()
        redis.put_back(copy)
        redis.start()
        there = in_common(before, self._journal())  # others may have written on already
        self.lost |= {(place, record_hash(before[place])) for place in range(there, len(before))}
        self.damaged |= evicted(before, there)  # gone, and nobody knows any more that they are
        shutil.rmtree(copy)
        self._is_to_lose = False

    def _journal(self) -> list[bytes]:
        with self._site.redis.client() as client:
            return raw_journal(client, self._site.prefix)

    def _kill_scheduler(self) -> str | None:
        scheduler = self._site.scheduler
        if scheduler is None or scheduler.popen.poll() is not None:
            return None
        scheduler.kill()
        seconds = self._rng.uniform(0.1, 1.0)
        self._later(seconds, self._site.start_scheduler)
        return f"away for {seconds:.1f} s"

    def _fill_disk(self) -> str | None:
        if self._disk_is_full:
            return None
        filler = self._site.checkpoints / ".filler"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue  # full: on with smaller pieces
        self._disk_is_full = True
        seconds = self._rng.uniform(0.5, 2.0)
        self._later(seconds, self._free_disk)
        return f"for {seconds:.1f} s"

    def _free_disk(self) -> None:
        (self._site.checkpoints / ".filler").unlink()
        self._disk_is_full = False

    # --- the way to the checkpoints -----------------------------------------------------------------------

    def _cut_off_worker(self, how: Callable[[str], Callable[[], None]]) -> str | None:
        worker = self._pick([worker for worker in self._site.workers if worker.name not in self._cut_off])
        if worker is None:
            return None
        name = worker.name
        self._cut_off.add(name)
        mend = how(name)

        def admit() -> None:
            mend()
            self._cut_off.discard(name)

        seconds = self._rng.uniform(0.5, 5.0) * PATIENCE  # its next one of that name is cut off as well
        self._later(seconds, admit)
        return f"{name} for {seconds:.1f} s"

    def _refuse(self, name: str) -> Callable[[], None]:
        self._site.refuse("EACCES", name)
        return partial(self._site.admit, name)

    def _unmount(self, name: str) -> Callable[[], None]:
        self._site.mount(name, missing=True)
        return partial(self._site.mount, name)

    def _take_storage_away(self) -> str | None:
        if self._is_away:
            return None
        error = self._rng.choice(["ETIMEDOUT", "EIO", "ESTALE"])
        self._site.refuse(error)
        self._is_away = True
        seconds = self._rng.uniform(0.3, 3.0) * PATIENCE
        self._later(seconds, self._bring_storage_back)
        return f"{error} for {seconds:.1f} s"

    def _bring_storage_back(self) -> None:
        self._site.admit()
        self._is_away = False

    def _damage(self, how: str) -> str | None:
        published = self._site.published()
        if not published:
            return None
        # One of the latest: those of past rounds are read by nobody.
        folder = self._rng.choice(sorted(published, key=lambda path: path.stat().st_mtime)[-12:])
        self.damaged.add(folder.name)  # before: it may be read at once
        spoil(folder, how, self._rng.randrange(2**32))
        return folder.name


def is_training(pid: int) -> bool:
    try:
        return b"hpstage.cluster.training_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def spoil(folder: Path, how: str, seed: int) -> None:
    """Spoil a published checkpoint: ``truncated``, ``flipped``, ``undecodable`` or ``deleted``."""
    _SPOILING[how](folder, random.Random(seed))


def _truncate(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    os.truncate(path, rng.randrange(path.stat().st_size))


def _flip(folder: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    with path.open("r+b") as file:
        place = rng.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _describe_nothing(folder: Path, rng: random.Random) -> None:
    """Replace what describes the state by something else, with the right checksums and lengths."""
    (path,) = folder.glob("state*.json")
    sealed = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    structure = json.loads(path.read_bytes())
    structure["tree"] = rng.choice([["float", "00"], ["leaf", 10**12], ["unknown"], None, ["dict", []]])
    content = json.dumps(structure).encode()
    sealed["bytes"] += len(content) - path.stat().st_size
    sealed["files"][path.name] = xxhash.xxh3_128_hexdigest(content)
    path.write_bytes(content)
    (folder / "manifest.json").write_bytes(files.encode_manifest(msgspec.convert(sealed, Manifest)))


def _delete(folder: Path, rng: random.Random) -> None:
    shutil.rmtree(folder)


_SPOILING: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": _truncate,
    "flipped": _flip,
    "undecodable": _describe_nothing,
    "deleted": _delete,
}

KINDS = (
    "worker killed",
    "worker terminated",
    "worker segfaulted",
    "training process killed",
    "worker frozen",
    "worker's clock wrong",
    "driver killed",
    "driver frozen",
    "driver's clock wrong",
    "redis killed",
    "redis frozen",
    "records lost",
    "checkpoint truncated",
    "checkpoint flipped",
    "checkpoint undecodable",
    "checkpoint deleted",
    DISK,
    "credentials refused",
    "mount missing",
    "storage away",
    "scheduler killed",
)
