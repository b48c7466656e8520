"""One fault at a time, with real processes: what it may cost, and that it changes no value."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpstage.plan.log import split
from tests.faults import oracles, work
from tests.faults.driver import RUN_AGAIN, Task, search
from tests.faults.processes import HOUR
from tests.faults.site import Process, Site
from tests.faults.spoiling import spoil

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("own_files")]

WORKERS = 2
TRIALS = 10
_rounds = iter(range(1000))  # each test trains states of its own


@pytest.fixture(scope="module")
def shared_site(redis_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("faults") / "site", workers=WORKERS) as site:
        yield site


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    yield shared_site
    shared_site.restore()  # a test that has failed shall not fail those after it


class Trial:
    """A study under a fault, and the same undisturbed."""

    def __init__(self, site: Site, kind: str = "full", *, round: int | None = None, **options: Any) -> None:
        self.site = site
        number = next(_rounds) if round is None else round
        self.task: Task = site.task(kind, round=number, **{"seed": 7, "trials": TRIALS, "pause": 0.02, **options})
        self.driver: Process | None = None

    def start(self, *, clock: float = 0.0) -> Trial:
        self.driver = self.site.drive(self.task, clock=clock)
        return self

    def id(self) -> str:
        """Of the driver, as the journal has it."""
        assert self.driver is not None
        pid = self.driver.popen.pid
        [name] = [f["driver"] for f in facts(self.site) if f["type"] == "DriverJoined" and f["pid"] == pid]
        return str(name)

    def finish(self) -> int:
        """Wait for the driver's end, as its user would: workers are replaced, and it is run again if it says so.
        Returns how often it was."""
        assert self.driver is not None
        again = 0

        def ended() -> bool:
            nonlocal again
            assert self.driver is not None
            self.site.revive()
            code = self.driver.popen.poll()
            if code == RUN_AGAIN:
                again += 1
                self.start()
            elif code is not None:
                assert code == 0, self.driver.tail()
            return code == 0

        until(ended, "the study ends")
        return again

    def check(self) -> None:
        """The study is what it would have been, and everybody kept to the rules."""
        records = raw(self.site)
        amiss = oracles.check_study(self.task.found, self.undisturbed())
        amiss += oracles.check_journal(records) + oracles.check_acknowledged(records, Path(self.task.folder))
        assert not amiss, "\n".join(amiss)

    def undisturbed(self) -> Path:
        """What comes of it in this process."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        task = self.site.undisturbed(self.task)
        search(task)
        return task.found


def raw(site: Site) -> list[bytes]:
    with site.redis.client() as client:
        return oracles.raw_journal(client, site.prefix)


def facts(site: Site) -> list[dict[str, Any]]:
    return [json.loads(fact) for record in raw(site) for fact in split(record)]


def counted(site: Site, kind: str) -> int:
    return oracles.Fold(raw(site)).counts[kind]


def until(condition: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"in {seconds} s it did not happen that {what}"
        time.sleep(0.02)


def trained(site: Site) -> Counter[str]:
    return work.trained(site.folder / "work")


def until_training(site: Site, steps: int) -> None:
    """Until so many steps more are trained than when this is called."""
    before = sum(trained(site).values())
    until(lambda: sum(trained(site).values()) >= before + steps, f"{steps} steps are trained")


def long_chains(site: Site) -> list[dict[str, Any]]:
    """Chains of twenty steps and more that were ever started."""
    started = [fact for fact in facts(site) if fact["type"] == "ChainStarted"]
    return [fact for fact in started if sum(part["stop"] - part["start"] for part in fact["spans"]) >= 20]


@pytest.mark.ci
def test_a_search_waits_for_a_killed_redis_server_that_restarts_from_its_file(site: Site) -> None:
    site.slow_down(0.1)
    trial = Trial(site).start()

    def silences() -> int:
        assert trial.driver is not None
        return trial.driver.log.read_text().count("does not answer")

    went_on = []
    for _ in range(2):
        # A chain that has just begun runs for two seconds at least, and needs no answer from the driver in that time.
        seen = len(long_chains(site))
        until(lambda: len(long_chains(site)) > seen, "a long chain begins")  # noqa: B023  # called at once
        logged = silences()
        site.redis.kill()
        before = sum(trained(site).values())
        until(lambda: silences() > logged, "the driver waits for it")  # noqa: B023  # called at once
        went_on.append(sum(trained(site).values()) - before)
        site.redis.start()
    assert max(went_on) >= 2, "workers train during the outage"
    site.slow_down(None)
    assert trial.finish() == 0
    trial.check()


@pytest.mark.slow
def test_a_search_waits_for_a_paused_redis_server(site: Site) -> None:
    trial = Trial(site).start()
    until_training(site, 40)
    site.redis.freeze()
    time.sleep(1.5)
    site.redis.thaw()
    assert trial.finish() == 0
    trial.check()


@pytest.mark.ci
def test_damaged_checkpoints_cost_only_the_retraining_of_their_states(site: Site) -> None:
    trial = Trial(site).start()
    before = trained(site)
    kept = set(site.published())
    until(lambda: len(set(site.published()) - kept) >= 8, "states are kept")
    assert trial.driver is not None
    trial.driver.kill()
    for index in range(WORKERS):  # what they hold in memory is gone as well
        site.restart_worker(index)
    at_risk = sum((trained(site) - before).values())
    began = len(raw(site))
    for number, folder in enumerate(sorted(set(site.published()) - kept)):
        spoil(folder, ("truncated", "flipped", "undecodable", "deleted")[number % 4], number)
    trial.start().finish()
    trial.check()
    lost = [fact["step"] for fact in facts(site)[began:] if fact["type"] == "StateLost"]
    assert lost
    again = trained(site) - before
    # A spoilt state is found out when it is needed: what leads to it may by then have been trained again, and not kept.
    assert sum(again.values()) - len(again) <= at_risk + sum(lost)


@pytest.mark.slow
def test_records_of_a_suspended_driver_are_refused_after_another_driver_replaced_it(site: Site) -> None:
    frozen = Trial(site, "full").start()
    other = Trial(site, "halving", round=frozen.task.round).start()
    assert frozen.driver is not None
    pid = frozen.driver.popen.pid
    until(lambda: any(f["type"] == "DriverJoined" and f["pid"] == pid for f in facts(site)), "it joins")
    name = frozen.id()
    until(lambda: name in holders(site), "it trains")
    frozen.driver.freeze()
    while name not in holders(site):  # it had just reported its last chain
        frozen.driver.thaw()
        until(lambda: name in holders(site), "it trains")
        frozen.driver.freeze()
    gone = {"type": "DriverLeft", "driver": name, "reason": "gone"}
    until(lambda: any(f.items() >= gone.items() for f in facts(site)), "the other takes it for dead")
    other.finish()
    frozen.driver.thaw()
    frozen.finish()
    frozen.check()  # no record of the frozen one's follows its end
    other.check()


def written_off(site: Site) -> set[str]:
    return set(oracles.Fold(raw(site)).written_off)


@pytest.mark.ci
def test_a_worker_without_the_checkpoint_mount_is_not_used_and_no_checkpoint_is_lost(site: Site) -> None:
    before = written_off(site)
    worker = site.workers[0]
    until(lambda: bool(worker.address), "it has started")
    site.mount(worker.name, missing=True)
    trial = Trial(site).start()
    driver = trial.driver
    assert driver is not None
    warning = f"Worker {worker.address} cannot use the checkpoints: /proc/self/cwd/checkpoints is not the place"
    until(lambda: warning in driver.log.read_text(), "the driver says so")
    until_training(site, 40)  # on the other
    site.mount(worker.name)
    assert trial.finish() == 0
    trial.check()
    assert site.misplaced() == [] and written_off(site) == before


@pytest.mark.ci
def test_a_search_waits_for_storage_that_refuses_one_worker_or_fails_for_all_workers(site: Site) -> None:
    before = written_off(site)
    trial = Trial(site, trials=30).start()
    driver = trial.driver
    assert driver is not None
    until_training(site, 40)
    worker = site.workers[0]
    site.refuse("EACCES", worker.name)  # its credentials have expired
    warning = f"Worker {worker.address} cannot use the checkpoints: cannot"
    until(lambda: warning in driver.log.read_text(), "it is benched")
    assert "Permission denied" in driver.log.read_text()
    until_training(site, 20)  # on the other
    site.admit(worker.name)
    again = f"Worker {worker.address} can use the checkpoints again"
    until(lambda: again in driver.log.read_text(), "it comes back")

    said = driver.log.read_text()
    site.refuse("ETIMEDOUT")
    warnings = [f"Worker {worker.address} cannot use" for worker in site.workers]
    until(lambda: all(warning in driver.log.read_text()[len(said) :] for warning in warnings), "all are benched")
    site.admit()
    assert trial.finish() == 0
    trial.check()
    assert written_off(site) == before
    assert "disk is full" not in driver.log.read_text()


def chains_on(site: Site, worker: str) -> set[str]:
    """Chains that run on a worker."""
    started = {fact["chain"] for fact in facts(site) if fact["type"] == "ChainStarted" and fact["worker"] == worker}
    return started & set(oracles.Fold(raw(site)).chains)


def has_reported(site: Site, worker: str) -> bool:
    """Has the worker reported a state of a chain that it runs?"""
    chains = chains_on(site, worker)
    return any(f["type"] == "StateReached" and f["chain"] in chains for f in facts(site))


def losses(site: Site, began: int) -> list[float]:
    """Seconds that were counted as lost with workers, since so many records."""
    return [f["seconds"] for f in facts(site)[began:] if f["type"] == "ChainLost" and f["outcome"] == "died"]


def holders(site: Site) -> set[str]:
    """Drivers that have a running chain."""
    return {chain.driver for chain in oracles.Fold(raw(site)).chains.values()}


@pytest.mark.slow
@pytest.mark.parametrize("shift", [HOUR, -HOUR])
def test_driver_and_worker_clocks_that_are_wrong_by_an_hour_do_not_change_a_study(site: Site, shift: float) -> None:
    # The clocks of one driver and of one worker are wrong, in opposite directions.
    site.restart_worker(0, clock=-shift)
    site.slow_down(0.1)  # so that chains are met in their midst, however slow the looking is
    ahead = Trial(site, "full").start(clock=shift)
    right = Trial(site, "halving", round=ahead.task.round).start()
    began = len(raw(site))
    # A chain is lost of which its own clock has dated a part. It may end just before the kill: then once more.
    while not (lost := losses(site, began)):
        until(lambda: has_reported(site, site.workers[0].address), "the worker reports from the midst of a chain")
        address = site.workers[0].address
        site.restart_worker(0, clock=-shift)
        until(lambda: not chains_on(site, address), "the worker is missed")  # noqa: B023  # called at once
    site.slow_down(None)
    assert ahead.finish() == right.finish() == 0
    ahead.check()
    right.check()
    since = facts(site)[began:]
    assert not [f for f in since if f["type"] == "DriverLeft" and f["reason"] == "gone"]
    assert max(lost) < HOUR / 2
    site.restart_worker(0)


@pytest.mark.slow
def test_a_stage_that_always_kills_its_process_fails_only_the_trials_below_it(site: Site) -> None:
    started, failed = site.started.total(), counted(site, "StageFailed")
    trial = Trial(site, trials=6, poison=(0, 1)).start()
    trial.finish()
    found = json.loads(trial.task.found.read_text())
    expected = json.loads(trial.undisturbed().read_text())
    assert [mine[0] for mine in found] == [theirs[0] for theirs in expected]
    poisoned = [mine for mine in found if mine[0]["poison"] == 1]
    assert 0 < len(poisoned) < len(found)
    for mine, theirs in zip(found, expected, strict=True):
        if mine in poisoned:
            assert mine[1] == "FAIL"
            assert "3 workers died in a row while training from step 24" in mine[4] and "poison=1" in mine[4]
            attempts = re.findall(r"worker (tcp://127\.0\.0\.1:\d+) died", mine[5])
            assert len(attempts) == 3
            assert mine[5].count("its training process was killed by SIGKILL") == 3
        else:
            assert mine == theirs
    assert not oracles.check_journal(raw(site))
    assert counted(site, "StageFailed") > failed
    assert site.started.total() - started == 1  # the driver: no worker dies with its training
