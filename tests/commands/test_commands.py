"""The commands that read a store, such as status and export, show what it holds and change nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import optuna
import pandas as pd
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.accounting.studies import StudyRow
from hpstage.cli.app import app
from hpstage.cli.status import PlanStatus, Status, as_text
from hpstage.driver.driver_leases import DriverLeases
from hpstage.errors import HpstageError, StoreError, UsageError
from hpstage.errors.text import clean
from hpstage.plan.facts import (
    ChainId,
    ChainStarted,
    DriverId,
    Fact,
    NodeId,
    SearchStarted,
    Span,
    TrialAdded,
    TrialId,
    TrialProposed,
    WorkerId,
)
from hpstage.report import frames
from hpstage.store import RedisJournal, SQLiteJournal
from hpstage.testing.toys import Failing
from tests.commands.stores import ask, output_of, run, write, write_in
from tests.redis_server import RedisServer
from tests.unit.searches import trial

pytestmark = pytest.mark.sampled(8)

optuna.logging.set_verbosity(optuna.logging.ERROR)

HOSTILE = "evil\x1b[31m\r\nna\u202eme\ud800"


def begin(study: str, identity: str = "id", **changes: object) -> SearchStarted:
    return SearchStarted(study, "FullTraining()", ("loss",), 8, 4, "RandomSampler", 0.0, identity=identity, **changes)  # type: ignore[arg-type]


@pytest.mark.ci
def test_status_without_a_store_lists_the_stores_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    none = run("status")
    assert none.exit_code != 0
    assert "STORE is missing; give one (.hpstage has no store)" in str(none.exception)
    for version in ("1", "2"):
        trainable = Failing()
        trainable.version = version  # type: ignore[misc]
        executor = hpstage.InlineExecutor()
        hpstage.optimize(
            optuna.create_study(),
            trainable,
            lambda trial: {"a": 1},
            metric="score",
            steps=2,
            n_trials=1,
            executor=executor,
        )
    folders = {f"{path}" for path in Path(".hpstage").iterdir()}
    assert len(folders) == 2
    title, *rows = output_of("status").splitlines()
    assert title.split() == ["store", "studies", "trials", "steps", "trained", "written"]
    lines = [row.split()[0] for row in rows]
    assert {*lines} == folders == {*status()}
    assert all(re.search(r"  1 complete +2 +[\d.]+ m?s ago$", row) for row in rows)
    later = time.time() + 60
    os.utime(Path(lines[-1]) / "plan.sqlite", (later, later))
    assert [row.split()[0] for row in output_of("status").splitlines()[1:]] == lines[::-1]
    (Path(lines[0]) / "plan.sqlite").write_bytes(b"")
    assert "is a database of something else" in output_of("status")
    watching = run("status", "--watch")
    assert "STORE is missing; give one (.hpstage has .hpstage" in str(watching.exception)


def status(*words: object) -> dict:
    return json.loads(output_of("status", *words, "--json"))


def content(folder: Path) -> dict[str, str]:
    """Everything in a folder but the auxiliary files of SQLite, whose presence says nothing."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


@pytest.mark.parametrize(
    ("state", "saved", "shown"),
    [
        ("running", -2.5, "nothing yet"),
        ("ended", -2.5, "nothing: 2.5 s more"),
        ("running", 3.6, "3.6 s of 0 s"),
    ],
)
def test_status_shows_a_loss_once_the_study_has_ended(state: str, saved: float, shown: str) -> None:
    sums = dict.fromkeys(PlanStatus.__struct_fields__, 0) | {"workload": "", "merge_rate": 1.0, "seconds_saved": saved}
    study = dict.fromkeys(StudyRow.__struct_fields__, 0) | {"study": "digits", "state": state, "seconds_saved": saved}
    row = msgspec.convert({**study, "algorithm": "", "trials": {}, "best": []}, StudyRow)
    text = as_text(Status(msgspec.convert(sums, PlanStatus), [], [row], [], []))
    assert re.search(rf"^saved +{shown}$", text, re.MULTILINE)
    assert text.splitlines()[-1 if state == "ended" else -3].endswith(
        {"nothing yet": " -", "nothing: 2.5 s more": " -2.5 s"}.get(shown, " 3.6 s")
    )


def test_status_shows_the_figures_of_the_result(searched: tuple[Path, hpstage.Result]) -> None:
    folder, result = searched
    found = status(folder)
    plan, studies = found["plan"], {study["study"]: study for study in found["studies"]}
    assert (
        plan["steps_asked"] == merged(result.plan).steps_asked
        and plan["steps_unique"] == merged(result.plan).steps_unique
    )
    assert plan["steps_trained"] == result.plan.totals.steps_trained
    assert plan["merge_rate"] == merged(result.plan).rate
    assert plan["seconds_used"] + plan["seconds_saved"] == plan["seconds_alone"]
    assert plan["seconds_used"] == pytest.approx(result.plan.totals.worker_seconds, abs=1e-3)
    assert (plan["checkpoints"], plan["checkpoint_bytes"]) == (len(result.plan.kept), result.plan.kept_bytes)
    mine = studies["first"]
    assert mine["state"] == "ended"
    states = [t.state.name for t in result.study.trials]
    assert mine["trials"] == {state: states.count(state) for state in sorted(set(states))} and "FAIL" in mine["trials"]
    (best,) = mine["best"]
    assert (best["value"], best["trial"]) == (result.best_value, f"first/{result.best_trial.number}")
    assert best["goal"] == "minimize"
    assert mine["steps_asked"] == result.savings.steps_asked and mine["steps_unique"] == result.savings.steps_unique
    assert sum(study["seconds_used"] for study in studies.values()) == plan["seconds_used"]
    assert found["drivers"] == found["chains"] == []
    [cause] = found["causes"]  # one line raised in all stages that failed
    failed = sum(study["trials"]["FAIL"] for study in studies.values())
    assert (cause["failures"], cause["trials"]) == (plan["failures"], failed)
    assert cause["summary"] in {failure.failure.summary for failure in result.plan.failures}
    table = output_of("status", folder)
    assert f"{cause['where']} ({failed} trials): {cause['summary']}\n" in table
    assert f"score {result.best_value:.6g} (trial {result.best_trial.number})" in table


def test_reading_commands_leave_a_store_unchanged_even_files_of_a_dead_writer(
    searched: tuple[Path, hpstage.Result], tmp_path: Path
) -> None:
    folder, _ = searched
    # A checkpoint that was being written by a process that is gone: a search would sweep it.
    aside = folder / "checkpoints" / ".tmp" / "rest of a writer"
    aside.mkdir(parents=True)
    (aside / "part").write_bytes(b"x")
    os.utime(aside, (0, 0))
    before = content(folder)
    output_of("status", folder)
    output_of("tree", folder)
    output_of("export", folder, "tables", tmp_path / "tables")
    output_of("report", folder, tmp_path / "report")
    output_of("tree", folder, "--picture", tmp_path / "tree.png")
    assert content(folder) == before


def test_status_reads_records_of_a_killed_writer_and_leaves_them_in_the_sqlite_log(store: Path) -> None:
    journal = SQLiteJournal(store / "plan.sqlite")
    write(journal, ask([trial(0, {"a": s.constant(1)}, 8)]))
    code = (
        "import os, signal, sys; from hpstage.store import SQLiteJournal; import msgspec\n"
        "from hpstage.plan.facts import TargetAsked\n"
        "journal = SQLiteJournal(sys.argv[1])\n"
        "journal.append([msgspec.json.encode(TargetAsked('study/0', 4))])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(store / "plan.sqlite")], timeout=300)
    assert killed.returncode == -signal.SIGKILL
    log = (store / "plan.sqlite-wal").read_bytes()
    assert status(store)["plan"]["records"] == len(journal) == 4
    assert (store / "plan.sqlite-wal").read_bytes() == log
    journal.close()


def test_a_read_only_journal_refuses_writes_and_creates_no_file(store: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened"):
        SQLiteJournal(store / "plan.sqlite", read_only=True)
    assert list(store.iterdir()) == []
    write_in(store, [])
    with closing(SQLiteJournal(store / "plan.sqlite", read_only=True)) as journal:
        with pytest.raises(StoreError, match="read-only"):
            journal.append([b"{}"])
        assert len(journal) == 1


def test_status_shows_drivers_chains_and_studies_as_running_while_their_leases_are_held(store: Path) -> None:
    with closing(SQLiteJournal(store / "plan.sqlite")) as journal:
        here = DriverLeases(journal, DriverId("here"))
        joined = here.enter("alive", "identity of alive", "pool", "", [])
        elsewhere = DriverId("elsewhere")
        gone = type(joined)(elsewhere, "pool", "another host/boot/ns", 4711, 1.0)
        trials = [trial(i, {"a": s.piecewise({0: 1, 4: 2 + i})}, 8) for i in range(2)]
        facts: list[Fact] = [joined, gone, begin("alive", "identity of alive"), begin("left", "identity of left")]
        for chain, driver in (("c-1", DriverId("here")), ("c-2", elsewhere)):
            spans = (Span(NodeId(0), 0, 4), Span(NodeId(1), 4, 8))
            facts.append(ChainStarted(ChainId(chain), driver, WorkerId("tcp://w"), spans, 5.0))
        write(journal, [*ask(trials, "here"), *facts])
        found = status(store)
        lines = output_of("status", store)
        here.close()
        after = status(store)
    assert {driver["driver"]: driver["alive"] for driver in found["drivers"]} == {"here": True, "elsewhere": False}
    assert {study["study"]: study["state"] for study in found["studies"] if study["algorithm"]} == {
        "alive": "running",
        "left": "interrupted",
    }
    (chain,) = found["chains"]
    assert (chain["chain"], chain["worker"], chain["node"], chain["step"]) == ("c-1", "tcp://w", 0, 0)
    assert (chain["last"], chain["stop"]) == (1, 8)
    assert re.search(r"tcp://w +c-1 .* 8 of node 1", lines) and re.search(r"another host +4711 +gone", lines)
    assert after["chains"] == [] and not any(driver["alive"] for driver in after["drivers"])


def test_status_shows_lowest_and_highest_values_if_the_journal_has_no_direction(store: Path) -> None:
    from hpstage.plan.facts import TrialEnded

    trials = [TrialAdded(TrialId(f"x/{i}"), {"a": s.constant(i)}, 8) for i in range(3)]
    ends = [TrialEnded("x", t.trial, "COMPLETE", (value,), 8, 0.0) for t, value in zip(trials, (2.0, "nan", 1.0))]  # noqa: B905
    write_in(
        store, [begin("x"), *ask(trials), *(TrialProposed("x", i, t.trial, {}) for i, t in enumerate(trials)), *ends]
    )
    (study,) = status(store)["studies"]
    assert [(best["goal"], best["value"]) for best in study["best"]] == [("lowest", 1.0), ("highest", 2.0)]


def test_status_watch_prints_updates_until_ctrl_c(store: Path) -> None:
    write_in(store, ask([trial(0, {"a": s.constant(1)}, 8)]))
    words = [sys.executable, "-m", "hpstage", "status", str(store), "--watch", "--json", "--interval", "0.02"]
    watching = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["plan"]["trials"] == 1
        with closing(SQLiteJournal(store / "plan.sqlite")) as journal:
            write(journal, ask([trial(1, {"a": s.constant(2)}, 8)]))
        assert json.loads(watching.stdout.readline())["plan"]["trials"] == 2
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 0
    finally:
        watching.kill()
        watching.communicate()


@pytest.mark.redis
def test_status_and_tree_read_a_plan_on_redis_by_its_url(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="test-commands")) as journal:
        write(journal, ask([trial(0, {"a": s.constant(1)}, 8)]))
        url = f"{shared_redis.url}?prefix=test-commands"
        assert status(url)["plan"]["steps_asked"] == 8
        assert "0-8" in output_of("tree", url)
        assert len(journal) == 3
    with pytest.raises(UsageError, match="test-commands"):
        CliRunner().invoke(app, ["status", shared_redis.url], catch_exceptions=False)


@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_exported_tables_equal_the_data_frames_of_the_store(
    searched: tuple[Path, hpstage.Result], tmp_path: Path, format: str
) -> None:
    folder, _ = searched
    place = tmp_path / "new" / "tables"
    for _ in range(2):  # the second replaces the first
        output_of("export", folder, "tables", place, "--format", format)
    found = frames(folder)
    assert sorted(p.name for p in place.iterdir()) == sorted(
        f"{name}.{format}" for name in ("trials", "stages", "states", "workers", "events")
    )
    for name in ("trials", "stages", "states", "workers", "events"):
        path, frame = place / f"{name}.{format}", getattr(found, name)
        if format == "parquet":
            pd.testing.assert_frame_equal(pd.read_parquet(path), frame)
        else:
            read = pd.read_csv(path, dtype=frame.dtypes.to_dict())
            pd.testing.assert_frame_equal(read, frame)


def test_status_and_tree_escape_control_characters_in_names(store: Path) -> None:
    assert clean(HOSTILE) == "evil\\x1b[31m\\r\\nna\\u202eme\\ud800"
    assert clean("größer 模型") == "größer 模型"
    typed = HOSTILE.replace("\ud800", "")  # what JSON cannot carry, no journal holds
    added = TrialAdded(TrialId(f"{typed}/0"), {f"lr{typed}": s.constant(f"sgd{typed}")}, 8)
    joined = begin(typed)
    write_in(store, [joined, *ask([added]), TrialProposed(typed, 0, added.trial, {})])
    for text in (output_of("status", store), output_of("tree", store)):
        assert "evil\\x1b[31m\\r\\n" in text
        assert all(c == "\n" or c.isprintable() for c in text)


def test_characters_that_a_terminal_cannot_show_are_escaped(store: Path) -> None:
    write_in(store, ask([TrialAdded(TrialId("größer/0"), {"a": s.constant("模型")}, 8)]))
    for command, sign in (("status", b"gr\\xf6"), ("tree", b"\\u6a21")):
        done = subprocess.run(
            [sys.executable, "-m", "hpstage", command, str(store)],
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0 and sign in done.stdout, done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("command", ["status", "tree", "export", "report"])
def test_reading_commands_have_examples_in_their_help_and_fail_without_a_store(command: str, tmp_path: Path) -> None:
    helped = output_of(command, "--help")
    assert f"hpstage {command} .hpstage/" in helped
    place = {"export": ["tables", str(tmp_path / "out")], "report": [str(tmp_path / "out")]}.get(command, [])
    done = subprocess.run(
        [sys.executable, "-m", "hpstage", command, str(tmp_path / "nothing"), *place], capture_output=True, timeout=300
    )
    assert done.returncode == 1 and b"there is no plan in" in done.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "nothing").exists()
    (tmp_path / "plan.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match="not a journal"):
        CliRunner().invoke(app, [command, str(tmp_path), *place], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["certificates", ""], "FOLDER"),
        (["report", "x", ""], "FOLDER"),
        (["status", ""], "STORE"),
        (["train", "a:B", "--steps", "1", "--checkpoints="], "--checkpoints"),
    ],
)
def test_an_empty_path_is_refused_by_name(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert isinstance(done.exception, UsageError) and str(done.exception) == f"{named} is empty; give a value"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["scheduler"], ["worker", "tcp://127.0.0.1:1"]])
@pytest.mark.parametrize("host", ["300.1.1.1", "tcp://192.0.2.1", "[::1"])
def test_an_invalid_host_of_scheduler_or_worker_is_refused(words: list[str], host: str) -> None:
    done = run(*words, "--host", host)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception).startswith(f"--host {host} is not an address of this host (")


def test_export_to_an_unwritable_folder_or_without_packages_fails_with_a_remedy(
    searched: tuple[Path, hpstage.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = searched
    (tmp_path / "file").write_text("")
    done = run("export", folder, "tables", tmp_path / "file")
    assert isinstance(done.exception, UsageError) and "give another folder" in str(done.exception)
    assert run("export", folder, "tables", tmp_path, "--format", "xml").exit_code == 2
    assert isinstance(run("status", folder, "--interval", "0").exception, UsageError)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = run("export", folder, "tables", tmp_path)
    assert isinstance(done.exception, HpstageError) and "--format csv" in str(done.exception)
    monkeypatch.setitem(sys.modules, "pandas", None)
    output_of("export", folder, "tables", tmp_path, "--format", "csv")
    done = run("export", folder, "tables", tmp_path)
    assert isinstance(done.exception, HpstageError) and "hpstage[report]" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "STORE", "tables", "--trial", "3"], "--trial 3 is for weights; leave it out for tables"),
        (["export", "STORE", "tables", "--step", "best"], "--step best is for weights; leave it out for tables"),
        (["export", "STORE", "mlflow", "--part", "ema"], "--part ema is for weights; leave it out for mlflow"),
        (["export", "STORE", "weights", "--format", "csv"], "--format csv is for tables; leave it out for weights"),
        (
            ["export", "STORE", "tables", "--checkpoints", "s3://bucket"],
            "--checkpoints s3://bucket is for weights and trackers; leave it out for tables",
        ),
        (["status", "STORE", "--interval", "5"], "--interval 5 is for --watch; give both or neither"),
    ],
)
def test_options_of_export_and_status_without_effect_are_refused(words: list[str], message: str) -> None:
    done = run(*words)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == message


def test_status_and_tree_import_no_heavy_package(searched: tuple[Path, hpstage.Result]) -> None:
    folder, _ = searched
    code = (
        "import sys; from hpstage.cli.app import app\n"
        "for command in ('status', 'tree'): app([command, sys.argv[1]], standalone_mode=False)\n"
        "print(sorted({'torch', 'dask', 'distributed', 'optuna', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_recorded_search_without_directions_counts_as_the_same_call() -> None:
    assert begin("x").same_call(begin("x", directions=("maximize",))) and not begin("x").same_call(begin("y"))
