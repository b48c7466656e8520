"""README and the pages of the book: their code runs, from the first block to the last (fragments are marked
``{code-block}``), their links lead somewhere, and Sphinx makes a book of them without a warning."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hpstage
from hpstage.trainable import Trainable

ROOT = Path(hpstage.__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.md"))]
# TRL and PEFT use these names of transformers.
OF_LIBRARIES = [
    f"-Wignore:`{name}` is deprecated:FutureWarning" for name in ("gradient_checkpointing", "is_gradient_checkpointing")
]
RUN = [page for page in PAGES if "\n```python\n" in page.read_text()]


@pytest.mark.ci
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_code_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}_page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "notebooks")])
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", *OF_LIBRARIES, str(script)],
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
def test_links_of_a_page_lead_to_existing_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "module", [hpstage, hpstage.boosting, hpstage.report, hpstage.optuna, hpstage.cluster, hpstage.torch]
)
def test_every_public_name_is_documented_and_in_the_reference(module: ModuleType) -> None:
    listed = "".join(page.read_text() for page in sorted((ROOT / "notebooks").glob("reference*.md")))
    for name in module.__all__:
        found = getattr(module, name)
        if isinstance(found, ModuleType):
            continue
        assert found.__doc__, name
        assert re.search(rf":: hpstage\.(\w+\.)?{name}$", listed, re.MULTILINE) or name == "Schedule", name
        if isinstance(found, type):
            own = [one for one in vars(found) if not one.startswith("_") and callable(getattr(found, one))]
            bare = {one for one in own if not inspect.getdoc(getattr(found, one))}
            assert bare <= vars(Trainable).keys(), name  # documented at the port


def test_the_readme_has_at_most_8000_characters() -> None:
    assert len(re.sub("<!--.*?-->", "", (ROOT / "README.md").read_text())) <= 8_000


@pytest.mark.ci
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
