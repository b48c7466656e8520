"""Every script runs, at a tiny size: nobody but their readers would notice that one has stopped to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"

TINY = {
    "bench_adapters": "--quick --ways stacked peft",
    "bench_algorithms": "--trials 9 --many 60 --repeats 1 --algorithms SHA ASHA",
    "bench_audit": "--audited 1 --seeds 1 --trials 3",
    "bench_boosting": "--rounds 5 --rows 500 --repeats 1",
    "bench_budget": "--megabytes 0.1 --trials 3 --algorithms full --budgets 3.1",
    "bench_dashboard": "--rounds 1 --seconds 0.5 --stages 50",
    "bench_elastic": "--models 32 --nodes 2 --steps 2 --repeats 1",
    "bench_engine": "--models mlp --batches 4 --widths 1 2 --rounds 1 --seconds 0.01 --searches 0 --alone",
    "bench_fused_search": "--steps 60 --batch 16 --rounds 1 --inline",
    "bench_gang_makespan": "--kept 0.9 --workers 4 --trials 6",
    "bench_large_states": "--gigabytes 0.02 --budget 0.03 --steps 4",
    "bench_loading": "--workers 2 --milliseconds 0.1 --steps 4 --repeats 1",
    "bench_logs": "",
    "bench_overhead": "--stages 4 --repeats 1 --megabytes 0.1",
    "bench_papers": "--trials 4 --studies --rehearsals 1",
    "bench_peers": "--steps 60 --programs hpstage --algorithms full --rounds 1",
    "bench_planner": "--part insert --sizes 60 --workers 4 --turns 20 --events 100 --trials 20",
    "bench_profile": "--trials 30 --stages 4",
    "bench_recovery": "--times 1 --kinds worker driver",
    "bench_sampler": "--seeds 1 --spaces wsd",
    "bench_scaling": "--shape grid --trials 4",
    "bench_simulation": "--trials 8 --workers 4 --stages 60 --studies 2 --rounds 1",
    "bench_start": "--rounds 1",
    "bench_states": "--megabytes 0.1 --rounds 2",
    "bench_status": "--stages 60",
    "bench_store": "--events 60 --seconds 0.1 --replay 60 --stages 60 --processes 1 2",
    "bench_studies": "--rounds 1",
    "bench_tree_aware": "--seeds 1 --workers 1",
    "bench_workers": "--trials 12 --workers 9",
    "bench_worker_speed": "--rounds 1",
    "chaos": "--minutes 0.1",
    "demo_digits": "--quiet",
    "example_function": "",
    "example_jax": "",
    "example_keras": "",
    "example_sklearn": "",
    "gpu_check": "--small",
    "matrix_inputs": "--every 20",
    "pictures": "--help",
    "record": "--help",
}

ALL_PARTS = {
    "bench_adapters": "--quick",
    "bench_algorithms": "--trials 9 --many 60 --repeats 1",
    "bench_recovery": "--times 1",
    "bench_sampler": "--seeds 1",
}
"""What above is left to a part of what the script does: the others are slow."""

QUICK = {
    *(
        "bench_adapters",
        "bench_algorithms",
        "bench_boosting",
        "bench_budget",
        "bench_dashboard",
        "bench_gang_makespan",
        "bench_overhead",
        "bench_planner",
        "bench_profile",
    ),
    *("bench_recovery", "bench_sampler", "bench_simulation", "bench_states", "bench_status", "bench_store"),
    *("bench_logs", "matrix_inputs", "example_function", "pictures", "record"),
}
"""Those that end within a minute on two cores; the others take minutes, and are slow."""
PARTS = {
    "adapter_task",
    "command_line",
    "engine_models",
    "figures",
    "fused_search",
    "gestures",
    "growing_tree",
    "matrix_subjects",
    "planner_load",
    "planted_faults",
    "programs",
    "screenshots",
    "small_cnn",
}
"""What other scripts import."""


def test_every_script_has_arguments_for_a_tiny_run() -> None:
    assert TINY.keys() | PARTS == {path.stem for path in SCRIPTS.glob("*.py")}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            pytest.param(name, options, marks=pytest.mark.ci if name in QUICK else pytest.mark.slow, id=name)
            for name, options in TINY.items()
        ),
        *(pytest.param(*item, marks=pytest.mark.slow, id=f"{item[0]}, all") for item in ALL_PARTS.items()),
    ],
)
def test_a_script_runs_at_a_tiny_size(name: str, options: str, tmp_path: Path) -> None:
    for needed in ("jax", "keras", "sklearn"):
        if needed in name and importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), *options.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_an_interrupted_demo_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import demo_digits

    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_digits, "compare", stopped)
    monkeypatch.setattr(sys, "argv", ["demo_digits.py", "--folder", str(tmp_path / "a demo"), "--quiet"])
    assert demo_digits.main() == 130
    assert f"./scripts/demo --folder '{tmp_path}/a demo' --quiet" in capsys.readouterr().err


def test_the_readme_begins_with_the_demo_and_test_commands() -> None:
    first_block = (ROOT / "README.md").read_text().split("```")[1]
    commands = [line.partition("#")[0].strip() for line in first_block.strip().splitlines()]
    assert commands == ["./scripts/demo", "./scripts/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)
