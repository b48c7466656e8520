"""A chain that several workers train: its leader reports, and the others stand where it has kept its state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hpstage.checkpoints import LiveCache
from hpstage.checkpoints.state_tree import digest
from hpstage.execution import gang
from hpstage.execution.control import Control
from hpstage.execution.flight import Gathering
from hpstage.execution.runner import ChainRunner
from hpstage.plan.facts import ChainId, NodeId, StateKey, WorkerId
from hpstage.plan.messages import Boundary, BoundaryReached, Chain, ChainEnded, Stage
from hpstage.schedule.forms import Constant
from hpstage.training.trainables import as_trainable
from tests.torch.elastic.cases import ALL, hp_at
from tests.torch.elastic.followers import Followers, trained

NODE = NodeId(1)
HP = hp_at(0)


def key(step: int, case: str = "cnn") -> StateKey:
    return StateKey(f"{case}_{step}".replace(" ", "_"))


def chain(start: int, *steps: int, workers: int = 1, case: str = "cnn", **settings: Any) -> Chain:
    """A chain that keeps and evaluates its state at these steps."""
    return Chain(
        id=ChainId(f"chain {start}"),
        source=key(start, case) if start else None,
        initial=HP,
        stages=(Stage(NODE, start, steps[-1], {n: Constant(v) for n, v in sorted(HP.items())}, b"", verify=True),),
        boundaries=tuple(Boundary(NODE, step, key(step, case), evaluate=True, keep=True) for step in steps),
        gang=tuple(WorkerId(f"follower {rank}") for rank in range(1, workers)),
        **settings,
    )


def runner(followers: Followers, case: str = "cnn") -> ChainRunner:
    trainable, live = as_trainable(ALL[case]()), LiveCache()
    return ChainRunner(trainable, followers.store, live, live.get, worker=WorkerId("leader"), clock=lambda: 0.0)


def run(followers: Followers, leader: ChainRunner, chain: Chain, case: str = "cnn") -> tuple[list[Any], list[Any]]:
    """Run a chain with its gang; return its reports, and the followers' answers."""
    reports: list[Any] = []
    others = followers.first(len(chain.gang))
    for report in leader.run(chain, Control()):
        if isinstance(report, Gathering):
            assert report.chain == chain.id
            for rank, other in enumerate(others, start=1):
                encoded = msgspec.json.encode(chain).decode()
                other.send(case=case, chain=encoded, address=report.address, rank=rank)
        else:
            reports.append(report)
    return reports, [other.answer() for other in others]


def expected(step: int, case: str = "cnn") -> str:
    trainable: Any = as_trainable(ALL[case]())
    trainable.setup(HP)
    for at in range(step):
        trainable.train(at, HP)
    return digest(trainable.state_dict())


@pytest.mark.ci
def test_the_leader_reports_for_its_gang_and_followers_continue_from_its_last_checkpoint(followers: Followers) -> None:
    leader = runner(followers)
    run(followers, leader, chain(0, 2))
    reports, answers = run(followers, leader, chain(2, 4, 6, workers=2))
    assert answers == [{}]
    assert [type(report) for report in reports] == [BoundaryReached, BoundaryReached, ChainEnded]
    assert reports[-1].outcome == "done"
    for report in reports[:-1]:
        reached = report.reached
        assert reached.workers == 2
        assert reached.alone_seconds > 0
        assert reached.kept is not None
        assert reached.metrics is not None
    assert reports[0].reached.source == "continued"
    assert digest(followers.store.load(key(6))) == expected(6)
    # The follower continues without loading anything, and without the leader.
    (other,) = followers.first(1)
    other.send(case="cnn", chain=msgspec.json.encode(chain(6, 8)).decode())
    verified = [report for report in other.answer() if report["type"] == "BoundaryReached"]
    assert verified[0]["reached"]["source"] == "continued"
    assert digest(followers.store.load(key(8))) == expected(8)


@pytest.mark.slow
def test_a_chain_that_loses_a_worker_resumes_exactly_from_its_last_checkpoint(
    followers: Followers,
) -> None:
    case = "adam"
    leader = runner(followers, case)
    run(followers, leader, chain(0, 1, case=case), case)
    lost = chain(1, 3, 7, workers=2, case=case)
    reports = []
    (other,) = followers.first(1)
    for report in leader.run(lost, Control()):
        if isinstance(report, Gathering):
            other.send(case=case, chain=msgspec.json.encode(lost).decode(), address=report.address, rank=1)
            continue
        reports.append(report)
        if isinstance(report, BoundaryReached):
            other.kill()
    assert [type(report) for report in reports] == [BoundaryReached, ChainEnded]
    ended = reports[-1]
    assert isinstance(ended, ChainEnded)
    assert ended.outcome == "lost"
    assert "a process of a gang of 2 is gone" in ended.message
    reports, answers = run(followers, leader, chain(3, 7, workers=2, case=case), case)
    assert answers == [{}]
    assert isinstance(reports[0], BoundaryReached)
    assert reports[0].reached.source == "live"
    assert digest(followers.store.load(key(7, case))) == expected(7, case)


def test_a_chain_trains_nothing_if_its_gang_does_not_meet(
    followers: Followers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "GATHER_SECONDS", 0.2)
    reports = list(runner(followers).run(chain(0, 2, workers=2), Control()))
    assert isinstance(reports[0], Gathering)
    ended = reports[-1]
    assert isinstance(ended, ChainEnded) and len(reports) == 2
    assert (ended.outcome, ended.wasted_steps) == ("apart", 0)
    place, _, key = reports[0].address.partition("/")
    assert f"did not meet at {place} within" in ended.message and key not in ended.message


def test_a_chain_that_is_stopped_while_it_waits_for_its_gang_ends_at_once(followers: Followers) -> None:
    control = Control()
    reports = []
    for report in runner(followers).run(chain(0, 2, workers=2), control):
        reports.append(report)
        control.stop()
    assert isinstance(reports[0], Gathering)
    ended = reports[-1]
    assert isinstance(ended, ChainEnded) and len(reports) == 2
    assert (ended.outcome, ended.wasted_steps) == ("stopped", 0)
    assert "dissolved before all had come" in ended.message


@pytest.mark.ci
def test_a_chain_that_is_closed_leaves_its_gang(followers: Followers) -> None:
    leader = runner(followers)
    run(followers, leader, chain(0, 2))
    running, (other,) = leader.run(chain(2, 4, 6, workers=2), Control()), followers.first(1)
    gathering = next(running)
    assert isinstance(gathering, Gathering)
    encoded = msgspec.json.encode(chain(2, 4, 6, workers=2)).decode()
    other.send(case="cnn", chain=encoded, address=gathering.address, rank=1)
    assert isinstance(next(running), BoundaryReached)
    running.close()
    assert other.answer() == {}
    assert digest(trained("cnn").state_dict())  # and the leader's process trains without a gang


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["a node of a follower", "an infinite loss", "one that ends training"])
def test_an_error_of_a_follower_ends_the_chain_like_an_error_of_the_leader(followers: Followers, fault: str) -> None:
    def outcome(workers: int) -> list[str]:
        leader = runner(followers, fault)
        run(followers, leader, chain(0, 1, case=fault), fault)
        reports, _ = run(followers, leader, chain(1, 5, workers=workers, case=fault, verify_new=True), fault)
        return [summary(report) for report in reports]

    assert outcome(2) == outcome(1)


def summary(report: Any) -> str:
    ending = getattr(report, "ending", None) or report
    failure = getattr(ending, "failure", None)
    return " ".join(
        str(part)
        for part in (
            type(report).__name__,
            type(ending).__name__,
            getattr(ending, "outcome", ""),
            getattr(ending, "step", ""),
            getattr(ending, "message", ""),
            failure and failure.summary,
        )
    )
