"""Several hosts for real: each a network namespace with an address and a host name of its own, on one bridge.

The whole of it, which needs root (two tests are in the default suite, the others are slow)::

    python -m pytest tests/hosts -m "slow or not slow"

By hand, a host is three commands, and a partition is one. Make the switch, then hosts as many as you like::

    ip netns add switch && ip -n switch link add name bridge0 type bridge && ip -n switch link set dev bridge0 up
    host() {  # host NAME ADDRESS
        ip netns add $1
        ip -n switch link add name port-$1 type veth peer name eth0 netns $1
        ip -n switch link set dev port-$1 master bridge0 up
        ip -n $1 address add $2/24 dev eth0; ip -n $1 link set dev eth0 up; ip -n $1 link set dev lo up
    }
    on() { name=$1; shift; ip netns exec $name unshare --uts sh -c 'hostname "$0" && exec "$@"' $name "$@"; }
    host store 10.0.0.1; host head 10.0.0.2; host w1 10.0.0.3; host w2 10.0.0.4

    on store redis-server --bind 10.0.0.1 --protected-mode no --appendonly yes &
    on head hpstage scheduler --host 10.0.0.2 --no-dashboard &
    on w1 hpstage worker tcp://10.0.0.2:8786 --nworkers 1 --host 10.0.0.3 &
    on w2 hpstage worker tcp://10.0.0.2:8786 --nworkers 1 --host 10.0.0.4 &
    # optimize(..., executor=Client("tcp://10.0.0.2:8786"), store="redis://10.0.0.1", checkpoints="a folder"):
    # namespaces share the disk, as hosts share NFS
    on head python search.py &

    ip -n switch link set dev port-w1 down   # w1 is cut off
    ip -n switch link set dev port-w1 up     # and back
    kill %5 %4 %3 %2 %1; for name in store head w1 w2 switch; do ip netns delete $name; done
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpstage.store.redis_server import SOCKET_TIMEOUT
from tests.hosts.driver import RUNG
from tests.hosts.lab import WORKERS, Lab, Plan, until
from tests.hosts.network import NoNetwork

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def lab(redis_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    try:
        with Lab(tmp_path_factory.mktemp("hosts"), redis_program) as lab:
            yield lab
    except NoNetwork as reason:
        pytest.skip(str(reason))


@pytest.fixture
def plan(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Plan]:
    with Plan(lab, request.node.name.replace(" ", "-")) as plan:
        yield plan


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Do two chains train a step in common?"""
    return any(
        mine["node"] == theirs["node"] and mine["start"] < theirs["stop"] and theirs["start"] < mine["stop"]
        for mine in one["spans"]
        for theirs in other["spans"]
    )


@pytest.mark.ci
def test_a_search_on_several_hosts_gives_the_same_study_as_in_one_process(plan: Plan) -> None:
    plan.hold(3, *WORKERS)
    plan.drive("head", seed=7)
    until(lambda: plan.holding(*WORKERS), "every host trains")
    plan.release(*WORKERS)
    plan.check()
    assert all(len(plan.processes(host)) == 1 for host in WORKERS)
    assert set(plan.trained().values()) == {1}


@pytest.mark.parametrize(
    "how",
    [pytest.param("for a while", marks=pytest.mark.ci), pytest.param("until it gives up", marks=pytest.mark.slow)],
)
def test_a_disconnected_worker_is_replaced_and_used_again_after_it_reconnects(lab: Lab, plan: Plan, how: str) -> None:
    plan.hold(3, "w2")
    plan.hold(RUNG + 4, "w1", "w3")  # in the second rung
    plan.drive("head", seed=7)
    until(lambda: plan.holding("w2"), "it trains")
    given_up = lab.workers["w2"].said.count("no scheduler at")
    lab["w2"].cut()
    [lost] = [chain for chain in plan.facts("ChainStarted") if lab["w2"].address in chain["worker"]]
    until(lambda: lost["chain"] in [fact["chain"] for fact in plan.facts("ChainClosed")], "its chain is given up")
    until(lambda: plan.holding("w1", "w3"), "the others have filled the first rung")
    taken = [chain for chain in plan.facts("ChainStarted") if chain["worker"] != lost["worker"]]
    assert any(overlap(chain, lost) for chain in taken)
    [zombie] = plan.processes("w2")
    late = plan.steps(zombie)
    plan.release("w2")
    until(lambda: plan.steps(zombie) > late, "it trains what others have trained")
    if how == "until it gives up":
        until(lambda: lab.workers["w2"].said.count("no scheduler at") > given_up, "it looks for its scheduler")
        assert f"{lab.scheduler} ()" not in lab.workers["w2"].said  # it says why
    lab["w2"].heal()
    until(lambda: len(plan.processes("w2")) == 2, "its host trains again")
    plan.release("w1", "w3")
    plan.check()


@pytest.mark.slow
def test_a_search_waits_for_a_disconnected_store(lab: Lab, plan: Plan) -> None:
    plan.hold(3, *WORKERS)
    driver = plan.drive("head", seed=7)
    until(lambda: plan.holding(*WORKERS), "every host trains")
    lab["store"].cut()
    written, trained = plan.records(), sum(plan.trained().values())
    plan.release(*WORKERS)
    until(lambda: sum(plan.trained().values()) >= trained + len(WORKERS), "workers train on")
    time.sleep(SOCKET_TIMEOUT + 1.0)  # nobody waits longer for an answer: connections are made again
    assert plan.records() == written
    assert driver.popen.poll() is None
    lab["store"].heal()
    plan.check()
    assert len(plan.joined("head")) == 1  # its lease had run out, but nobody took it
    assert set(plan.trained().values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["from all", "from all until it is forgotten", "from the store"])
def test_training_of_a_disconnected_driver_is_taken_over_and_the_driver_joins_again(
    lab: Lab, plan: Plan, how: str
) -> None:
    plan.shut("head")
    plan.drive("head", seed=7)
    until(lambda: plan.at_gate("head"), "it has joined")  # and tried an idle worker: it would wait for a busy one
    plan.hold(3, *WORKERS)
    plan.drive("desk", seed=8)
    until(lambda: plan.holding(*WORKERS), "the other trains on all workers")
    lost = plan.facts("ChainStarted")
    plan.open("head")
    [driver] = plan.joined("desk")
    assert {chain["driver"] for chain in lost} == {driver}
    forgotten = lab.dask.said.count("Remove client ClientOnce-hpstage-")
    if how == "from the store":
        lab["store"].ignore(lab["desk"])
    else:
        lab["desk"].cut()
    until(lambda: [fact for fact in plan.facts("DriverLeft") if fact["driver"] == driver], "it is taken for dead")
    if how == "from all until it is forgotten":
        until(
            lambda: lab.dask.said.count("Remove client ClientOnce-hpstage-") > forgotten, "Dask's scheduler gives it up"
        )
    plan.hold(RUNG + 4, *WORKERS)  # its chains come to their ends, and the other's first rung is filled
    until(lambda: plan.holding(*WORKERS), "the other is in its second rung")
    taken = [chain for chain in plan.facts("ChainStarted") if chain["driver"] != driver]
    assert all(any(overlap(chain, other) for other in taken) for chain in lost)
    lab["store" if how == "from the store" else "desk"].heal()
    until(lambda: len(plan.joined("desk")) == 2, "it joins again")
    plan.release(*WORKERS)
    plan.check()


@pytest.mark.slow
def test_a_search_resumes_after_the_host_of_its_driver_and_scheduler_reconnects(lab: Lab, plan: Plan) -> None:
    plan.hold(3, *WORKERS)
    plan.drive("head", seed=7)
    until(lambda: plan.holding(*WORKERS), "every host trains")
    removed = lab.dask.said.count("Remove worker addr")
    lab["head"].cut()
    until(lambda: lab.dask.said.count("Remove worker addr") == removed + len(WORKERS), "all workers are given up")
    lab["head"].heal()
    # They end in the midst of a step that does not.
    until(lambda: all(len(plan.held(host)) == 2 for host in WORKERS), "others train instead")
    plan.release(*WORKERS)
    plan.check()
    assert len(plan.joined("head")) == 1
