"""README and the pages of the book: their code runs, from the first block to the last (fragments are marked
``{code-block}``), their links lead somewhere, and Sphinx makes a book of them without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpstage

ROOT = Path(hpstage.__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.md"))]
SHORT = {"README", "budget", "models", "optuna", "wsd"}
"""Pages in the default suite. The others train longer, or import Lightning or transformers: .ci/run has them, too."""
RUN = [page for page in PAGES if "\n```python\n" in page.read_text()]


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem, marks=[] if p.stem in SHORT else pytest.mark.slow) for p in RUN]
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


def test_readme_is_two_screens() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8_000


def test_the_book_is_built_without_warnings_and_has_every_page(tmp_path: Path) -> None:
    options = ["-W", "--keep-going", "-q", "-d", str(tmp_path / "trees"), "-b", "html"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(ROOT / "notebooks"), str(tmp_path / "book")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    sources = [*PAGES[1:], *(ROOT / "notebooks").glob("*.ipynb")]
    assert {page.stem for page in sources} <= {page.stem for page in (tmp_path / "book").glob("*.html")}
