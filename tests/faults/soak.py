"""The soak: three searches on one plan, one of them on a local cluster, while everything around them breaks."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import oracles, work
from tests.faults.driver import RUN_AGAIN, Task
from tests.faults.injector import Injector
from tests.faults.site import LEASE, Process, Site

KINDS = ("halving", "full", "local")
ENDED = (-signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of drivers that were killed or terminated."""
# Seconds without a new record in the journal, and without a driver that was started, after which a search is taken to
# hang: on a loaded machine the last driver may be killed again and again before it has imported what it needs.
_STUCK = 60.0


@dataclass
class Outcome:
    seed: int
    seconds: float = 0.0
    rounds: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    steps_trained: int = 0
    steps_unique: int = 0
    workers_started: int = 0
    drivers_started: int = 0
    drivers_left: dict[str, int] = field(default_factory=dict)  # that said that they be run again, by their error
    recovered: dict[str, int] = field(default_factory=dict)
    records: int = 0
    violations: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    journal: list[str] = field(default_factory=list)  # its end, if something was amiss

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Search:
    task: Task
    driver: Process
    alone: Process
    over: bool = False


class Soak:
    """Args:
    site: entered.
    kinds: of faults, among those of the injector.
    trials: of each study.
    pace: seconds between two faults, at least and at most.
    """

    def __init__(
        self, site: Site, *, seed: int, kinds: set[str], trials: int = 20, pace: tuple[float, float] = (1.5, 3.0)
    ) -> None:
        self.outcome = Outcome(seed)
        self._site = site
        self._seed = seed
        self._trials = trials
        self._pace = pace
        self._searches: list[_Search] = []
        self._injector = Injector(site, self._drivers, seed=seed, kinds=kinds)
        self._rng = random.Random(seed)
        self._driven: set[str] = set()
        self._changed = time.monotonic()  # when anything was last done

    def run(self, seconds: float) -> Outcome:
        """Rounds, until the time is up; what has begun then comes to its end in peace, and all is looked over."""
        began = time.monotonic()
        deadline = began + seconds
        while time.monotonic() < deadline and not self.outcome.violations:
            self._round(deadline)
        self._injector.mend_all()
        self.outcome.seconds = time.monotonic() - began
        self._look_over()
        return self.outcome

    def _drivers(self) -> list[Process]:
        return [search.driver for search in self._searches if not search.over]

    # --- rounds -------------------------------------------------------------------------------------------

    def _round(self, deadline: float) -> None:
        number = self.outcome.rounds
        lost = len(self._injector.lost)
        seeds = [1000 * self._seed + len(KINDS) * number + index for index in range(len(KINDS))]
        tasks = [
            self._site.task(kind, round=number, seed=seed, trials=self._trials, pause=0.015)
            for kind, seed in zip(KINDS, seeds, strict=True)
        ]
        self._searches = [_Search(task, self._drive(task), self._site.alone(task)) for task in tasks]
        fault_at = time.monotonic() + self._pause()
        length, self._changed = 0, time.monotonic()
        while not all(search.over for search in self._searches):
            time.sleep(0.02)
            self._injector.mend()
            self._site.revive()
            for search in self._searches:
                self._look_after(search)
            self.outcome.violations += self._injector.violations
            if self.outcome.violations:
                return
            now = time.monotonic()
            if now >= fault_at and now < deadline:
                self._injector.inject()
                fault_at = time.monotonic() + self._pause()
            seen = sum(path.stat().st_size for path in Path(tasks[0].folder).glob("*.acknowledged-*"))
            if seen != length:
                length, self._changed = seen, now
            elif now - self._changed > _STUCK:
                self._report_hanging()
                return
        for search in self._searches:
            if search.alone.popen.wait(120) != 0:
                self.outcome.violations.append(f"the undisturbed {search.task.name} failed:\n{search.alone.tail()}")
                return
            if len(self._injector.lost) > lost:
                self.outcome.violations += oracles.check_values(search.task.found, number, self._trials)
            else:
                self.outcome.violations += oracles.check_study(
                    search.task.found, self._site.folder / "alone" / search.task.found.name
                )
        self.outcome.rounds += 1

    def _pause(self) -> float:
        return self._rng.uniform(*self._pace)

    def _drive(self, task: Task) -> Process:
        self._driven.add(task.name)
        self._changed = time.monotonic()
        return self._site.drive(task, clock=self._injector.clock_of_next.pop(task.name, 0.0))

    def _look_after(self, search: _Search) -> None:
        """Run a driver again that was killed, or that says so; one that ends otherwise must have reached its end."""
        code = search.driver.popen.poll()
        if search.over or code is None:
            return
        if code == 0:
            search.over = True
        elif code in ENDED or code == RUN_AGAIN:
            search.driver = self._drive(search.task)
        else:
            self.outcome.violations.append(f"{search.task.name} ended with {code}:\n{search.driver.tail()}")

    def _report_hanging(self) -> None:
        """Where the drivers stand: they write it to their logs."""
        stuck = [search.driver for search in self._searches if not search.over]
        for driver in stuck:
            driver.signal(signal.SIGUSR1)
        time.sleep(1.0)
        for driver in stuck:
            self.outcome.violations.append(f"{driver.name} has done nothing for {_STUCK:.0f} s:\n{driver.tail(8000)}")

    # --- the end ------------------------------------------------------------------------------------------

    def _look_over(self) -> None:
        site, outcome = self._site, self.outcome
        site.stop_cluster()
        for search in self._searches:
            search.driver.kill()  # after a violation some are at work yet
            search.alone.kill()
        folder = site.folder / "work"
        outcome.faults, outcome.story = dict(self._injector.counts), self._injector.story
        with site.redis.client() as client:
            records = oracles.raw_journal(client, site.prefix)
            if not records:
                outcome.violations.append("no driver has come as far as to write a record")
                return
            outcome.violations += oracles.check_journal(records)
            outcome.violations += oracles.check_failures(records)
            outcome.violations += oracles.check_written_off(records, self._injector.damaged)
            outcome.violations += oracles.check_acknowledged(records, folder, self._injector.lost)
            outcome.violations += oracles.check_checkpoints(site.checkpoints, records, self._injector.damaged)
            time.sleep(LEASE)  # those of the killed run out
            outcome.violations += oracles.check_leases(client, site.prefix)
        outcome.violations += site.internal_errors()
        outcome.violations += [f"process {pid} was left over" for pid in site.left_over()]
        outcome.violations += [f"{path} was written where no mount was" for path in site.misplaced()]
        fold = oracles.Fold(records)
        trained = work.trained(folder)
        outcome.workers_started = sum(count for name, count in site.started.items() if name.startswith("worker-"))
        outcome.drivers_started = sum(site.started[search] for search in self._driven)
        outcome.steps_trained, outcome.steps_unique = sum(trained.values()), len(trained)
        outcome.drivers_left = dict(Counter(path.read_text().partition("\n")[0] for path in folder.glob("*.left-*")))
        outcome.recovered = {
            "drivers found gone": fold.counts["DriverLeft: gone"],
            "chains lost": fold.counts["ChainLost"],
            "checkpoints lost": fold.counts["StateLost"],
            "chains cut off": fold.counts["ChainLost: cut_off"],
        }
        if self._injector.lost:
            outcome.recovered["records lost by Redis"] = len(self._injector.lost)
        outcome.records = len(records)
        if outcome.violations:
            shutil.copytree(site.checkpoints, site.folder / "checkpoints-at-the-end")  # the disk goes with the site
            outcome.journal = [record.decode() for record in records[-40:]]
