"""The tables of accounting: the same at whatever pace they are folded, and as counted from the whole plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.accounting.account import new_account
from hpstage.accounting.accounting import Accounting, accounted
from hpstage.accounting.savings import merged, seconds_alone
from hpstage.plan.facts import Fact, PlanCreated
from hpstage.plan.log import open_existing_plan, read_facts, shares
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot import snapshot_of
from hpstage.store import MemoryJournal
from tests.unit.accounting.record import RECORDINGS, recorded
from tests.unit.plan.journals import journal

NAMES = [recording.__name__ for recording in RECORDINGS]


@pytest.fixture(autouse=True, scope="module")
def one_study_for_good() -> Iterator[None]:
    """Of each trial, as where it is proposed before anything is requested of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchPlan, "study_of", lambda plan, trial: trial.rpartition("/")[0])
        yield


def folded(facts: Sequence[Fact], behind: int, *, sharing: bool | None = None) -> Accounting:
    """Fold facts into a plan, and so many facts later into its tables."""
    created = facts[0]
    assert isinstance(created, PlanCreated)
    plan = SearchPlan(created.workload, sharing=shares(created) if sharing is None else sharing)
    found = Accounting(plan)
    for number, fact in enumerate(facts):
        plan.apply(fact)
        if number >= behind:
            found.apply(facts[number - behind])
    for fact in facts[max(0, len(facts) - behind) :]:
        found.apply(fact)
    return found


def tables(accounting: Accounting) -> dict[str, object]:
    return {
        "tallies": {study: asdict(tally) for study, tally in accounting.tallies.items()},
        "trials": accounting.trials,
        "nodes": {
            id: (
                row.reach,
                row.front,
                row.trained,
                row.seconds,
                [(stop, trial.id) for stop, trial in row.requesters or ()],
            )
            for id, row in accounting.nodes.items()
        },
        "requests": accounting.requests,
        "paid": {study: accounting.presence.seconds(study) for study in (None, *accounting.tallies)},
        "calls": accounting.calls,
        "failures": accounting.failures(),
        "audits": accounting.audits,
    }


def check_against_the_plan(accounting: Accounting) -> None:
    """Compare sums, which are updated fact by fact, with what all trials of the plan come to."""
    plan, whole = accounting.plan, accounting.whole()
    together = merged(plan)
    assert (whole.steps_asked, whole.steps_unique) == (together.steps_asked, together.steps_unique)
    assert whole.steps_trained == plan.totals.steps_trained
    assert whole.worker_seconds == pytest.approx(plan.totals.worker_seconds, abs=1e-3)
    for study, tally in accounting.tallies.items():
        mine = [trial for id, trial in plan.trials.items() if plan.study_of(id) == study]
        together = merged(plan, mine)
        assert (tally.sums.steps_asked, tally.sums.steps_unique) == (together.steps_asked, together.steps_unique)
        rows = [accounting.trials[trial.id] for trial in mine if trial.id in accounting.trials]
        assert tally.sums.steps_first == sum(row.fresh for row in rows)
        assert tally.sums.worker_seconds == sum(row.charged_seconds for row in rows)
    for id, trial in plan.trials.items():
        if id in accounting.trials:
            row = accounting.trials[id]
            assert (row.requested, row.answered, row.targets) == (trial.requested, trial.answered, trial.targets)
            assert plan.study_of(id) == row.study


@pytest.mark.parametrize("name", NAMES)
def test_accounting_that_lags_behind_the_plan_ends_with_the_same_tables_as_without_lag(name: str) -> None:
    facts = [*read_facts(recorded(name))]
    at_once = folded(facts, 0)
    check_against_the_plan(at_once)
    for study in at_once.tallies:
        alone = sum(
            seconds_alone(at_once.plan, trial)
            for id, trial in at_once.plan.trials.items()
            if at_once.plan.study_of(id) == study
        )
        assert at_once.alone_seconds(study) == pytest.approx(alone, abs=1e-3)
    for behind in (1, 7, len(facts)):
        assert tables(folded(facts, behind)) == tables(at_once)


@given(st.integers(0, 2**32), st.integers(10, 300), st.booleans())
def test_sums_of_accounting_equal_those_counted_from_all_trials_of_a_random_journal(
    seed: int, length: int, sharing: bool
) -> None:
    accounting = folded(journal(seed, length, sharing=sharing), 0, sharing=sharing)
    plan = accounting.plan
    # These journals end training also before steps that have results, and a default may give a trial another line.
    if not plan.endings.ended and not plan._tree._equal:
        check_against_the_plan(accounting)


@pytest.mark.parametrize("name", ["several_studies", "endings"])
def test_accounting_of_an_opened_plan_counts_only_records_that_the_plan_has_read(name: str) -> None:
    records = recorded(name).read()
    store = MemoryJournal()
    store.append(records[: len(records) // 2])
    plan = open_existing_plan(store)
    store.append(records[len(records) // 2 :])  # by others: not yet folded
    found = accounted(plan, store)
    assert found.position == plan.position == len(records) // 2
    check_against_the_plan(found)


@pytest.mark.parametrize("name", ["several_studies", "population", "deaths"])
def test_an_account_from_a_snapshot_equals_the_account_from_the_whole_journal(name: str) -> None:
    records = recorded(name).read()
    plain, store = MemoryJournal(), MemoryJournal()
    plain.append(records)
    store.append(records[: len(records) // 2])
    store.write_snapshot(snapshot_of(open_existing_plan(store)))
    store.append(records[len(records) // 2 :])
    seen: list[Fact] = []
    one, other = new_account(plain), new_account(store)
    assert (one.plan.restored, other.plan.restored) == (0, len(records) // 2)
    one.catch_up(plain)
    other.catch_up(store, seen.append)
    assert seen == [*read_facts(store)] and tables(one) == tables(other)
    assert (one.charges, one.wastes, one.targets, one.chains) == (
        other.charges,
        other.wastes,
        other.targets,
        other.chains,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_finished_stages_never_falls_and_is_at_least_that_of_trained_nodes(name: str) -> None:
    facts = list(read_facts(recorded(name)))
    created = facts[0]
    assert isinstance(created, PlanCreated)
    plan = SearchPlan(created.workload, sharing=shares(created))
    found, done = Accounting(plan), [0]
    for fact in facts:
        plan.apply(fact)
        found.apply(fact)
        done.append(found.whole().stages_done)
    assert done == sorted(done)
    assert done[-1] >= sum(row.node.start < row.reach <= row.front for row in found.nodes.values()) > 0
