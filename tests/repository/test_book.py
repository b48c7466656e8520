"""The pages of the book: their code runs, from the first block to the last, and their links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpstage

ROOT = Path(hpstage.__file__).parent.parent
PAGES = sorted((ROOT / "notebooks").glob("*.md"))
SHORT = {"models", "optuna", "wsd"}
"""Pages in the default suite. The others train longer, or import Lightning or transformers: .ci/run has them, too."""


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[] if p.stem in SHORT else pytest.mark.slow) for p in PAGES]
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}_page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "notebooks")])
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr and "is deprecated" not in ended.stderr
    assert not re.search("^(WARNING|Trial .* failed)", ended.stderr, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
