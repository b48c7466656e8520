"""Workers of a run find the files of tests with their assertions rewritten already."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.bytecode import REWRITES, rewrite_ahead


@pytest.mark.skipif(not REWRITES, reason="pytest's own functions for this are known for versions 8 and 9")
def test_a_test_file_rewritten_ahead_is_the_one_that_pytest_imports(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_it():\n    assert sum([1]) == 1\n")
    cached = rewrite.get_cache_dir(file) / f"test_it{rewrite.PYC_TAIL}"
    assert rewrite._read_pyc(file, cached) is None
    rewrite_ahead(file, pytestconfig)
    code = rewrite._read_pyc(file, cached)
    assert code is not None and "@pytest_ar" in code.co_names
    file.write_text("def test_it():\n    assert sum([2]) == 12\n")
    assert rewrite._read_pyc(file, cached) is None
