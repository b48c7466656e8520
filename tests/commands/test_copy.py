"""``hpstage copy``: a plan on another store is the same plan, and nothing of it is trained twice."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import Result as Outcome
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.algos import FullTraining
from hpstage.checkpoints import FolderCheckpoints, stage_log
from hpstage.cli.app import app
from hpstage.driver.driver_leases import DriverLeases
from hpstage.errors import HpstageError
from hpstage.plan.facts import DriverId, DriverJoined
from hpstage.plan.log import encode, read_facts
from hpstage.store import SQLiteJournal
from hpstage.store.opening import open_journal
from hpstage.testing.toys import Tape
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.sampled(8), pytest.mark.usefixtures("own_files")]

optuna.logging.set_verbosity(optuna.logging.ERROR)
STEPS = 8
GRID: dict[str, list[Any]] = {"a": [1, 2], "late": [1, 2, 3]}


class Printing(Tape):
    """Logs, so that there are logs to copy."""

    version = "printing"

    def train(self, step: int, hp: Any) -> None:
        sys.stdout.write(f"step {step}\n")
        super().train(step, hp)


def space(trial: optuna.Trial) -> dict[str, object]:
    a, late = (trial.suggest_categorical(name, values) for name, values in GRID.items())
    return {"a": s.piecewise({0: a, 4: late}), "b": 0.5}


def search(
    store: object, *, steps: int = STEPS, checkpoints: object = None, study: Any = None, **options: Any
) -> hpstage.Result:
    study = study or optuna.create_study(study_name=uuid.uuid4().hex, sampler=optuna.samplers.GridSampler(GRID))
    return hpstage.optimize(
        study,
        Printing(),
        space,
        metric="score",
        steps=steps,
        store=store,  # type: ignore[arg-type]
        checkpoints=checkpoints,  # type: ignore[arg-type]
        checkpoint_every=1,
        executor=hpstage.InlineExecutor(),
        **options,
    )


def run(*words: object) -> Outcome:
    return CliRunner().invoke(app, ["copy", *map(str, words)])


def copied(*words: object) -> str:
    done = run(*words)
    assert done.exit_code == 0, done.exception
    return done.output


def refused(*words: object) -> str:
    done = run(*words)
    assert isinstance(done.exception, HpstageError), done.output
    return str(done.exception)


def log_of(store: object) -> list[bytes]:
    with ExitStack() as closing:
        return open_journal(str(store), closing=closing, read_only=True).read()


def states_of(folder: Path) -> dict[str, bytes]:
    """The digest and log of each state in a folder of checkpoints, all read and found sound."""
    store = FolderCheckpoints(folder, hpstage.open(folder.parent, checkpoints=folder).plan.workload)
    for key in store.sizes():
        store.verify(key)
    logs = {key: stage_log.encode(store.load_log(key), key, "") for key in store.logs()}
    return {store.manifest(key).digest: logs.pop(key, b"") for key in store.sizes()} | logs


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("searched") / "store"
    search(store)
    return store


@pytest.fixture
def place(searched: Path, redis_server: RedisServer) -> str:
    """The URL of a plan that is not on the server yet."""
    return f"{redis_server.url}?prefix={uuid.uuid4().hex}"


def test_a_plan_copied_to_redis_and_back_is_equal(searched: Path, place: str, tmp_path: Path) -> None:
    shared, back = tmp_path / "shared", tmp_path / "back"
    out = copied(searched, place, "--to-checkpoints", shared)
    records = len(log_of(searched))
    states = len(hpstage.open(searched).plan.kept)
    assert f": {records} records ({records} copied now), {states} checkpoints ({states} copied now)" in out
    assert len(out.splitlines()) == 1 and records > 20 < states
    copied(place, back, "--checkpoints", shared)
    assert log_of(back) == log_of(place) == log_of(searched)
    known = states_of(searched / "checkpoints")
    assert all(known.values()) and states_of(back / "checkpoints") == known
    again = copied(place, back, "--checkpoints", shared)
    assert f"{records} records (0 copied now), {states} checkpoints (0 copied now)" in again
    for store in (place, str(back)):
        outputs = [CliRunner().invoke(app, ["status", where, "--json"]).output for where in (store, str(searched))]
        assert outputs[0] == outputs[1] != ""


def test_a_search_on_a_copied_plan_trains_no_step_twice(
    searched: Path, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied(searched, place, "--to-checkpoints", tmp_path / "shared")
    with caplog.at_level(logging.WARNING):
        result = search(place, checkpoints=tmp_path / "shared")
        assert result.savings.steps_trained == 0 and len(result.study.trials) == 6
        longer = search(place, checkpoints=tmp_path / "shared", steps=STEPS + 2)
    assert longer.savings.steps_trained == 6 * 2
    assert longer.best_model is not None and not caplog.records
    assert hpstage.open(place, checkpoints=tmp_path / "shared").trial(0, result.name).state()


def test_an_interrupted_study_continues_on_a_copied_plan(tmp_path: Path) -> None:
    def create() -> optuna.Study:
        return optuna.create_study(study_name="one", sampler=optuna.samplers.GridSampler(GRID, seed=0))

    whole = search(tmp_path / "whole", study=create())

    class Stop(Exception):
        pass

    def stop(study: optuna.Study, trial: object) -> None:
        if len([one for one in study.trials if one.state.is_finished()]) == 3:
            raise Stop

    study = create()
    with pytest.raises(Stop):
        search(tmp_path / "first", study=study, algorithm=FullTraining(window=1), callbacks=[stop])
    copied(tmp_path / "first", tmp_path / "second")
    before = hpstage.open(tmp_path / "second").plan.totals.steps_trained
    rest = search(tmp_path / "second", study=study, algorithm=FullTraining(window=1))
    assert 0 < before < rest.plan.totals.steps_trained == whole.plan.totals.steps_trained
    assert [trial.value for trial in study.trials] == [trial.value for trial in whole.study.trials]


def test_copy_without_checkpoints_leaves_the_checkpoints_usable_where_they_are(
    searched: Path, place: str, tmp_path: Path
) -> None:
    out = copied(searched, place, "--no-checkpoints")
    assert f"The checkpoints stay in {searched}/checkpoints: give this location as --checkpoints" in out
    assert search(place, checkpoints=searched / "checkpoints").savings.steps_trained == 0
    assert "stay where they are" in copied(place, tmp_path / "folder", "--no-checkpoints")


@pytest.mark.parametrize("large", [False, True])
def test_copy_writes_checkpoints_to_a_bucket_and_back(
    large: bool, searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # one at a time
        monkeypatch.setattr("hpstage.cli.copy._SMALL", 0)
    bucket = f"memory://{uuid.uuid4().hex}"
    copied(searched, tmp_path / "there", "--to-checkpoints", bucket)
    assert not (tmp_path / "there" / "checkpoints").exists()
    copied(tmp_path / "there", tmp_path / "back", "--checkpoints", bucket)
    assert states_of(tmp_path / "back" / "checkpoints") == states_of(searched / "checkpoints")


def test_a_copy_to_redis_without_a_prefix_becomes_the_plan_of_its_workload(
    searched: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    assert "?prefix=hpstage:Printing-" in copied(searched, redis_server.url, "--to-checkpoints", tmp_path)
    assert search(redis_server.url, checkpoints=tmp_path).savings.steps_trained == 0


def test_copying_a_plan_back_adds_the_searches_made_on_the_copy(searched: Path, place: str, tmp_path: Path) -> None:
    """There and back again: the first store gets what was recorded on the second."""
    first, shared = tmp_path / "first", tmp_path / "shared"
    copied(searched, first)
    copied(first, place, "--to-checkpoints", shared)
    search(place, checkpoints=shared, steps=STEPS + 1)
    assert "of later searches. Copy in the other direction" in refused(first, place, "--to-checkpoints", shared)
    before = len(log_of(first))
    assert f"({len(log_of(place)) - before} copied now)" in copied(place, first, "--checkpoints", shared)
    assert search(first, steps=STEPS + 1).savings.steps_trained == 0


CODE = """
import sys
from hpstage.cli.app import main
sys.argv = ["hpstage", "copy", *sys.argv[1:]]
main()
"""


@pytest.mark.ci
@pytest.mark.parametrize("to_redis", [True, False])
@pytest.mark.parametrize("after", ["states", "records"])
def test_a_killed_copy_resumes_where_it_stopped(
    searched: Path, place: str, tmp_path: Path, to_redis: bool, after: str
) -> None:
    shared = tmp_path / "to" / "checkpoints"
    target = place if to_redis else str(tmp_path / "to")
    words = [str(searched), target, "--to-checkpoints", str(shared)]
    # Killed by itself, in the middle: after some states, or after some records.
    kill = (
        "import os, signal\n"
        + {
            "states": "import hpstage.cli.copy as it\n"
            "copy_one, count = it.copy_checkpoint, iter(range(10))\n"
            "def dying(*given):\n"
            "    if next(count, None) is None: os.kill(os.getpid(), signal.SIGKILL)\n"
            "    return copy_one(*given)\n"
            "it.copy_checkpoint = dying\n",
            "records": "import hpstage.store.copying as it\n"
            "it._BATCH = 7\n"
            "from hpstage.store.redis import RedisJournal\n"
            "from hpstage.store.sqlite import SQLiteJournal\n"
            "count = iter(range(3))\n"
            "for kind in (RedisJournal, SQLiteJournal):\n"
            "    def dying(*given, append=kind.append, **more):\n"
            "        if next(count, None) is None: os.kill(os.getpid(), signal.SIGKILL)\n"
            "        return append(*given, **more)\n"
            "    kind.append = dying\n",
        }[after]
    )
    done = subprocess.run([sys.executable, "-c", kill + CODE, *words], capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    states = len(FolderCheckpoints(shared, "").sizes())
    whole = len(hpstage.open(searched).plan.kept)
    assert (0 < states < whole) if after == "states" else states == whole
    out = copied(*words)
    records = len(log_of(searched))
    assert f"{records} records ({records - (21 if after == 'records' else 0)} copied now)" in out
    assert f"{whole} checkpoints ({whole - states} copied now)" in out
    assert log_of(target) == log_of(searched)
    assert search(target, checkpoints=shared).savings.steps_trained == 0


@pytest.mark.ci
def test_copy_replaces_a_damaged_copied_checkpoint_and_names_a_damaged_original(searched: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    copied(searched, first)
    copied(first, second)
    damaged = sorted((second / "checkpoints").glob("*/*/state.json"))[3]
    damaged.write_bytes(b"{}")
    assert "(1 copied now)" in copied(first, second)
    assert states_of(second / "checkpoints") == states_of(first / "checkpoints")
    damaged = sorted((first / "checkpoints").glob("*/*/state.json"))[5]
    damaged.write_bytes(b"{}")
    out = copied(first, tmp_path / "third")
    assert "Not copied, since missing or damaged: 1 checkpoint. Their steps are trained again if needed." in out
    assert damaged.parent.name in out
    assert search(tmp_path / "third").savings.steps_trained <= 1


def test_copying_a_store_during_a_search_copies_a_consistent_beginning(searched: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    copied(searched, store)
    leases_of = DriverId("driver")
    with ExitStack() as closing:
        journal = SQLiteJournal(store / "plan.sqlite")
        closing.callback(journal.close)
        leases = DriverLeases(journal, leases_of)
        joined = leases.enter("x", "x", "pool", "", [])
        closing.callback(leases.close)
        assert isinstance(joined, DriverJoined)
        journal.append([encode(joined)])
        assert "A search is running on the store: run the same command again" in copied(store, tmp_path / "copy")
    assert list(map(encode, read_facts_of(tmp_path / "copy")))[-1] == encode(joined)
    assert search(tmp_path / "copy").savings.steps_trained == 0


def read_facts_of(store: Path) -> list[object]:
    with ExitStack() as closing:
        return list(read_facts(open_journal(store, closing=closing, read_only=True)))


REFUSED: dict[str, Callable[[Path, Path], tuple[list[object], str]]] = {
    "no store": lambda a, b: ([b / "none", b / "to"], "there is no plan in"),
    "itself": lambda a, b: ([a, a], "is the store itself; give another destination"),
    "within itself": lambda a, b: ([a, a / "checkpoints" / "b"], "is within the store; give another destination"),
    "itself by another path": lambda a, b: ([a, a.parent / "x" / ".." / a.name], "is the store itself"),
    "unknown scheme": lambda a, b: ([a, "s3://bucket/folder"], "no store of the kind s3://"),
    "a server without checkpoints": lambda a, b: ([a, "redis://localhost:1"], "--to-checkpoints is missing"),
    "a source on a server": lambda a, b: (["redis://localhost:1", b / "to"], "--checkpoints is missing"),
    "its own checkpoints": lambda a, b: (
        [a, "redis://localhost:1", "--to-checkpoints", a / ".." / a.name / "checkpoints"],
        "already holds the checkpoints of STORE. Give another --to-checkpoints",
    ),
    "its own checkpoints by URL": lambda a, b: (
        ["redis://localhost:1", b / "to", "--checkpoints", "s3://bucket/x", "--to-checkpoints", "s3://bucket/x/"],
        "s3://bucket/x/ already holds the checkpoints of STORE",
    ),
    "both": lambda a, b: ([a, b / "to", "--no-checkpoints", "--to-checkpoints", b], "exclude each other"),
    "no checkpoints there": lambda a, b: ([a, b / "to", "--checkpoints", b / "none"], "none of the .* is in .*none"),
    "empty": lambda a, b: ([a, ""], "DESTINATION is empty; give a value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_of_copy_are_named_before_anything_is_written(
    case: str, searched: Path, tmp_path: Path
) -> None:
    words, message = REFUSED[case](searched, tmp_path)
    before = sorted(searched.parent.rglob("*"))
    assert re.search(message, refused(*words))
    assert not list(tmp_path.rglob("*")) and sorted(searched.parent.rglob("*")) == before


def test_copy_to_a_destination_with_another_plan_is_refused_and_changes_nothing(searched: Path, tmp_path: Path) -> None:
    search(tmp_path / "other")
    before = log_of(tmp_path / "other"), states_of(tmp_path / "other" / "checkpoints")
    assert "holds another plan" in refused(searched, tmp_path / "other")
    assert before == (log_of(tmp_path / "other"), states_of(tmp_path / "other" / "checkpoints"))
