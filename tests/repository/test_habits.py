"""CHANGELOG, the workflow of CI and public names have the form that the field expects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from datetime import date
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

import hpstage
from tests.conftest import _leave_out_other_shares
from tests.repository.test_rooms import ROOT

KINDS = ["Added", "Changed", "Fixed", "Removed"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNRELEASED, *RELEASES = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
GITHUB = ROOT / ".github"


def kinds_in(section: str) -> list[str]:
    return re.findall(r"^### (.*)$", section, re.MULTILINE)


def test_unreleased_changes_in_the_changelog_have_four_headings() -> None:
    assert UNRELEASED.splitlines()[0] == "Unreleased"
    assert kinds_in(UNRELEASED) == KINDS
    above = UNRELEASED.partition("### ")[0]
    assert "- " not in above, "a line under Unreleased stands under one of the headings"


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.split()[0])
def test_a_release_in_the_changelog_has_a_date_and_its_headings_in_order(release: str) -> None:
    [(version, day)] = re.findall(r"^(\d+\.\d+\.\d+) \((.*)\)$", release.splitlines()[0])
    assert version and date.fromisoformat(day)
    found = kinds_in(release)
    assert found and found == [kind for kind in KINDS if kind in found]


def test_the_newest_release_in_the_changelog_is_the_version_of_the_package() -> None:
    versions = [tuple(map(int, release.split()[0].split("."))) for release in RELEASES]
    assert versions == sorted(versions, reverse=True)
    assert RELEASES[0].split()[0] == hpstage.__version__ == PROJECT["version"]


def test_ci_runs_its_script_on_every_python_from_the_oldest_to_3_14() -> None:
    job: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert {"run": ".ci/run"} in job["steps"]
    nightly: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / "nightly.yml").read_text())["jobs"]["test"]
    assert nightly["strategy"] == job["strategy"]
    assert {"run": ".ci/run --all"} in nightly["steps"]


def test_each_test_marked_ci_is_in_one_share_of_ci_and_every_other_test_in_all_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = [{"ci"} if number % 3 else {"ci", "slow"} if number % 2 else set() for number in range(60)]
    tests: list[Any] = [SimpleNamespace(get_closest_marker={mark: mark for mark in of}.get) for of in marks]
    deselected: list[list[Any]] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.append(items))
    kept = []
    for k in range(5, 10):
        monkeypatch.setenv("HPSTAGE_CI_SHARE", f"{k}/5")
        kept.append(list(tests))
        _leave_out_other_shares(SimpleNamespace(hook=hook), kept[-1])
        assert sorted(map(id, kept[-1] + deselected[-1])) == sorted(map(id, tests))
    times = Counter(id(test) for share in kept for test in share)
    assert [times[id(test)] for test in tests] == [1 if of == {"ci"} else 5 for of in marks]
    assert len({len(share) for share in kept}) == 1


def test_successive_ci_runs_cover_each_case_of_a_ci_one_in_test_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_modifyitems\n")
    (tmp_path / "test_cases.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.ci\n@pytest.mark.ci_one_in(3)\n@pytest.mark.parametrize('case', range(7))\n"
        "def test_case(case): ...\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-m", "not slow", "-p", "no:cacheprovider", str(tmp_path)]
    ran: Counter[str] = Counter()
    for turn in range(3):
        environment = os.environ | {"HPSTAGE_CI_SHARE": f"{turn}/1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        ran.update(line.split()[0] for line in done.stdout.splitlines() if " PASSED " in line)
    assert len(ran) == 7 and {*ran.values()} == {1}


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [("workflows", "workflows/*.yml"), ("issue-forms", "ISSUE_TEMPLATE/[!c]*"), ("issue-config", "ISSUE_TEMPLATE/c*")],
)
def test_github_workflow_and_issue_files_match_their_schemas(schema: str, pattern: str) -> None:
    pytest.importorskip("check_jsonschema")
    files = sorted(GITHUB.glob(pattern))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.github-{schema}"]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    assert files and done.returncode == 0, done.stdout


PACKAGES = [hpstage, *(found for found in map(hpstage.__getattr__, hpstage.__all__) if isinstance(found, ModuleType))]


@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__)
def test_dir_lists_only_public_names(module: ModuleType) -> None:
    assert dir(module) == sorted({*module.__all__, *(["__version__"] if module is hpstage else [])})
    assert all(hasattr(module, name) for name in module.__all__)


def test_every_error_and_every_entry_of_the_reference_is_exported() -> None:
    errors = {
        name
        for name, found in vars(hpstage.errors).items()
        if isinstance(found, type) and found.__module__ == "hpstage.errors"
    }
    assert errors == set(hpstage.errors.__all__)
    reference = "".join(page.read_text() for page in sorted((ROOT / "notebooks").glob("reference*.md")))
    assert set(re.findall(r":: hpstage\.(\w+)$", reference, re.MULTILINE)) <= set(hpstage.__all__)


def test_the_docstring_of_a_trainable_lists_every_attribute() -> None:
    trainable = hpstage.torch.TorchTrainable
    public = [name for name in vars(trainable)["__annotations__"] if not name.startswith("_")]
    listed = re.findall(r"^        (\w+): ", trainable.__doc__.partition("Attributes:")[2], re.MULTILINE)
    assert listed == public


def test_the_repository_root_holds_only_the_expected_files_and_folders() -> None:
    """What is tracked there; a sweep of all new files once committed downloaded packages."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {line.partition("/")[0] for line in tracked.splitlines()}
    folders = {"hpstage", "cluster", "algos", "notebooks", "tests", "scripts"}
    files = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    assert {name for name in names if not name.startswith(".")} == folders | files
