"""The hooks of pre-commit are the checks with which CI begins, run with what is installed."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.repository.test_rooms import ROOT


@pytest.fixture
def hooks() -> list[dict[str, Any]]:
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local", "hooks of a repository would be downloaded"
    return local["hooks"]  # type: ignore[no-any-return]


def test_the_pre_commit_hooks_are_the_ruff_checks_of_ci(hooks: list[dict[str, Any]]) -> None:
    assert (ROOT / ".ci" / "run").read_text().endswith(" exec ./scripts/test\n")
    checks = [line.strip() for line in (ROOT / "scripts" / "test").read_text().splitlines()]
    assert [hook["entry"] for hook in hooks] == [line for line in checks if line.startswith(".venv/bin/ruff ")]


def test_the_pre_commit_hooks_download_nothing_and_check_all_files(hooks: list[dict[str, Any]]) -> None:
    assert {hook["language"] for hook in hooks} == {"system"}
    assert not any(hook["pass_filenames"] for hook in hooks)
