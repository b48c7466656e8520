"""``hpstage run``: a search from the command line, on a local cluster and on a given one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from typer.testing import CliRunner

import hpstage
from hpstage.cli.app import app
from hpstage.cli.naming import space_named, trainable_named
from hpstage.cli.run import as_text
from hpstage.cli.studies import open_study
from hpstage.errors import HpstageError, UsageError
from hpstage.plan.facts import ForkVerified
from hpstage.plan.log import open_existing_plan, read_facts
from hpstage.store import MemoryJournal, SQLiteJournal
from hpstage.testing.toys import Tape
from tests.dask.processes import ROOT, Processes, until
from tests.redis_server import RedisServer

SCRIPT = """
import time
from pathlib import Path

import numpy as np

from hpstage import schedule as s
from near_the_script import TRUTH


class Line:
    '''Least squares by gradient descent.'''

    def setup(self, hp):
        self.w = np.zeros(3)

    def train(self, step, hp):
        with open("steps", "a") as steps:
            steps.write(".")
        x = np.random.normal(size=(32, 3))
        self.w = self.w - hp["lr"] * x.T @ (x @ self.w - x @ TRUTH) / 32
        time.sleep(0.02)

    def evaluate(self):
        return {"loss": float(np.square(self.w - TRUTH).sum()), "norm": float(np.square(self.w).sum())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


class Sized(Line):
    def __init__(self, size):
        self.size = size


def space(trial):
    drop = trial.suggest_categorical("drop", [6, 8])
    return {"lr": s.multistep(trial.suggest_categorical("lr", [0.1, 0.2]), milestones=[drop], gamma=0.5)}


number = 3
"""
WORDS = ["search_it.py:Line", "search_it.py:space", "--metric", "loss", "--steps", "10", "--n-trials", "5"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given, with a script in it."""
    (tmp_path / "search_it.py").write_text(SCRIPT)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "json.py").write_text(SCRIPT)
    (tmp_path / "near_the_script.py").write_text("import numpy as np\n\nTRUTH = np.array([1.0, 2.0, 3.0])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hpstage", "run", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    with start(folder, *words) as process:
        out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def trials(folder: Path, name: str = "Line") -> list[tuple[object, ...]]:
    storage = JournalStorage(JournalFileBackend(str(folder / ".hpstage" / "optuna.log")))
    study = optuna.load_study(study_name=name, storage=storage)
    return [(trial.params, trial.state.name, trial.value) for trial in study.trials]


@pytest.fixture
def inline(folder: Path) -> hpstage.Result:
    """The same search in this process, by the same names."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    result = hpstage.optimize(
        study,
        trainable_named("search_it.py:Line"),
        space_named("search_it.py:space"),
        metric="loss",
        steps=10,
        n_trials=5,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )
    del sys.modules["search_it"], sys.modules["near_the_script"]
    (folder / "steps").unlink()
    return result


def said(err: str) -> list[str]:
    """What is on standard error besides the progress of the search."""
    of_progress = ("Line: ", "Setting up the workers", "Watch it at", "What is trained is kept: hpstage status ")
    return [line for line in err.splitlines() if not line.startswith(of_progress)]


@pytest.mark.ci
def test_the_same_run_command_resumes_an_interrupted_search(folder: Path, inline: hpstage.Result) -> None:
    words = [*WORDS, "--direction", "minimize", "--n-workers", "1", "--report", "report"]
    with start(folder, *words) as process:
        until(lambda: (folder / "steps").exists() and (folder / "steps").stat().st_size > 12, "steps")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("Setting up the workers\nWatch it at ") and "\nLine: 0/5 trials; " in err
    assert said(err) == [
        "Stopping: saving what runs; Ctrl-C again stops at once",
        "hpstage: interrupted; all progress is saved, and the same command resumes (study Line in .hpstage/optuna.log)",
    ]
    assert re.search(r"^What is trained is kept: hpstage status \.hpstage/Line-\w+$", err, re.MULTILINE)
    status, out, err = run(folder, *words)
    assert (status, said(err)) == (0, [])
    assert trials(folder) == [(trial.params, trial.state.name, trial.value) for trial in inline.study.trials]
    [plan] = (folder / ".hpstage").glob("Line-*/plan.sqlite")
    with closing(SQLiteJournal(plan, read_only=True)) as journal:
        verified = [fact.steps for fact in read_facts(journal) if isinstance(fact, ForkVerified)]
        assert open_existing_plan(journal).totals.steps_trained == inline.savings.steps_unique
    # Steps by which forks were verified, of the workload and after the load, and the ends of chains trained again.
    more = (folder / "steps").stat().st_size - inline.savings.steps_unique
    assert 2 <= sum(verified) <= more
    best = inline.best_trial
    assert out.splitlines()[0] == f"Best trial {best.number}: loss {best.value:.6g} with {best.params}"
    assert re.search(r"^merge rate +\d", out, re.MULTILINE)
    assert [line.split(maxsplit=1) for line in out.splitlines()[-3:]] == [
        ["study", "Line in .hpstage/optuna.log"],
        ["store", str(plan.parent.relative_to(folder))],
        ["report", "report/index.html"],
    ]
    assert (folder / "report" / "index.html").exists()
    assert [path.name for path in (folder / ".hpstage").glob("Line-*")] != []


@pytest.mark.ci
def test_the_run_command_sends_a_script_to_workers_that_do_not_have_the_script(
    folder: Path, inline: hpstage.Result, tmp_path: Path
) -> None:
    (folder / "near_the_script.py").rename(folder / "search_it_too.py")
    script = SCRIPT.replace("from near_the_script import TRUTH", "TRUTH = np.array([1.0, 2.0, 3.0])")
    (folder / "search_it.py").write_text(script.replace('"steps"', f"{str(folder / 'steps')!r}"))
    logs = tmp_path / "logs"
    logs.mkdir()
    with Processes(logs, PYTHONPATH=str(ROOT)) as processes:
        processes.scheduler()
        processes.worker()
        words = [*WORDS, "--direction", "minimize", "--scheduler", processes.address, "--quiet"]
        status, _, err = run(folder, *words)
    assert (status, err) == (0, ""), processes.logs()
    assert trials(folder) == [(trial.params, trial.state.name, trial.value) for trial in inline.study.trials]
    [plan] = (folder / ".hpstage").glob("Line-*/plan.sqlite")
    journal = SQLiteJournal(plan, read_only=True)
    header = next(iter(journal.read(0, 1)))
    assert open_existing_plan(journal).totals.steps_trained == inline.savings.steps_trained
    journal.close()
    assert b"environment:numpy" in header, "the worker knows whose code it is, and which libraries it names"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere.py:Line", "search_it.py:space"], "there is no file .*nowhere.py"),
        (["search_it.py:Lime", "search_it.py:space"], "search_it.py has no Lime"),
        (
            ["search_it.py:Sized", "search_it.py:space"],
            "cannot be instantiated without arguments .*'size'.*name an instance",
        ),
        (["search_it.py:Line", "search_it.py:number"], "search_it.py:number is of type int; name a function"),
        (["search_it.py:Line", "search_it.py:Line"], "is the class Line; name a function"),
        (
            ["search_it.py:Line", "search_it.py:space"],
            "no study 'Line' in .hpstage/optuna.log yet; create it with --direction",
        ),
        (["search_it.py:Line", "search_it.py:space", "--algorithm", "Magic"], "give one of ASHA, FullTraining"),
        (["search_it.py:Line", "search_it.py:space", "--sampler", "magic"], "sampler is 'magic'; give one of"),
        (
            ["search_it.py:Line", "search_it.py:space", "--n-workers", "0"],
            "--n-workers is 0; give a whole number from 1 to 1,024",
        ),
        (
            ["search_it.py:Line", "search_it.py:space", "--n-workers", "2", "--scheduler", "tcp://127.0.0.1:1"],
            "--n-workers is for a local cluster",
        ),
        (
            ["search_it.py:Line", "search_it.py:space", "--storage", "magic://user:secret@host/it"],
            r"--storage magic://host/it cannot be opened",
        ),
        (["search_it.py:Line", "search_it.py:space", "--metric", "norm", "--direction", "minimize"], "1 objective, "),
        (["search_it.py:Line", ":space"], "':space'; give MODULE:NAME"),
        (["search_it.py:Line", ".search_it:space"], "'.search_it:space'; give MODULE:NAME"),
        (["search_it.py:Line", "below/json.py:space"], r"json\.py has the name of the imported module 'json'"),
    ],
)
def test_bad_arguments_of_the_run_command_are_refused_with_a_remedy(
    folder: Path, words: list[str], complaint: str
) -> None:
    direction = [] if "--direction" in words or complaint.startswith("no study") else ["--direction", "minimize"]
    command = ["run", *words, "--metric", "loss", "--steps", "10", "--n-trials", "2", *direction]
    with pytest.raises(HpstageError, match=complaint):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert not (folder / "steps").exists()
    sys.modules.pop("search_it", None)


def test_a_storage_path_that_is_a_named_pipe_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "study.log")
    command = ["run", "search_it.py:Line", "search_it.py:space", "--metric", "loss", "--steps", "10"]
    with pytest.raises(UsageError, match=r"--storage study.log cannot be opened: it is not a file"):
        CliRunner().invoke(app, [*command, "--storage", "study.log"], catch_exceptions=False)


def test_a_best_trial_trained_by_other_code_is_marked_in_the_output() -> None:
    class Best(Tape):
        def evaluate(self) -> dict[str, float]:
            return {"score": 2.0}

    class Worse(Tape):
        def evaluate(self) -> dict[str, float]:
            return {"score": 1.0}

    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": trial.suggest_int("a", 1, 2)}

    study = optuna.create_study(direction="maximize")
    lines = []
    for trainable in (Best(), Worse()):
        result = hpstage.optimize(
            study,
            trainable,
            space,
            metric="score",
            steps=4,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
        )
        lines.append(as_text(result, ["score"]).splitlines()[0])
    first, second = lines
    assert first == f"Best trial 0: score 2 with {study.trials[0].params}"
    assert second == f"{first} (trained on another store or by other code)"


@pytest.mark.ci
def test_a_scheduler_that_does_not_answer_is_named_in_the_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "1s")
    status, out, err = run(folder, *WORDS, "--direction", "minimize", "--scheduler", "tcp://127.0.0.1:1")
    assert (status, out) == (1, "")
    assert err.startswith("hpstage: no scheduler answers at tcp://127.0.0.1:1 (")
    assert len(err.splitlines()) == 1


@pytest.mark.ci
def test_an_error_in_the_users_script_is_shown_with_its_type_and_line(folder: Path) -> None:
    (folder / "search_it.py").write_text("import no_such_library\n")
    status, _, err = run(folder, *WORDS)
    assert status == 1
    assert err.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_library'"
    assert 'search_it.py", line 1' in err


@pytest.mark.redis
def test_a_study_on_redis_is_opened_without_warnings(
    shared_redis: RedisServer, recwarn: pytest.WarningsRecorder
) -> None:
    open_study("s", shared_redis.url, directions=["minimize"], sampler=optuna.samplers.RandomSampler(seed=0))
    assert [str(warning.message) for warning in recwarn] == []


def test_an_existing_study_keeps_its_direction(tmp_path: Path) -> None:
    storage, sampler = str(tmp_path / "new" / "optuna.log"), optuna.samplers.RandomSampler(seed=0)
    made = open_study("s", storage, directions=["maximize", "minimize"], sampler=sampler)
    assert open_study("s", storage, directions=[], sampler=sampler).directions == made.directions
    assert open_study("s", storage, directions=["maximize", "minimize"], sampler=sampler).sampler is sampler
    with pytest.raises(UsageError, match="has the direction maximize and minimize; leave out --direction"):
        open_study("s", storage, directions=["minimize"], sampler=sampler)


def test_control_characters_in_names_are_escaped_in_the_output(inline: hpstage.Result) -> None:
    inline.study.enqueue_trial({"lr": 0.1})
    shown = as_text(inline, ["\x1b[31mevil"])
    assert "\x1b" not in shown
    assert "\\x1b[31mevil" in shown
    assert "1 trial not finished yet" in shown


@pytest.mark.ci
def test_the_run_command_exits_with_status_1_if_every_trial_fails(folder: Path) -> None:
    (folder / "fails.py").write_text(SCRIPT.replace('hp["lr"]', 'hp["rate"]'))
    words = ["fails.py:Line", "fails.py:space", *WORDS[2:], "--direction", "minimize", "--executor", "InlineExecutor()"]
    status, out, err = run(folder, *words)
    assert (status, out.startswith("No trial has ended with a value.")) == (1, True)
    assert "KeyError: 'rate'" in err


def test_the_output_reports_that_no_trial_has_ended_with_a_value(inline: hpstage.Result) -> None:
    study = optuna.create_study()
    assert as_text(replaced(inline, study), ["loss"]).startswith("No trial has ended with a value.\n")


def replaced(result: hpstage.Result, study: optuna.Study) -> hpstage.Result:
    return hpstage.Result(study, result.savings, result.store, result.plan, result.journal)
