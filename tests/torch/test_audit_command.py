"""``hpstage audit``: a trial of any store is trained again alone, and repeated elsewhere from a certificate."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hpstage
from hpstage.checking import certificate as certificates
from hpstage.checkpoints import FolderCheckpoints
from hpstage.cli.app import app
from hpstage.errors import TrainingError, UsageError
from hpstage.execution.retraining import retrain
from hpstage.execution.untrained import UntrainedFork
from hpstage.plan.log import read_header
from hpstage.store import SQLiteJournal
from hpstage.testing.toys import Failing
from hpstage.training.trainables import as_trainable
from tests.torch.test_retraining import searched
from tests.torch.trainables import Small

pytestmark = pytest.mark.sampled(4)

SCRIPT = """
import os
import torch, hpstage
from hpstage import schedule as s

class Tiny(hpstage.torch.TorchTrainable):
    batch_size = 8
    def model(self, hp): return torch.nn.Linear(4, 2)
    def optimizer(self, model, hp): return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=0.9)
    def dataset(self):
        x = torch.linspace(-1, 1, 120).reshape(30, 4)
        return torch.utils.data.TensorDataset(x, x[:, :2])
    def loss(self, model, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y) * (1 + len(os.environ.get("LEFT_BEHIND", "")))
    def evaluate(self, model):
        os.environ["LEFT_BEHIND"] = os.environ.get("LEFT_BEHIND", "") + WHAT
        x, y = self.dataset().tensors
        return {"loss": torch.nn.functional.mse_loss(model(x), y).item()}

def space(trial):
    return {"lr": s.multistep(0.1, [trial.suggest_categorical("drop", [3, 5])], gamma=0.1)}
"""


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def search(folder: Path, name: str, left_behind: str) -> Path:
    script = folder / f"{name}.py"
    script.write_text(SCRIPT.replace("WHAT", repr(left_behind)))
    found = run(
        *("run", f"{script}:Tiny", f"{script}:space", "--metric", "loss", "--direction", "minimize", "--steps", "8"),
        *("--n-trials", "4", "--sampler", "grid", "--executor", "InlineExecutor()", "--quiet"),
        *("--store", str(folder / "store")),
    )
    assert found.exit_code == 0, found.output
    return script


@pytest.fixture(autouse=True)
def in_the_folder_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEFT_BEHIND", "")
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.ci
def test_audit_compares_a_trial_with_its_store_and_repeats_it_from_its_certificate(tmp_path: Path) -> None:
    script = search(tmp_path, "equal_script", "")
    store, certificate, report = str(tmp_path / "store"), tmp_path / "trial.json", tmp_path / "report.json"
    found = run("audit", store, "--trial", "1", "--certificate", str(certificate), "--json", str(report))
    assert found.exit_code == 0, found.output
    assert "Trial Tiny/1 was trained again alone, 8 steps" in found.output
    assert "0 differences" in found.output
    assert f"Certificate: {certificate}" in found.output
    content = json.loads(report.read_text())
    assert content["equal"]
    assert content["metrics"] == 1
    assert "0 differences" in content["summary"]
    again = run("audit", "--certificate", str(certificate), f"{script}:Tiny")
    assert again.exit_code == 0, again.output
    assert re.search(r"1 metric and \d states? compared, 0 differences", again.output)
    assert b"pickle" not in certificate.read_bytes()
    content = json.loads(certificate.read_text())
    content["states"][-1]["digest"] = "0" * 32
    content["states"][-1]["marks"] = "0000" + content["states"][-1]["marks"][4:]
    certificate.write_text(json.dumps(content))
    other = run("audit", "--certificate", str(certificate), f"{script}:Tiny")
    assert other.exit_code == 1, other.output
    assert "after 8 steps, model.weight is" in other.output  # the leaf is known by its marks


@pytest.mark.ci
def test_audit_exits_with_status_1_if_an_earlier_trial_has_changed_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UntrainedFork, "made", lambda trainable: None)  # else the search finds it
    script = search(tmp_path, "leaking_script", "x")
    monkeypatch.setenv("LEFT_BEHIND", "")  # as in another process
    certificate = tmp_path / "trial.json"
    words = ["audit", str(tmp_path / "store"), f"{script}:Tiny", "--trial", "Tiny/1", "--certificate", str(certificate)]
    found = run(*words)
    assert found.exit_code == 1, found.output
    assert not certificate.exists()
    assert "No certificate was written" in found.output
    assert re.search(r"after \d+ steps, model\.weight is float32 \[2, 4\] \w+, and was float32 \[2, 4\]", found.output)
    assert "hpstage check" in found.output


@pytest.mark.ci
def test_audit_refuses_edited_code_and_names_the_edited_method(tmp_path: Path) -> None:
    script = search(tmp_path, "edited_script", "")
    other = tmp_path / "elsewhere" / script.name
    other.parent.mkdir()
    other.write_text(script.read_text().replace("momentum=0.9", "momentum=0.8"))
    del sys.modules["edited_script"]
    found = run("audit", str(tmp_path / "store"), f"{other}:Tiny", "--trial", "1")
    assert found.exit_code == 2, found.output
    assert "(edited since: edited_script.Tiny.optimizer); undo the edit" in found.output


SEARCHES = """
LOG = logging.getLogger(__name__)

class Logs(Tiny):
    def model(self, hp):
        LOG.info("a model")
        return super().model(hp)

if __name__ == "__main__":
    import optuna
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [3, 5]}))
    hpstage.optimize(
        study, Logs(), space, metric="loss", steps=8, n_trials=2, store="store", executor=hpstage.InlineExecutor()
    )
"""


@pytest.fixture(scope="module")
def has_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that has been run, with its store as it was then."""
    script = tmp_path_factory.mktemp("run") / "searching.py"
    script.write_text(f"import logging{SCRIPT.replace('WHAT', repr(''))}{SEARCHES}")
    subprocess.run([sys.executable, str(script)], cwd=script.parent, check=True, capture_output=True)
    (script.parent / "store").rename(script.parent / "as it was")
    return script


@pytest.fixture
def run_script(has_run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """That script in the current folder, with a store: the plan knows the script by its path."""
    text = has_run.read_text()
    shutil.copytree(has_run.parent / "as it was", has_run.parent / "store")
    monkeypatch.chdir(has_run.parent)
    yield has_run
    for folder in ("store", "elsewhere"):
        shutil.rmtree(has_run.parent / folder, ignore_errors=True)
    has_run.write_text(text)


@pytest.mark.ci
def test_audit_finds_the_script_of_a_search_by_its_plan(run_script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, store = run_script, str(run_script.parent / "store")
    main = sys.modules["__main__"]
    found = run("audit", "store", "--trial", "1")
    assert found.exit_code == 0, found.output
    assert "0 differences" in found.output
    assert sys.modules["__main__"] is main
    moved = script.parent / "elsewhere" / script.name
    moved.parent.mkdir()
    script.rename(moved)
    found = run("audit", "store", "--trial", "1")
    assert found.exit_code == 2, found.output
    assert f"this plan was made by {script}, which is not in this folder" in found.output
    assert f"{script}:Logs" in found.output
    assert run("audit", "store", f"{moved}:Logs", "--trial", "1").exit_code == 0
    monkeypatch.chdir(moved.parent)
    assert run("audit", store, "--trial", "1").exit_code == 0
    moved.write_text(moved.read_text().replace("momentum=0.9", "momentum=0.8"))
    found = run("audit", store, "--trial", "1")
    assert found.exit_code == 2, found.output
    assert "(edited since: __main__.Tiny.optimizer); undo the edit" in found.output


@pytest.mark.ci
def test_audit_imports_a_script_named_by_the_store_only_from_the_current_folder(
    run_script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is anybody's."""
    run_script.write_text("raise SystemExit('this was run')")
    monkeypatch.chdir(tmp_path)
    found = run("audit", str(run_script.parent / "store"), "--trial", "1")
    assert found.exit_code == 2, found.output
    assert "if you trust this script" in found.output
    assert "this was run" not in found.output


@pytest.mark.ci
def test_audit_refuses_a_script_that_starts_its_search_when_imported(run_script: Path) -> None:
    run_script.write_text(run_script.read_text().replace('if __name__ == "__main__":', "if True:"))
    found = run("audit", "store", "--trial", "1")
    assert found.exit_code == 2, found.output
    assert "importing the script starts the search again" in found.output


@pytest.mark.ci
def test_an_interrupted_audit_exits_with_status_130_and_a_message(run_script: Path) -> None:
    run_script.write_text(
        run_script.read_text().replace("LOG = ", "import time; print('loading', flush=True); time.sleep(60); LOG = ")
    )
    words = [sys.executable, "-m", "hpstage", "audit", "store", "--trial", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "hpstage: interrupted before the comparison" in errors


def test_audit_exits_with_status_2_and_the_reason_if_its_arguments_are_wrong(tmp_path: Path) -> None:
    searched(Small(), tmp_path / "store")
    store, failed = str(tmp_path / "store"), str(tmp_path / "failed")
    with pytest.raises(TrainingError):
        hpstage.train(Failing(), {"a": 7}, steps=2, metric="score", store=failed, executor=hpstage.InlineExecutor())
    for words, match in (
        ([failed, "--trial", "0"], "trial runs/0 has no result; audit a trial that has one"),
        ([store, "--trial", "77"], "no trial 'small/77'"),
        ([str(tmp_path / "none")], "there is no plan in"),
        ([store, "a.py:A", "b.py:B"], "one argument too many"),
        (["--certificate", str(tmp_path / "none.json"), "a.py:A"], "give the file of a certificate"),
        (["--certificate", str(tmp_path / "store" / "plan.sqlite"), "a.py:A"], "is not a certificate"),
        (
            ["--certificate", str(tmp_path / "none.json"), "a.py:A", "--trial", "1"],
            "a certificate belongs to one trial",
        ),
        ([store, "no_such_module:A", "--trial", "1"], "there is no module 'no_such_module'"),
    ):
        found = run("audit", *words)
        assert found.exit_code == 2, (words, found.output)
        assert match in found.output


def test_a_trial_is_retrained_from_its_certificate_without_its_checkpoints(tmp_path: Path) -> None:
    result = searched(Small(), tmp_path / "store")
    header = read_header(SQLiteJournal(tmp_path / "store" / "plan.sqlite", read_only=True))
    file = tmp_path / "trial.json"
    certificates.write(certificates.certificate_of(result.trial(1).planned, header), file)
    read = certificates.read(file)
    segment = read.segment()
    assert [stage.stop for stage in segment.stages][-1] == 8
    again = retrain(as_trainable(Small()), FolderCheckpoints(tmp_path / "empty", "none"), segment)
    assert again.equal, again
    assert again.states == len([state for state in read.states if state.digest])
    assert again.digests == {state.step: state.digest for state in read.states if state.digest}


def test_a_certificate_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    result = searched(Small(), tmp_path / "store")
    header = read_header(SQLiteJournal(tmp_path / "store" / "plan.sqlite", read_only=True))
    file = tmp_path / "trial.json"
    certificates.write(certificates.certificate_of(result.trial(0).planned, header), file)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(UsageError, match="format 99"):
        certificates.read(file)
