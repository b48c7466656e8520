"""first draft"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpstage.store.redis_server import SOCKET_TIMEOUT
from tests.hosts.driver import RUNG
from tests.hosts.lab import WORKERS, Lab, until
from tests.hosts.network import NoNetwork

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def lab(redis_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    try:
        with Lab(tmp_path_factory.mktemp("hosts"), redis_program) as lab:
            yield lab
    except NoNetwork as reason:
        pytest.skip(str(reason))


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Do two chains train a step in common?"""
    return any(
        mine["node"] == theirs["node"] and mine["start"] < theirs["stop"] and theirs["start"] < mine["stop"]
        for mine in one["stretches"]
        for theirs in other["stretches"]
    )


def test_a_search_on_several_hosts_comes_to_what_it_comes_to_in_one_process(lab: Lab) -> None:
    plan = lab.plan("undisturbed")
    plan.hold(3, *WORKERS)
    plan.drive("head", seed=7)
    until(lambda: plan.holding(*WORKERS), "every host trains")
    plan.release(*WORKERS)
    plan.check()
    assert all(len(plan.processes(host)) == 1 for host in WORKERS)
    assert set(plan.trained().values()) == {1}


def test_a_worker_that_is_cut_off_is_replaced_and_used_again_when_it_is_back(lab: Lab) -> None:
    plan = lab.plan("worker")
    plan.hold(3, "w2")
    plan.hold(RUNG + 4, "w1", "w3")  # after the first rung
    plan.drive("head", seed=7)
    until(lambda: plan.holding("w2"), "it trains")
    lab["w2"].cut()
    [lost] = [chain for chain in plan.facts("ChainStarted") if lab["w2"].address in chain["worker"]]
    until(lambda: lost["chain"] in [fact["chain"] for fact in plan.facts("ChainClosed")], "it is given up")
    plan.release("w2")
    until(lambda: [state for state, times in plan.trained().items() if times > 1], "it trains what others have trained")
    until(lambda: plan.holding("w1", "w3"), "the first rung is full")
    later = plan.facts("ChainStarted")
    assert [chain for chain in later if chain["worker"] != lost["worker"] and overlap(chain, lost)]
    lab["w2"].heal()
    until(lambda: len(plan.processes("w2")) == 2, "its host trains again")
    plan.release("w1", "w3")
    plan.check()


def test_a_search_waits_for_a_store_that_is_cut_off(lab: Lab) -> None:
    plan = lab.plan("store")
    plan.hold(3, *WORKERS)
    driver = plan.drive("head", seed=7)
    until(lambda: plan.holding(*WORKERS), "every host trains")
    lab["store"].cut()
    written, trained = plan.records(), sum(plan.trained().values())
    plan.release(*WORKERS)
    until(lambda: sum(plan.trained().values()) >= trained + len(WORKERS), "workers train on")
    time.sleep(SOCKET_TIMEOUT + 1.0)  # nobody waits longer for an answer: connections are made anew
    assert plan.records() == written
    assert driver.popen.poll() is None
    lab["store"].heal()
    plan.check()
    assert len(plan.joined("head")) == 1
    assert set(plan.trained().values()) == {1}


@pytest.mark.parametrize("how", ["from everybody", "from the store"])
def test_a_driver_that_is_cut_off_is_taken_over_from_and_joins_again(lab: Lab, how: str) -> None:
    plan = lab.plan("driver " + how)
    plan.hold(3, *WORKERS)
    plan.drive("desk", seed=8)
    until(lambda: plan.holding(*WORKERS), "it trains on all workers")
    lost = plan.facts("ChainStarted")
    plan.drive("head", seed=7)
    until(lambda: plan.joined("head"), "another joins")
    [driver] = plan.joined("desk")
    assert {chain["driver"] for chain in lost} == {driver}
    if how == "from everybody":
        lab["desk"].cut()
    else:
        lab["store"].ignore(lab["desk"])
    until(lambda: [fact for fact in plan.facts("DriverLeft") if fact["driver"] == driver], "it is taken for dead")
    plan.hold(RUNG + 4, *WORKERS)  # its chains come to their ends, and the other's first rung is filled
    until(lambda: plan.holding(*WORKERS), "the other is in its second rung")
    taken = [chain for chain in plan.facts("ChainStarted") if chain["driver"] != driver]
    assert all(any(overlap(chain, other) for other in taken) for chain in lost)
    if how == "from everybody":
        lab["desk"].heal()
    else:
        lab["store"].heed(lab["desk"])
    until(lambda: len(plan.joined("desk")) == 2, "it joins again")
    plan.release(*WORKERS)
    plan.check()
