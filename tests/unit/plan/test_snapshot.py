"""A plan restored from its snapshot is the plan that was folded, field by field, and continues as that would."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import Fact, TrialAdded, TrialId, TrialProposed
from hpstage.plan.log import encode, fold_checked, open_plan
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot import TAG, Unusable, restored, snapshot_of, tag
from hpstage.plan.snapshot.columns import Content, Layout, slots_of
from hpstage.store.cursor import Cursor
from hpstage.store.memory import MemoryJournal
from tests.invariants import validate, validate_scheduler
from tests.unit.driver.test_one_order_of_facts import portrait
from tests.unit.plan.journals import journal
from tests.unit.searches import WORKLOAD, Search, trial
from tests.unit.searches import searches as random_searches

_DIGEST = 16


def folded(facts: Sequence[Fact], sharing: bool = True) -> SearchPlan:
    plan = SearchPlan(WORKLOAD, sharing=sharing)
    fold(plan, facts)
    return plan


def fold(plan: SearchPlan, facts: Sequence[Fact]) -> None:
    # What a journal gives back: every fact once more, as it was written.
    records = [encode(fact) for fact in facts]
    fold_checked(plan, records, plan.position, plan.apply)
    plan.cursor = plan.cursor.after(records)


def whole(plan: SearchPlan) -> object:
    """All of a plan that can be compared."""
    tree = plan._tree
    return (
        [
            (name, value)
            for name, value in portrait(plan)
            if name not in ("restored", "_targets", "verified", "audited", "parts")
        ],
        sorted(plan.verified),
        sorted(plan.audited),
        sorted((key, part.bytes, count) for key, (part, count) in plan.parts.items()),
        {
            driver: {target: state.ref for target, state in open.items()}
            for driver, open in plan.open_targets.by_driver.items()
        },
        [[child.id for child in node.children] for node in plan.nodes],
        (list(tree.milestones), tree.branch_points),
        sorted((node.id, key) for key, node in tree._siblings.items()),
        {names: {key: node.id for key, node in roots.items()} for names, roots in tree._roots.items() if roots},
        (tree.defaults, tree.lacking, {id: [root.id for root in equal] for id, equal in tree._equal.items()}),
        [*plan.trials, *plan.kept, *plan.ended, *plan.searches, *plan.drivers, *plan.chains],
        [state.ref for state in plan.winners],
        [plan.key(state.node, state.step) for node in plan.nodes for state in node.states.values()],
    )


@given(st.integers(), st.integers(1, 150), st.integers(0, 60), st.booleans())
def test_a_plan_restored_from_a_snapshot_and_continued_equals_the_plan_read_from_the_journal(
    seed, before, after, sharing
):
    facts = journal(seed, before + after, sharing=sharing)
    plan = folded(facts[:before], sharing)
    again = restored(snapshot_of(plan), WORKLOAD, sharing=sharing)
    assert again.cursor == plan.cursor and again.restored == len(facts[:before])
    assert repr(whole(again)) == repr(whole(plan))  # NaN is not equal to itself
    fold(again, facts[before:])
    fold(plan, facts[before:])
    assert repr(whole(again)) == repr(whole(plan)) == repr(whole(folded(facts, sharing)))
    assert repr(whole(restored(snapshot_of(again), WORKLOAD, sharing=sharing))) == repr(whole(plan))


def test_the_random_journals_contain_every_kind_of_fact() -> None:
    """Else it would show little."""
    seen = {type(fact) for seed in range(5) for fact in journal(seed, 300)}
    assert seen == set(Fact.__args__)


class Here(SimulatedExecutor):
    pool = "here"  # so that what two write is the same


@pytest.mark.ci
@given(random_searches(), st.data(), st.integers(0, 30))
def test_a_search_continues_identically_on_a_plan_restored_from_a_snapshot(trials, data, turns):
    """Interrupted at any moment, with chains running and targets open."""
    stops = data.draw(st.lists(st.integers(1, 8), min_size=len(trials), max_size=len(trials)))
    store = MemoryJournal()
    first = Search(Here(2, evaluate_seconds=0.5), store)
    first.driver.add(trials)
    for added, stop in zip(trials, stops, strict=True):
        first.driver.ask(added.trial, stop)
    for _ in range(turns):
        first.driver.wait(0.0)
    content = snapshot_of(first.plan)
    outcomes = []
    for snapshot in (None, content):
        copy = MemoryJournal()
        copy.append(store.read())
        if snapshot is not None:
            copy.write_snapshot(snapshot)
        kept = set(first.plan.kept)
        search = Search(Here(2, kept=kept, evaluate_seconds=0.5), copy)
        assert search.plan.restored == (len(store) if snapshot else 0)
        validate_scheduler(search.scheduler)
        search.driver.log.write([])
        answers = search.run([trial(100, {"a": s.constant(3), "b": s.constant(1)}, 8), *trials], [8, *stops])
        validate(search.plan)
        outcomes.append((answers, copy.read(), repr(whole(search.plan))))
    assert outcomes[0] == outcomes[1]


def test_snapshots_of_equal_plans_are_equal_and_start_with_their_version() -> None:
    facts = journal(1, 200)
    content = snapshot_of(folded(facts))
    assert content == snapshot_of(folded(facts)) and content.startswith(TAG)


def test_an_edit_of_the_code_of_plans_changes_the_version_tag_of_snapshots(tmp_path: Path) -> None:
    package = Path(hpstage.__path__[0])
    for folder in ("plan", "schedule", "report"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert tag(tmp_path) == tag(package) == TAG
    (tmp_path / "report" / "page.py").write_text("")
    assert tag(tmp_path) == TAG
    for name in ("plan/plan.py", "schedule/forms.py", "plan/snapshot/columns.py"):
        before = tag(tmp_path)
        (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
        assert tag(tmp_path) not in (before, TAG)


def test_a_plan_with_an_integer_of_more_than_64_bits_has_no_snapshot() -> None:
    facts = [*journal(3, 30), TrialProposed("study", 1, TrialId("study/1"), {}, params={"n": 2**70})]
    plan = folded(journal(3, 30))
    plan.searches.proposed[TrialId("study/1")] = facts[-1]
    with pytest.raises(Unusable, match="cannot be written"):
        snapshot_of(plan)


def test_a_plan_with_a_value_of_an_unknown_class_has_no_snapshot() -> None:
    plan = folded(journal(3, 30))
    plan.inputs["data"] = Path("data")  # type: ignore[assignment]
    with pytest.raises(Unusable, match=r"cannot be written \(a snapshot cannot hold a value of type PosixPath"):
        snapshot_of(plan)


# --- columns --------------------------------------------------------------------------------------------------


class Base:
    __slots__ = ("a",)


class Derived(Base):
    __slots__ = ("b",)


def again(layout: Layout, root: Any) -> Any:
    """Return an object as it is read after it was written."""
    encoded = msgspec.msgpack.encode(layout.write(root))
    return layout.read(msgspec.msgpack.decode(encoded, type=Content), len(encoded))


def test_slots_of_a_base_class_are_written_to_snapshots() -> None:
    derived = Derived()
    derived.a, derived.b = 1, "two"
    assert slots_of(Derived) == ["a", "b"]
    found = again(Layout({Derived: slots_of(Derived)}, ()), derived)
    assert (found.a, found.b) == (1, "two")


@pytest.mark.parametrize(
    "value",
    [
        [None] * 3,
        ["a", "".join(["a"])],
        [1, True, 1.0, 0.0, -0.0],
        [{}, {}],
        [{"a": 1, "b": 2.5}, {"a": None}, {}],
        [(), (1, "a"), ("b",)],
        [[], [{1}], {1: (None, True)}],
    ],
)
def test_values_in_a_snapshot_are_read_as_they_were_written(value: list[Any]) -> None:
    assert repr(again(Layout({}, ()), value)) == repr(value)


def test_mutable_objects_in_a_snapshot_are_one_object_after_reading_only_if_they_were_before() -> None:
    shared: list[int] = []
    first, second = again(Layout({}, ()), [shared, shared])
    assert first is second
    first, second = again(Layout({}, ()), [{}, {}])
    assert first is not second


def test_a_snapshot_with_a_value_repeated_too_often_is_refused() -> None:
    strings, batches, _ = Layout({}, ()).write(None)
    root = msgspec.Raw(msgspec.msgpack.encode((7, 2**40, (0, (1,)))))
    with pytest.raises(ValueError, match="repeated 1099511627776 times"):
        Layout({}, ()).read((strings, batches, root), 100)


# --- snapshots of no use --------------------------------------------------------------------------------------


@given(st.integers(), st.data())
def test_a_damaged_or_truncated_snapshot_is_unusable(seed, data):
    content = snapshot_of(folded(journal(seed, 60)))
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), content[:at], content + b"\0", content[at + 1 :]):
        with pytest.raises(Unusable):
            restored(damaged, WORKLOAD, sharing=True)


def test_a_snapshot_of_another_workload_is_unusable() -> None:
    content = snapshot_of(folded(journal(0, 60)))
    for workload, sharing in (("0" * 32, True), (WORKLOAD, False)):
        with pytest.raises(Unusable, match="another workload"):
            restored(content, workload, sharing=sharing)


def sealed(body: bytes) -> bytes:
    """A body as in a snapshot, its digest right."""
    return TAG + xxhash.xxh3_128_digest(body) + body


def changes(value: Any) -> Iterator[Any]:
    """The same value with one of its columns a little longer, shorter, or with another number in it."""
    if not isinstance(value, list):
        return
    for index, part in enumerate(value):
        for changed in changes(part):
            yield [*value[:index], changed, *value[index + 1 :]]
    if value and not isinstance(value[0], list | dict):
        yield value[:-1]
        yield [*value, value[-1]]
        if isinstance(value[0], int):
            yield from ([number, *value[1:]] for number in (-7, -1, 10**6, 2**63))


@pytest.mark.ci
def test_a_snapshot_with_altered_contents_is_restored_or_raises_unusable() -> None:
    plan = folded(journal(5, 120))
    body = snapshot_of(plan)[len(TAG) + _DIGEST :]
    header, contents = msgspec.msgpack.decode(body)
    outcomes = {True: 0, False: 0}
    for changed in changes(contents):
        try:
            restored(sealed(msgspec.msgpack.encode([header, changed])), WORKLOAD, sharing=True)
            outcomes[True] += 1
        except Unusable:
            outcomes[False] += 1
    assert outcomes[False] > 500


@pytest.mark.parametrize("kind", ["damaged", "truncated", "empty", "another history", "another version", "contradicts"])
def test_an_unusable_snapshot_is_ignored_and_the_plan_read_from_the_journal(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    facts = journal(7, 150)
    store = MemoryJournal()
    store.append([encode(fact) for fact in facts])
    plan = folded(facts[:100])
    content = snapshot_of(plan)
    match kind:
        case "damaged":
            content = content[:-3] + b"abc"
        case "truncated":
            content = content[: len(content) // 2]
        case "empty":
            content = b""
        case "another history":
            plan.cursor = Cursor().after([b"other"] * 100)
            content = snapshot_of(plan)
        case "another version":
            content = content.replace(b"hpstage-snapshot ", b"hpstage-snapshot-")
        case "contradicts":
            plan.totals.steps_trained += 1
            content = snapshot_of(plan)
    store.write_snapshot(content)
    with caplog.at_level(logging.INFO, "hpstage"):
        opened = open_plan(store, WORKLOAD, {})
    assert opened.restored == 0 and repr(whole(opened)) == repr(whole(folded(facts)))
    assert ["The plan's snapshot cannot be used" in message for message in caplog.messages] == [True]


def test_a_plan_is_opened_from_a_valid_snapshot_and_the_later_records(caplog: pytest.LogCaptureFixture) -> None:
    facts = journal(7, 150)
    store = MemoryJournal()
    store.append([encode(fact) for fact in facts])
    for position in (1, 100, 150):
        store.write_snapshot(snapshot_of(folded(facts[:position])))
        with caplog.at_level(logging.INFO, "hpstage"):
            opened = open_plan(store, WORKLOAD, {})
        assert opened.restored == position and repr(whole(opened)) == repr(whole(folded(facts)))
    assert not caplog.messages


def test_a_contradictory_record_after_a_snapshot_is_named_by_its_number() -> None:
    facts = journal(7, 60)
    store = MemoryJournal()
    store.append([encode(fact) for fact in facts])
    store.write_snapshot(snapshot_of(folded(facts)))
    store.append([encode(TrialAdded(TrialId("x"), {"a": s.constant(1)}, 8)), b'{"type":"TargetAsked","trial":"y"}'])
    with pytest.raises(Exception, match="record 61"):
        open_plan(store, WORKLOAD, {})
