"""A gang of processes trains with the bits of one; its leader reports what happens in any of them."""

from __future__ import annotations

import errno
import os
import random
import re
import socket
from contextlib import nullcontext
from functools import cache
from typing import Any, NoReturn

import pytest

from hpstage.checkpoints.stage_log import StageLog
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import GangApart, GangLost, NonFiniteLoss, StateError, StopTraining, UsageError
from hpstage.plan.facts import StateKey
from hpstage.torch.elastic.shared_memory import Reader
from hpstage.trainable import Bundling, Elastic
from hpstage.training.step_log import Recorder, recording
from hpstage.training.trainables import as_trainable
from tests.torch.elastic.cases import ALL, CASES, COUNTERS, FAULTS, LOGGING, STEPS, Nodes, hp_at
from tests.torch.elastic.followers import TIMEOUT, Followers, key_of, trained

pytestmark = pytest.mark.sampled(8)


@cache
def alone(case: str, stop: int = STEPS) -> str:
    return digest(trained(case, stop=stop).state_dict())


def widths(seed: int) -> list[tuple[int, int]]:
    """Draw how many processes train up to which step: some begin as one, widen, and become narrow again."""
    drawn = random.Random(seed)
    cuts = sorted(drawn.sample(range(1, STEPS), drawn.randint(1, 3)))
    return [(drawn.choice([1, 2, 2, 4]), stop) for stop in (*cuts, STEPS)]


def in_gangs(followers: Followers, case: str, plan: list[tuple[int, int]]) -> str:
    """Train with so many processes up to such steps; all are in the same state at each dismissal."""
    trainable, start = trained(case, stop=0), 0
    for size, stop in plan:
        if size == 1:
            trained(case, start, stop, trainable)
        else:
            with followers.gang(case, trainable, start, size) as others:
                trained(case, start, stop, trainable)
                trainable.dismiss("here")
                expected = {"word": "here", "digest": digest(trainable.state_dict())}
                assert [other.answer() for other in others] == [expected] * (size - 1)
        start = stop
    return digest(trainable.state_dict())


def test_a_trainable_with_virtual_nodes_is_elastic_and_not_stackable() -> None:
    assert isinstance(as_trainable(Nodes()), Elastic)
    assert not isinstance(as_trainable(Nodes()), Bundling)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ci_one_in(2)
def test_a_gang_that_is_widened_and_narrowed_again_gives_the_bits_of_one_worker(
    followers: Followers, case: str
) -> None:
    assert in_gangs(followers, case, [(1, 3), (2, 7), (1, STEPS)]) == alone(case)


@pytest.mark.ci
@pytest.mark.parametrize("case", ["cnn", "bag"])
@pytest.mark.parametrize("which", ["own", "others"])
def test_a_gang_without_shared_memory_gives_the_bits_of_one_worker(
    followers: Followers, case: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is the leader's, or that of others, is not shared."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space is left")

    if which == "own":
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    else:
        monkeypatch.setattr(Reader, "can_read", lambda _: False)
    assert in_gangs(followers, case, [(2, STEPS)]) == alone(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["cnn", "bag"])
def test_one_process_per_virtual_node_gives_the_bits_of_one_worker(followers: Followers, case: str) -> None:
    assert in_gangs(followers, case, [(4, STEPS)]) == alone(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_how_the_size_of_a_gang_changes(followers: Followers, case: str, seed: int) -> None:
    assert in_gangs(followers, case, widths(seed)) == alone(case)


def error_of(trainable: Any) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # its type is compared by the caller
        trained("", 1, 4, trainable)
    return raised.value


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_a_virtual_node_is_raised_as_without_a_gang(followers: Followers, fault: str) -> None:
    single, trainable = trained(fault, stop=1), trained(fault, stop=1)
    expected = error_of(single)
    with followers.gang(fault, trainable, 1, 2) as others:
        found = error_of(trainable)
        if fault == "one that cannot be pickled":
            assert str(expected) in str(found)
        else:
            assert type(found) is type(expected)
            assert str(found) == str(expected)
            assert isinstance(found, ValueError | StopTraining | NonFiniteLoss)
        # What a step that has failed leaves behind is kept as well, where training has ended with it.
        assert digest(trainable.state_dict()) == digest(single.state_dict())
        trainable.dismiss("")
        assert others[0].answer() == {"word": "", "digest": ""}


@pytest.mark.parametrize("whose", COUNTERS)
def test_the_leader_refuses_attributes_that_any_virtual_node_changes(followers: Followers, whose: str) -> None:
    trainable = trained(whose, stop=0)
    with followers.gang(whose, trainable, 0, 2) as others:
        trained(whose, 0, 1, trainable)
        with pytest.raises(StateError, match=r"^self changes in training, and each of 4 virtual nodes"):
            trainable.state_dict()
        trainable.dismiss("")
        assert others[0].answer()["word"] == ""


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_gang_that_lost_a_follower_continues_exactly_from_a_checkpoint(followers: Followers, size: int) -> None:
    trainable = trained("cnn", stop=3)
    with followers.gang("cnn", trainable, 3, size) as others:
        trained("cnn", 3, 5, trainable)
        others[-1].kill()
        with pytest.raises(GangLost, match=f"a process of a gang of {size} is gone"):
            trained("cnn", 5, STEPS, trainable)
        trainable.dismiss("")
        assert [other.answer()["error"] for other in others[:-1]] == ["GangLost"] * (size - 2)
    trainable.setup(hp_at(0))
    trainable.load_state_dict(followers.store.load(key_of("cnn", 3)))
    with followers.gang("cnn", trainable, 3, 2) as others:
        trained("cnn", 3, STEPS, trainable)
        trainable.dismiss("there")
        assert others[0].answer() == {"word": "there", "digest": alone("cnn")}
    assert digest(trainable.state_dict()) == alone("cnn")


@pytest.mark.slow
def test_followers_of_a_killed_leader_become_free(followers: Followers) -> None:
    leader, other = followers.first(2)
    key = "killed"
    leader.send(lead=True, case="cnn", key=key, size=2)
    other.send(case="cnn", key=key, address=leader.answer(), rank=1, size=2)
    assert leader.answer() == "formed"
    leader.kill()
    assert other.answer()["error"] == "GangLost"


def test_a_gang_that_does_not_meet_is_reported_and_its_leader_trains_without_it() -> None:
    trainable = trained("cnn", stop=2)
    address = trainable.open_gang("127.0.0.1")
    with pytest.raises(GangApart) as apart:
        trainable.lead(2, 0.2)
    place = address.partition("/")[0]
    assert re.search(rf"did not meet at {place} within 0.2 seconds.*, 1 did not come", str(apart.value))
    assert "Open the ports" in str(apart.value)
    assert "--interface" in str(apart.value)
    assert digest(trained("cnn", 2, STEPS, trainable).state_dict()) == alone("cnn")


def test_the_error_for_an_unreachable_leader_names_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        with pytest.raises(GangApart, match=rf"cannot be reached at 127.0.0.1, port {port}, from .* Open the ports"):
            trained("cnn", stop=1).follow(f"127.0.0.1:{port}/00", 1, 2, TIMEOUT)


def test_followers_do_not_wait_for_a_leader_that_cancelled_its_gang() -> None:
    leader = trained("cnn", stop=1)
    address = leader.open_gang("127.0.0.1")
    leader.dismiss("")
    with pytest.raises(GangApart, match="cannot be reached"):
        trained("cnn", stop=1).follow(address, 1, 2, TIMEOUT)


def test_the_error_for_a_missing_network_interface_names_its_address() -> None:
    with pytest.raises(GangApart, match=r"cannot listen on 192\.0\.2\.1 for a gang"):
        trained("cnn", stop=1).open_gang("192.0.2.1")


def test_a_gang_is_refused_if_its_processes_are_in_different_states(followers: Followers) -> None:
    trainable = trained("cnn", stop=2)
    key = StateKey("another")
    followers.store.save(key, trained("cnn", stop=1).state_dict(), step=1, parent=None)
    (other,) = followers.first(1)
    other.send(case="cnn", key=key, address=trainable.open_gang("127.0.0.1"), rank=1, size=2)
    with pytest.raises(GangApart, match=r"not in the same state: process 0 is at sample 16, .* process 1 at sample 8"):
        trainable.lead(2, TIMEOUT)
    assert other.answer()["error"] == "GangApart"
    assert digest(trained("cnn", 2, STEPS, trainable).state_dict()) == alone("cnn")


@pytest.mark.parametrize("size", [3, 8])
def test_a_gang_whose_size_is_no_power_of_two_or_exceeds_the_virtual_nodes_is_refused(size: int) -> None:
    trainable = trained("cnn", stop=1)
    trainable.open_gang("127.0.0.1")
    with pytest.raises(UsageError, match=f"a gang of {size} cannot train 4 virtual nodes"):
        trainable.lead(size, TIMEOUT)


def test_the_seconds_that_one_process_would_need_are_estimated_with_and_without_a_gang(followers: Followers) -> None:
    trainable = trained("cnn", stop=2)
    assert trainable.shared_seconds() > 0
    assert trainable.shared_seconds() == 0
    with followers.gang("cnn", trainable, 2, 2):
        trained("cnn", 2, 4, trainable)
        assert trainable.shared_seconds() > 0
        trainable.dismiss("")
        followers.first(1)[0].answer()


def test_followers_know_all_cases_of_these_tests() -> None:
    assert ALL.keys() == CASES.keys() | FAULTS.keys() | COUNTERS.keys() | LOGGING.keys()


@pytest.mark.ci
def test_logs_do_not_depend_on_the_number_of_processes_in_a_gang(followers: Followers) -> None:
    def logged(size: int) -> StageLog | None:
        trainable, recorder = trained("logging", stop=2), Recorder(2)
        with followers.gang("logging", trainable, 2, size) if size > 1 else nullcontext([]) as others:
            for step in range(2, STEPS):
                recorder.step = step
                with recording(recorder):
                    trainable.train(step, hp_at(step))
            trainable.dismiss("")
            assert all(other.answer() for other in others)
        return recorder.take(STEPS)

    alone = logged(1)
    assert alone is not None
    assert alone.series.keys() == {"train_loss", "first"}
    assert alone.series["train_loss"].steps == list(range(2, STEPS))
    assert logged(2) == logged(4) == alone
