"""The tables of accounting against what the plan counts as it folds the same facts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.accounting.accounting import Accounting
from hpstage.accounting.sums import Sums
from hpstage.plan.facts import Fact, StateReached
from hpstage.plan.log import read_facts
from hpstage.plan.plan import SearchPlan
from hpstage.report.account import Account
from tests.unit.accounting.record import RECORDINGS, recorded
from tests.unit.plan.journals import journal
from tests.unit.searches import WORKLOAD


def compare(account: Account, mine: Accounting) -> None:
    plan = account.plan
    for study, tally in plan.tallies.items():
        sums = mine.tally(study).sums
        for each in fields(Sums):
            assert getattr(sums, each.name) == pytest.approx(getattr(tally.totals, each.name), abs=1e-4), each.name
        assert mine.alone_seconds(study) == pytest.approx(tally.totals.alone_seconds(plan.totals), abs=1e-4)
        assert mine.presence.seconds(study) == pytest.approx(plan.presence.seconds(study))
        record = plan.searches.get(study)
        if record is not None:
            for each in fields(Sums):
                before = getattr(mine.tally(study).before, each.name)
                assert before == pytest.approx(getattr(record.before, each.name), abs=1e-4), each.name
            assert mine.tally(study).paid_before == pytest.approx(record.paid_before)
    assert mine.presence.seconds() == pytest.approx(plan.presence.seconds())
    whole = mine.whole()
    for name in ("steps_asked", "steps_unique", "steps_trained", "steps_wasted", "worker_seconds"):
        assert getattr(whole, name) == pytest.approx(getattr(plan.totals, name), abs=1e-4), name
    for id, trial in plan.trials.items():
        row = mine.trials.get(id)
        counts = (row.asked, row.answered, row.fresh) if row else (0, 0, 0)
        assert counts == (trial.asked, trial.answered, trial.fresh)
        assert (row.targets if row else ()) == trial.targets
        assert math.isclose(row.paid_seconds if row else 0.0, trial.paid_seconds, abs_tol=1e-6)
    for node in plan.nodes:
        assert [*mine.first_askers(node, node.start, node.reach)] == [
            *plan.payments.askers(node, node.start, node.reach)
        ]
        assert mine.front(node.id) == account.trained.get(node.id, 0)
        assert mine.fails_at(node.id) == account.fails_at(node.id)
    key = lambda fact: (fact.node, fact.step, fact.evaluating)  # noqa: E731
    assert sorted(map(key, mine.failures())) == sorted(map(key, account.failures()))
    # A request beyond an end of training is one of the state there: this was not noted before.
    if not plan.endings.ended:
        assert account.targeted == {id: request.first for id, request in mine.requests.items() if request.first}
    assert mine.now == account.now


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """Trials have one study for good, as where they are proposed before anything is requested of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchPlan, "study_of", lambda plan, trial: trial.rpartition("/")[0])
        yield


@given(st.integers(0, 2**32), st.integers(10, 300), st.booleans())
def test_random_journals(seed: int, length: int, sharing: bool) -> None:
    account = Account(SearchPlan(WORKLOAD, sharing=sharing))
    mine = Accounting(account.plan)
    for fact in journal(seed, length, sharing=sharing):
        waiting = mine.requests[fact.node, fact.step].waiting if _is_evaluation(fact, mine) else None
        charge = account.apply(fact)
        paid = mine.apply(fact)
        if waiting and paid is not None and charge is not None and paid.trial != charge.trial:
            return  # the driver of the first that waits was gone
        assert [(one.trial, one.seconds) for one in (charge,) if one] == [
            (one.trial, one.seconds) for one in (paid,) if one
        ]
    compare(account, mine)


def _is_evaluation(fact: Fact, mine: Accounting) -> bool:
    return isinstance(fact, StateReached) and fact.start == fact.step and (fact.node, fact.step) in mine.requests


@pytest.mark.parametrize("name", [recording.__name__ for recording in RECORDINGS])
@pytest.mark.parametrize("behind", [False, True])
def test_recorded_journals(name: str, behind: bool) -> None:
    facts: list[Fact] = [*read_facts(recorded(name))]
    account = Account(SearchPlan(facts[0].workload, sharing=facts[0].described.get("sharing") != "off"))  # type: ignore[union-attr]
    mine = Accounting(account.plan)
    for fact in facts:
        account.apply(fact)
        if not behind:
            mine.apply(fact)
    if behind:
        for fact in facts:
            mine.apply(fact)
    compare(account, mine)
