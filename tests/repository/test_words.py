"""hpstage speaks its field's words: those of Optuna, PyTorch, Dask and the papers, one for each meaning.

Sources, scripts, tests, pages, CHANGELOG and notebooks have none of the other words, but for the texts of ``ALLOWED``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.test_rooms import ROOT

INSTEAD = {
    r"told|tells?|telling": "reported (of results), given (of arguments), logged",
    r"(?:say|says|said)[ _]once": "warn once, log once",
    r"heard": "received",
    r"asks|asked": "requests, requested",
    r"distinct[ _](?:steps|ones)|steps[ _]distinct": "unique steps",
    r"under way|not[ _]begun": "running, queued",
    r"\w+_alone|(?:train|trains|trained) alone|would have (?:been )?(?:used|taken)": "without sharing",
    r"parts? (?:from|them|two)|trials? parts?|where (?:they|trials|lines) part": "branch, diverge",
    r"(?:go|goes|going|went) on": "continue, resume",
    r"kept (?:at|states?)": "checkpoint at, saved state",
    r"heads?|lines? of training": "ready stages, branches",
    r"lanes?": "slots",
    r"bereft|struck[ _]off|lent|alike|anew|beside|meanwhile": (
        "orphaned, declared dead, borrowed, similar, again, next to, concurrently"
    ),
    r"things?|what is there": "the object's name",
    r"worker-hours (?:paid|used)|\w+_paid|paid_\w+": "allocated and busy worker-hours",
    r"hyper-parameters?": "hyperparameter",
}
OTHER = re.compile("|".join(rf"(?<![a-z/])(?:{words})(?![a-z])(?!:)" for words in INSTEAD), re.IGNORECASE)

ALLOWED = {
    "never trains the same thing twice": "the tag line",
    "beside_alone": "the name of a picture",
    "head node": "of a cluster, in a user's report",
    "tell; attributes": "Optuna's ask and tell",
    "study.tell": "Optuna's ask and tell",
    "num_attention_heads": "an argument of transformers'",
    '"lanes" in vars(cls)': "a deprecated name",
    ".lanes is deprecated": "a deprecated name",
    "cls.lanes": "a deprecated name",
    '.lanes", "slots")': "a deprecated name",
    '("lanes", "members"': "a deprecated name",
    "trainable.lanes": "a deprecated name",
    "AuditingExecutor(2).lanes": "a deprecated name",
    "SimpleNamespace(lanes=": "a deprecated name",
    ".tell()": "where a file is, or Optuna's ask and tell",
    "none that tells": "part of an environment's key",
    "beside_eager": "an attribute of a public report",
    '"told" in vars(cls)': "a deprecated name",
    ".told is deprecated": "a deprecated name",
    "cls.told": "a deprecated name",
    '.told", "reported")': "a deprecated name",
    "New().told(": "a deprecated name",
    "steps_asked": "a public name: of savings, of tables, in the JSON of status",
    "seconds_alone": "a public name: of savings, of tables, in the JSON of status",
    "gpu_hours_alone": "a public name of savings",
    "paid_seconds": "a public name of savings",
    "seconds_paid": "a public name: in the JSON of status",
    "NOT BEGUN": "a state of trials in the JSON of status",
    "beside_training": "an attribute of checkpoint stores",
    "hpstage_alone_": "a metric",
    "steps_distinct": "a metric",
    "<head>": "of an HTML page",
    "anew=discard": "an argument of calls between versions",
    "Optuna: tell": "Optuna's ask and tell",
    'optuna.Study, ("tell",)': "Optuna's ask and tell",
    '"HEAD"': "of git",
    "GPT(layers=2, heads=2": "heads of attention",
    "heads=6": "heads of attention",
    "anew=True": "an argument of calls between versions",
    "def told(self, index": "a deprecated name",
    "def lanes(self)": "a deprecated name",
    "storage=storage).tell(": "Optuna's ask and tell",
    "n_head=2": "heads of attention",
    '"n_head"': "heads of attention",
    "GPT(layers=1, heads=2": "heads of attention",
    "``tell``": "Optuna's ask and tell",
    "ask_and_tell": "Optuna's ask and tell",
    ".head(": "of a pandas frame",
    "% for head in": "of a table's header",
    "{{ head }}": "of a table's header",
    "[head, body]": "of a table's header",
    "head.cells": "of a table's header",
    "head.querySelectorAll": "of a table's header",
    "document.head": "of an HTML page",
}
"""Texts in which the words have their other sense."""
FILES_ALLOWED = {
    "hpstage/workloads/bert.py": "heads of attention",
    "hpstage/workloads/gpt.py": "heads of attention",
    "hpstage/workloads/mixed_gpt.py": "heads of attention",
    "hpstage/workloads/tuned_bert.py": "heads of attention",
    "hpstage/workloads/tuned_gpt.py": "heads of attention",
    "tests/workloads/cases.py": "heads of attention",
    "tests/hosts/lab.py": "the head node of a cluster",
    "tests/hosts/test_hosts.py": "the head node of a cluster",
}

ON_PAGES = {
    r"\d x (?=[a-z])|\d x \d": "a number with ×: 2.9×",
    r"->": "an arrow: →",
    r"What may break|Before spending|How far each trial|Cheaper steps|^# Where it trains": "the field's title",
}
"""Further words of pages, outside of code."""


def sources() -> Iterator[Path]:
    for folder in ("hpstage", "cluster", "algos", "scripts", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if (
                path.suffix in SUFFIXES
                and path != Path(__file__)
                and not any(above.is_symlink() for above in path.parents)
            ):
                yield path


SUFFIXES = {".py", ".html", ".js"}
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "notebooks").glob("*.md"))]


WRAPPED = re.compile(r'"\s*\n\s*f?"|\n\s*(?:#:? )?(?=[a-z])(?!from |import )')
"""Where a string or a sentence continues on the next line."""


def others_in(text: str) -> list[str]:
    text = WRAPPED.sub(lambda cut: "" if cut[0].endswith('"') else " ", text)
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    return OTHER.findall(text)


@pytest.mark.ci
def test_no_source_file_uses_a_replaced_word() -> None:
    found = {
        name: words
        for path in sources()
        if (name := str(path.relative_to(ROOT))) not in FILES_ALLOWED and (words := others_in(path.read_text()))
    }
    assert not found, f"for these words INSTEAD has those of the field: {found}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_uses_a_replaced_word(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|`[^`]*`|<!--.*?-->|\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    further = [one for words in ON_PAGES for one in re.findall(words, prose, re.MULTILINE)]
    assert others_in(prose) + further == []


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda notebook: notebook.stem)
def test_no_notebook_uses_a_replaced_word(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert others_in("\n\n".join("".join(cell["source"]) for cell in cells)) == []


@pytest.mark.ci
def test_every_allowed_text_is_still_in_a_source_or_page() -> None:
    texts = [path.read_text() for path in (*sources(), *PAGES, *(ROOT / "notebooks").glob("*.ipynb"))]
    assert [allowed for allowed in ALLOWED if not any(allowed in text for text in texts)] == []


EXAMPLES = ["was told", "steps_asked", "distinct steps", "not begun", "trained alone", "where trials part", "goes on"]


@pytest.mark.parametrize(
    "text", [*EXAMPLES, "kept state", "ready heads", "a lane", "meanwhile", "things", "seconds_paid"]
)
def test_a_replaced_word_is_found_in_a_text(text: str) -> None:
    assert OTHER.search(text)


@pytest.mark.parametrize("text", ["foretold", "excellent", "a task", "tcp://head:8786", "silent", "unique steps"])
def test_a_replaced_word_within_another_word_is_not_found(text: str) -> None:
    assert not OTHER.search(text)
