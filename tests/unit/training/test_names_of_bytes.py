"""Files, programs and folders whose names are not UTF-8, as those of old disks."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage.checkpoints.processes import start_of
from hpstage.errors import StoreError
from hpstage.schedule import Scalar
from hpstage.testing.toys import Tape
from hpstage.training.identity.watching import held_open

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_mapped_file_is_found_as_open_if_its_name_is_not_utf8(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    Path(os.fsdecode(name)).write_bytes(b"x" * mmap.PAGESIZE)
    with open(name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert os.fsdecode(name) in held_open()
        assert mapped[0] == ord("x")


class Reading(Tape):
    """Reads a file in its set-up that its key does not cover."""

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        super().setup(hp)
        self.score = float(Path("caf\udce9").read_text())


def test_training_may_read_a_file_whose_name_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def search() -> list[float | None]:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
        executor = hpstage.InlineExecutor()
        call = {"metric": "score", "steps": 2, "n_trials": 2, "store": "st\udcff", "executor": executor}
        hpstage.optimize(study, Reading(), lambda trial: {"a": trial.suggest_int("a", 1, 9)}, **call)  # type: ignore[arg-type]
        return [trial.value for trial in study.trials]

    Path("caf\udce9").write_text("1")
    assert search() == search()
    Path("caf\udce9").write_text("2")
    with pytest.raises(StoreError, match=r"training reads caf.*which changed"):
        search()


def test_the_start_of_a_process_is_found_if_its_name_is_not_utf8() -> None:
    pr_set_name = 15
    script = f"import ctypes; ctypes.CDLL(None).prctl({pr_set_name}, b'caf\\xe9) S 1 2'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert start_of(process.pid).isdigit()
        process.communicate(b"\n")
