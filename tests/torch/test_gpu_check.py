"""What scripts/gpu_check.py does on a GPU; here its parts run on the CPU, except for CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstage.torch.environment import pin

SCRIPTS = Path(__file__).parents[2] / "scripts"
PARTS = ("fused", "forks", "steps", "costs", "chains", "search")  # of three, the first is in the default suite


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import gpu_check

        yield gpu_check


def flags(found: Any) -> Iterator[bool]:
    """Yield all that is true or false in a part's findings."""
    for value in found.values():
        if isinstance(value, dict):
            yield from flags(value)
        elif isinstance(value, bool):
            yield value


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_gpu_check_runs_on_a_cpu(part: str, script: Any) -> None:
    pin()
    found = script.check(torch.device("cpu"), script.SMALL, (part,))
    assert "error" not in found["parts"][part], found["parts"][part]["traceback"]
    assert all(flags(found["parts"][part]["found"]))
    assert (part in ("forks", "fused", "search")) == any(flags(found["parts"][part]["found"]))
    if part in ("forks", "steps", "search"):
        assert found["parts"][part]["found"]["mlp graphed"] == "CUDA graphs need a GPU, and this trains on cpu"


def test_a_part_of_gpu_check_that_fails_reports_its_error_and_the_other_parts_continue(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: torch.device, sizes: Any) -> dict[str, Any]:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setitem(script.PARTS, "forks", fails)
    monkeypatch.setitem(script.PARTS, "costs", lambda device, sizes: {"seconds": 1.0})
    found = script.check(torch.device("cpu"), script.SMALL, ("forks", "costs"))["parts"]
    assert found["forks"]["error"] == "RuntimeError: no kernel image is available"
    assert found["costs"]["found"] == {"seconds": 1.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_prints_one_line_without_a_gpu(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--json", str(tmp_path / "gpu.json")])
    assert script.main() == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu_check: no GPU here")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("model", ["mlp", "small_cnn", "resnet20", "gpt"])
def test_gpu_check_finds_every_model_exact_on_a_gpu(model: str, tmp_path: Path) -> None:
    """In a process of its own, since deterministic algorithms are a setting of the process."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--small", "--models", model, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(file.read_text())["parts"]
    assert parts.keys() == {*PARTS}
    assert all(flag for part in ("forks", "fused", "search") for flag in flags(parts[part]["found"]))
