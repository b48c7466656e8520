"""The interactive stage tree as a widget for notebooks. A click trains a branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from hpstage.accounting.book import Book
from hpstage.errors import HpstageError, UsageError
from hpstage.errors.text import clean
from hpstage.report.tree.embed import height_of, tree_page
from hpstage.schedule.assignments import values_of

Train = Callable[[str, int, Mapping[str, Any]], str]
"""Trains a branch, given the trial's id, the step and the values after it. Returns a text about the branch to show."""


class BranchingTree(anywidget.AnyWidget):
    """The stage tree of a book. Branches that the user starts are trained in the kernel, which is busy until then.

    Args:
        train: trains a branch.
        reopen: returns the book with the branches trained since.
    """

    _esm = Path(__file__).with_name("widget.js")
    page = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int().tag(sync=True)
    state = traitlets.Unicode().tag(sync=True)

    def __init__(self, book: Book, train: Train, reopen: Callable[[], Book]) -> None:
        super().__init__(page=tree_page(book), height=height_of(book), state="")
        self._train = train
        self._reopen = reopen
        self.on_msg(self._received)

    def _received(self, _: object, content: Mapping[str, Any], buffers: object) -> None:
        trial, at, text = str(content["trial"]), str(content["at"]), str(content["values"])
        self.state = f"Training a branch of trial {clean(trial)} at step {clean(at)}: {clean(text)}"
        try:
            if not at.isdecimal():
                raise UsageError(f"{clean(at)!r} is not a step; give a whole number")
            self.state = self._train(trial, int(at), values_of(_assignments(text)))
        except HpstageError as error:
            self.state = str(error)
        except KeyboardInterrupt:
            self.state = "Interrupted. Train the same branch again to resume."
        else:
            book = self._reopen()
            self.height, self.page = height_of(book), tree_page(book)


def _assignments(text: str) -> list[str]:
    """Split ``lr=0.03, batch_size=256`` at commas outside of brackets."""
    parts, depth, begun = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[begun:i])
            begun = i + 1
    return [part.strip() for part in (*parts, text[begun:]) if part.strip()]
