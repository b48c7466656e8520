"""The wheel: built from the tracked files, installed into an empty folder, used away from the source tree."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["hpstage", "cluster", "algos", "pyproject.toml", "README.md", "LICENSE"]

pytestmark = [
    pytest.mark.sampled(8),
    pytest.mark.skipif(
        importlib.util.find_spec("build") is None or importlib.util.find_spec("setuptools") is None,
        reason="needs the packages build and setuptools to make a wheel without a network",
    ),
]


def copy_sources(target: Path) -> None:
    """The tracked files as they lie on the disk, links kept; without git, the folders that make the package."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True) if git() else None
    if listed is not None and listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    else:
        names = [str(p.relative_to(ROOT)) for name in SOURCES for p in (ROOT / name, *(ROOT / name).rglob("*"))]
        names = [name for name in names if not (ROOT / name).is_dir() or (ROOT / name).is_symlink()]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def git() -> bool:
    return shutil.which("git") is not None and (ROOT / ".git").exists()


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    copy_sources(source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", cwd=source)
    [wheel] = (source / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run(*pip, "--target", target, wheel, cwd=target)
    return target


def test_the_wheel_holds_every_source_file_once_under_one_package(wheel):
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    tops = {name.parts[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hpstage"}
    packed = {str(name) for name in names if name.parts[0] == "hpstage"}
    source = wheel.parent.parent
    # By the two links, as an import goes.
    expected = {
        str((Path(folder) / file).relative_to(source))
        for folder, _, files in os.walk(source / "hpstage", followlinks=True)
        for file in files
        if file.endswith(".py")
    }
    assert {name for name in packed if name.endswith(".py")} == expected
    assert {
        "hpstage/py.typed",
        "hpstage/report/page.css",
        "hpstage/report/tree/branches.js",
        "hpstage/report/page.html",
        "hpstage/cluster/executor.py",
        "hpstage/algos/successive_halving.py",
    } <= packed
    assert any(name.name == "LICENSE" for name in names)
    # No file of the source tree is forgotten.
    present = {
        str((Path(folder) / file).relative_to(source))
        for folder, _, files in os.walk(source / "hpstage", followlinks=True)
        for file in files
        if "__pycache__" not in folder
    }
    assert present - {name for name in present if name.endswith((".pyc", ".egg-info"))} <= packed


@pytest.mark.ci
def test_every_module_is_imported_from_the_installed_wheel(installed, tmp_path):
    script = """
import importlib, json, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import hpstage
found = {"hpstage": hpstage.__file__}
for module in pkgutil.walk_packages(hpstage.__path__, "hpstage."):
    found[module.name] = importlib.import_module(module.name).__file__
outside = [name for name in ("cluster", "algos") if importlib.util.find_spec(name) is not None]
print(json.dumps([found, outside]))
"""
    found, outside = json.loads(run(sys.executable, "-c", script, installed, cwd=tmp_path).splitlines()[-1])
    assert {"hpstage.cluster.executor", "hpstage.algos.full_training", "hpstage.torch.loop"} <= set(found)
    assert outside == []
    strays = {name: file for name, file in found.items() if not Path(file).is_relative_to(installed)}
    assert strays == {}


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "cluster" / "deploy").iterdir()))
@pytest.mark.ci_one_in(3)
def test_the_installed_wheel_prints_the_deploy_files_for_clusters(installed, tmp_path, name):
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); from hpstage.__main__ import run; run()"
    printed = run(sys.executable, "-c", script, installed, "deploy", name, cwd=tmp_path)
    assert printed == (ROOT / "cluster" / "deploy" / name).read_text()
    if name == "slurm.sh":
        listed = run(sys.executable, "-c", script, installed, "deploy", cwd=tmp_path)
        assert all(path.name in listed for path in (ROOT / "cluster" / "deploy").iterdir())


def test_a_search_runs_from_the_installed_wheel(installed, tmp_path):
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import optuna, hpstage
optuna.logging.set_verbosity(optuna.logging.ERROR)
class Sum:
    def setup(self, hp): self.total = 0
    def train(self, step, hp): self.total += hp["a"]
    def evaluate(self): return {"total": self.total}
    def state_dict(self): return self.total
    def load_state_dict(self, state): self.total = state
study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"a": [1, 2]}))
result = hpstage.optimize(study, Sum(), lambda trial: {"a": trial.suggest_int("a", 1, 2)}, metric="total", steps=3,
                          n_trials=2, executor=hpstage.InlineExecutor(), store="plan")
print(result.best_value)
"""
    (tmp_path / "search.py").write_text(script)
    assert run(sys.executable, "search.py", installed, cwd=tmp_path).splitlines()[-1] == "6.0"
