"""The interactive stage tree as a page and a frame: it loads nothing, and what users typed stays text."""

from __future__ import annotations

import html
import math
import re
from html.parser import HTMLParser

import optuna
import pytest

import hpstage
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.report import open_book
from hpstage.report.tree.embed import Tree, frame, tree_page
from hpstage.store import MemoryJournal

pytest.importorskip("bokeh")
optuna.logging.set_verbosity(optuna.logging.ERROR)

HOSTILE = "</script><script>window.harmed = 1</script><img src=x onerror=alert(1)> \"'` \N{GRINNING FACE}"
LONG = HOSTILE + "long " * 40


def hostile(n_trials: int, value: float) -> MemoryJournal:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {LONG: trial.suggest_categorical(LONG, [f"{HOSTILE}{i}" for i in range(4)])}

    study = optuna.create_study(study_name=HOSTILE, direction="minimize")
    journal = MemoryJournal()
    executor = SimulatedExecutor(1, measure=lambda key, step: {HOSTILE: value})
    hpstage.optimize(
        study, object(), space, metric=HOSTILE, steps=4, n_trials=n_trials, executor=executor, store=journal
    )
    return journal


def loaded(page: str) -> list[str]:
    """The addresses that a page names in its elements; what is within a script is none."""
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value or "" for name, value in attrs if name in ("src", "href"))

    Reader().feed(page)
    return found


@pytest.mark.ci
@pytest.mark.parametrize(("n_trials", "value"), [(1, 0.5), (4, math.inf), (4, 1e308)])
def test_text_typed_by_users_cannot_inject_html_into_the_stage_tree_page(n_trials: int, value: float) -> None:
    page = tree_page(open_book(hostile(n_trials, value)))
    assert "window.harmed" in page  # as data
    assert HOSTILE not in page and "<script>window.harmed" not in page and "<img src=x" not in page


@pytest.mark.ci
def test_the_stage_tree_page_loads_no_resources_and_is_embedded_whole_in_a_frame() -> None:
    book = open_book(hostile(4, 0.5))
    page = tree_page(book)
    assert not loaded(page)
    framed = re.fullmatch(
        r'<iframe title="Stage tree" sandbox="allow-scripts" [^>]*srcdoc="([^"]*)"></iframe>', frame(book)
    )
    assert framed is not None and "window.harmed" in html.unescape(framed.group(1))
    assert Tree(book)._repr_html_().startswith("<iframe")
