"""Real searches under a budget or on a full disk, and ``hpstage gc`` on what they leave."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from typer.testing import CliRunner, Result

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.evictable import kept_states
from hpstage.cli.app import app
from hpstage.driver.driver_leases import DriverLeases
from hpstage.errors import CheckpointError, StoreError, UsageError
from hpstage.errors.text import size
from hpstage.plan.facts import DriverJoined, StateKey, StateLost, StateReached, TrialEnded
from hpstage.plan.log import open_existing_plan, read_facts
from hpstage.plan.plan import SearchPlan
from hpstage.store import SQLiteJournal
from hpstage.store.redis import RedisJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate
from tests.redis_server import RedisServer

pytestmark = pytest.mark.sampled(4)

optuna.logging.set_verbosity(optuna.logging.ERROR)

STEPS = 16


class Bulky(Tape):
    """A state of 400 kB."""

    def state_dict(self) -> object:
        return {"tape": super().state_dict(), "bulk": self.digest.encode() * 6400}

    def load_state_dict(self, state):
        super().load_state_dict(state["tape"])


class Deadly(FolderCheckpoints):
    """To remove a checkpoint is the last that its process does."""

    def delete(self, key: StateKey) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def space(trial: optuna.Trial) -> dict[str, object]:
    a = s.piecewise({0: trial.suggest_int("a", 1, 2), 6: trial.suggest_int("late", 1, 3)})
    return {"a": a, "b": trial.suggest_categorical("b", [1.0, 2.0])}


def search(folder: Path, name: str = "x", trainable: Tape | None = None, **options: object) -> hpstage.Result:
    study = optuna.create_study(
        study_name=name,
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=3),
        storage=JournalStorage(JournalFileBackend(str(folder / f"{name}.log"))),
        load_if_exists=True,
    )
    settings = {"store": folder / "plan", "checkpoint_every": 2, "algorithm": SuccessiveHalving(4, 2)} | options
    return hpstage.optimize(
        study,
        Tape() if trainable is None else trainable,
        space,
        metric="score",
        steps=STEPS,
        n_trials=8,
        executor=hpstage.InlineExecutor(),
        **settings,  # type: ignore[arg-type]
    )


def outcome(result: hpstage.Result) -> list[tuple[object, ...]]:
    return [(t.params, t.state, t.value, t.intermediate_values) for t in result.study.trials]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[object, ...]]:
    return outcome(search(tmp_path_factory.mktemp("undisturbed")))


def keys_in(folder: Path, workload: str) -> set[StateKey]:
    return set(FolderCheckpoints(folder, workload, sweep=False).keys())


def best(result: hpstage.Result) -> set[StateKey]:
    """What no budget removes."""
    return {state.kept.key for state in result.plan.winners if state.kept is not None}


def plan_in(folder: Path) -> SearchPlan:
    with closing(SQLiteJournal(folder / "plan" / "plan.sqlite")) as journal:
        return open_existing_plan(journal)


def gc(*words: object) -> Result:
    return CliRunner().invoke(app, ["gc", *map(str, words)])


def row(output: str, name: str) -> tuple[int, float]:
    """Checkpoints and bytes in the table's row, to a tenth of the unit."""
    [line] = [line for line in output.splitlines() if line.startswith(name)]
    count, figure, unit = line.replace(",", "").split()[-3:]
    return int(count), float(figure) * {"bytes": 1.0, "kB": 1e3, "MB": 1e6}[unit]


# --- searches ---------------------------------------------------------------------------------------------


def test_a_small_checkpoint_budget_is_respected_and_does_not_change_the_study(tmp_path, undisturbed) -> None:
    budget = 1_000
    result = search(tmp_path, checkpoint_budget="1 kB")
    assert outcome(result) == undisturbed
    plan = result.plan
    validate(plan)
    assert result.savings.kept_bytes == plan.kept_bytes <= budget
    assert re.search(rf"checkpoints kept +{len(plan.kept)} \({size(plan.kept_bytes)}\)", str(result.savings))
    assert keys_in(tmp_path / "plan" / "checkpoints", plan.workload) == set(plan.kept)
    # At every moment, by the journal: what fits, or what is needed and the state being written.
    again = SearchPlan(plan.workload)
    for fact in result.journal:
        again.apply(fact)
        if isinstance(fact, StateReached):
            needed = sum(state.bytes for state in kept_states(again) if state.needed)
            largest = max([state.bytes for state in kept_states(again)], default=0)
            assert again.kept_bytes <= max(budget, needed + largest)
    assert {(fact.reason, fact.message) for fact in result.journal if isinstance(fact, StateLost)} == {
        ("evicted", "checkpoints took more than their budget")
    }


def test_the_search_plan_records_the_final_state_step_and_value_of_each_trial(tmp_path: Path) -> None:
    result = search(tmp_path)
    ended = {fact.trial: fact for fact in result.journal if isinstance(fact, TrialEnded)}
    assert len(ended) == 8 and ended == result.plan.ended
    for trial in result.study.trials:
        fact = ended[result.trial_id(trial.number)]
        assert fact.state == trial.state.name and fact.step == max(trial.intermediate_values)
        assert fact.values == (trial.intermediate_values[fact.step],)


def test_a_resumed_search_records_the_end_of_every_trial_after_an_interrupt_in_a_callback(tmp_path: Path) -> None:
    class Stop(KeyboardInterrupt):
        pass

    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        raise Stop

    with pytest.raises(Stop):
        search(tmp_path, callbacks=[stop])
    before = plan_in(tmp_path).ended
    assert len(before) == 1
    result = search(tmp_path)
    assert len(result.plan.ended) == 8 and before.items() <= result.plan.ended.items()


@pytest.mark.parametrize("size", [-1, "", "20 quux", True])
def test_an_invalid_checkpoint_budget_is_refused_before_a_store_is_created(tmp_path: Path, size: object) -> None:
    with pytest.raises(UsageError, match="checkpoint_budget"):
        search(tmp_path, checkpoint_budget=size)
    assert not (tmp_path / "plan").exists()


# --- a full disk ------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB: the journal's write-ahead log alone takes up to 4."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("together", [False, True])
def test_a_search_evicts_checkpoints_and_continues_when_the_disk_is_full(
    tmp_path: Path, small_disk: Path, together: bool, undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    store = small_disk / "plan" if together else tmp_path / "plan"
    with caplog.at_level(logging.WARNING, "hpstage"):
        result = search(
            tmp_path, trainable=Bulky(), store=store, checkpoints=small_disk / "checkpoints", checkpoint_every=1
        )
    assert outcome(result) == undisturbed
    assert "The disk is full" in caplog.text
    assert any("disk is full" in fact.message for fact in result.journal if isinstance(fact, StateLost))
    assert keys_in(small_disk / "checkpoints", result.plan.workload) == set(result.plan.kept)


def test_a_search_raises_an_error_if_the_disk_is_too_small_for_a_checkpoint(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (7900 << 10))
    with pytest.raises(CheckpointError, match="No space left"):
        search(tmp_path, trainable=Bulky(), checkpoints=small_disk / "checkpoints")


# --- hpstage gc -------------------------------------------------------------------------------------------


def test_gc_removes_orphaned_checkpoints_after_a_crash_between_journal_record_and_deletion(
    tmp_path: Path, undisturbed
) -> None:
    crashed = subprocess.run(
        [sys.executable, "-m", "tests.store.test_checkpoint_budget", str(tmp_path)],
        env=os.environ | {"HPSTAGE_LEASE_SECONDS": "3600"},  # whoever waited for its leases would hang
        timeout=120,
    )
    assert crashed.returncode == -signal.SIGKILL
    plan = plan_in(tmp_path)
    kept = set(plan.kept)
    folder = tmp_path / "checkpoints"
    orphans = keys_in(folder, plan.workload) - kept
    assert orphans and kept <= keys_in(folder, plan.workload)
    with closing(SQLiteJournal(tmp_path / "plan" / "plan.sqlite")) as journal:
        records = journal.read()
    words = [tmp_path / "plan", "--checkpoints", folder]
    tried = gc(*words, "--dry-run")
    assert tried.exit_code == 0, tried.output
    assert row(tried.output, "would be removed: not recorded in the plan")[0] == len(orphans)
    assert "would be removed from the plan: 1 dead driver" in tried.output and "Nothing was changed" in tried.output
    with closing(SQLiteJournal(tmp_path / "plan" / "plan.sqlite")) as journal:
        assert journal.read() == records
    assert keys_in(folder, plan.workload) == kept | orphans
    done = gc(*words)
    assert done.exit_code == 0, done.output
    assert row(done.output, "removed: not recorded in the plan")[0] == len(orphans)
    before, after = row(done.output, "before"), row(done.output, "after")
    assert before[0] - after[0] == len(orphans) and before[1] > after[1] > 0
    assert keys_in(folder, plan.workload) == kept == set(plan_in(tmp_path).kept)
    assert not plan_in(tmp_path).drivers
    # The search was not over: the checkpoints it needs have stayed, and the same call resumes from them.
    assert row(done.output, "of these, needed")[0] > 0
    assert outcome(search(tmp_path, checkpoints=folder)) == undisturbed


def test_gc_keeps_all_recorded_checkpoints_without_a_budget_and_the_best_with_budget_zero(tmp_path: Path) -> None:
    result = search(tmp_path)
    folder, workload = tmp_path / "plan" / "checkpoints", result.plan.workload
    kept = keys_in(folder, workload)
    assert gc(tmp_path / "plan").exit_code == 0
    assert keys_in(folder, workload) == kept
    tried = gc(tmp_path / "plan", "--budget", result.plan.kept_bytes // 2, "--dry-run")
    half = gc(tmp_path / "plan", "--budget", result.plan.kept_bytes // 2)
    assert row(tried.output, "would stay") == row(half.output, "after")
    assert 0 < len(keys_in(folder, workload)) < len(kept)
    assert row(half.output, "removed: over the budget")[0] == len(kept) - len(keys_in(folder, workload))
    done = gc(tmp_path / "plan", "--budget", 0)
    assert row(done.output, "after")[0] == len(best(result)) and keys_in(folder, workload) == best(result) != set()
    plan = plan_in(tmp_path)
    validate(plan)
    assert set(plan.kept) == best(result)
    longer = search(tmp_path, "y")  # trained again where a checkpoint is wanted, known where it is not
    assert outcome(longer) == outcome(result)


def test_an_interrupted_search_resumes_after_gc_removed_all_unneeded_checkpoints(tmp_path: Path, undisturbed) -> None:
    finished = 0

    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        nonlocal finished
        finished += 1
        if finished == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, callbacks=[stop])
    done = gc(tmp_path / "plan", "--budget", "0")
    assert row(done.output, "after") == row(done.output, "of these, needed") != (0, 0)
    assert outcome(search(tmp_path)) == undisturbed


def test_gc_keeps_unrecorded_checkpoints_while_a_driver_is_running(tmp_path: Path) -> None:
    result = search(tmp_path)
    store = FolderCheckpoints(tmp_path / "plan" / "checkpoints", result.plan.workload)
    store.save(StateKey("ab" * 16), {"x": 1}, step=1, parent=None)
    with closing(SQLiteJournal(tmp_path / "plan" / "plan.sqlite")) as journal:
        leases = DriverLeases(journal, "alive")  # type: ignore[arg-type]
        joined: DriverJoined = leases.enter("other", "other", "pool", "", [])
        import msgspec

        journal.append([msgspec.json.encode(joined)])
        done = gc(tmp_path / "plan", "--budget", 0)
        leases.close()
    assert row(done.output, "left: a running driver may record them")[0] == 1 and "running drivers: 1" in done.output
    assert set(store.keys()) == {"ab" * 16} | best(result), "what a record names may go nevertheless"
    done = gc(tmp_path / "plan")  # the driver has given its lease back without a word
    assert done.exit_code == 0 and row(done.output, "after")[0] == len(best(result))


def test_gc_keeps_damaged_checkpoints_and_those_of_other_workloads(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    result = search(tmp_path, checkpoints=shared)
    other = FolderCheckpoints(shared, "another workload")
    other.save(StateKey("cd" * 16), {"x": 1}, step=1, parent=None)
    other.save(StateKey("ef" * 16), {"x": 1}, step=1, parent=None)
    Path(other.unpack(StateKey("ef" * 16)), "manifest.json").write_text("{")
    done = gc(tmp_path / "plan", "--checkpoints", shared, "--budget", "0")
    assert done.exit_code == 0
    assert row(done.output, "left: of other workloads")[0] == 1 and row(done.output, "left: damaged")[0] == 1
    assert keys_in(shared, result.plan.workload) == {"cd" * 16, "ef" * 16} | best(result)


def test_gc_removes_temporary_files_of_dead_writers_except_in_a_dry_run(tmp_path: Path) -> None:
    result = search(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    store = FolderCheckpoints(tmp_path / "plan" / "checkpoints", result.plan.workload)
    with store._aside() as aside:
        name = aside.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-")
    left = store.path / ".tmp" / name
    left.mkdir(parents=True)
    (left / "state").write_bytes(b"x" * 5000)
    assert "5.0 kB" in gc(tmp_path / "plan", "--dry-run").output and left.exists()
    assert "leftovers of dead writers removed: 1" in gc(tmp_path / "plan").output and not left.exists()


def test_checkpoints_of_keep_at_are_removed_by_gc_with_budget_zero_but_by_no_search(tmp_path: Path) -> None:
    result = hpstage.optimize(
        optuna.create_study(study_name="kept", direction="maximize"),
        Tape(),
        lambda trial: {"a": 1, "keep_at": [3, 5]},
        metric="score",
        steps=8,
        n_trials=1,
        checkpoint_budget=1,
        executor=hpstage.InlineExecutor(),
        store=tmp_path,
    )
    assert sorted(state.step for state in result.plan.kept.values()) == [3, 5, 8]
    assert "removed: over the budget" in gc(tmp_path).output
    assert sorted(state.step for state in hpstage.open(tmp_path).plan.kept.values()) == [3, 5, 8]
    assert gc(tmp_path, "--budget", 0).exit_code == 0
    assert [state.step for state in hpstage.open(tmp_path).plan.kept.values()] == [8], "the best trial's stays"


def test_gc_refuses_a_folder_without_a_plan(tmp_path: Path) -> None:
    assert isinstance(gc(tmp_path).exception, StoreError) and not list(tmp_path.iterdir())
    SQLiteJournal(tmp_path / "plan.sqlite").close()
    assert "not the journal of a search plan" in str(gc(tmp_path).exception)
    assert isinstance(gc(tmp_path, "--budget", "much").exception, UsageError)
    assert "checkpoints=" in str(gc("redis://127.0.0.1:1?prefix=x").exception)


def test_the_gc_command_prints_an_error_in_one_line_and_exits_with_1(tmp_path: Path) -> None:
    script = "import sys; from hpstage.cli.app import main; sys.argv[0] = 'hpstage'; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "gc", tmp_path / "none"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("hpstage: there is no plan in ") and done.stderr.count("\n") == 1


@pytest.mark.redis
def test_gc_removes_checkpoints_of_a_plan_on_a_redis_server(tmp_path: Path, shared_redis: RedisServer) -> None:
    url = f"{shared_redis.url}?prefix=budget-test"
    result = search(tmp_path, store=url, checkpoints=tmp_path / "checkpoints")
    with closing(RedisJournal(shared_redis.url, prefix="budget-other")) as other:
        other.append([b"a record"])
    for wrong in (shared_redis.url, f"{shared_redis.url}?prefix=nothing"):
        refused = gc(wrong, "--checkpoints", tmp_path / "checkpoints")
        assert isinstance(refused.exception, UsageError)
        assert "?prefix=budget-other" in str(refused.exception) and "?prefix=budget-test" in str(refused.exception)
    done = gc(url, "--checkpoints", tmp_path / "checkpoints", "--budget", "0")
    assert done.exit_code == 0, done.output
    assert row(done.output, "before")[0] == len(result.plan.kept)
    assert row(done.output, "after")[0] == len(best(result)) > 0
    with closing(RedisJournal(shared_redis.url, prefix="budget-test")) as journal:
        lost = sum(isinstance(fact, StateLost) for fact in read_facts(journal))
        assert lost == len(result.plan.kept) - len(best(result))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with closing(SQLiteJournal(place / "plan" / "plan.sqlite")) as own:
        from hpstage.plan.keys import workload_key
        from hpstage.training.identity.code_identity import code_identity
        from hpstage.training.identity.environment import describe

        described = {**code_identity(Tape()), "sharing": "on"}
        described |= {f"environment:{k}": v for k, v in describe(Tape()).described.items()}
        deadly = Deadly(place / "checkpoints", workload_key(described))
        search(place, checkpoints=deadly, checkpoint_budget=1_000)
