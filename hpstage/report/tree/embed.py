"""The interactive stage tree as a self-contained HTML page, and as a frame that shows this page.

Reports and notebooks embed the frame: styles and scripts of the tree and of the page around it do not interfere.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from hpstage.accounting.book import Book
from hpstage.report.tree.book_rows import rows_of
from hpstage.report.tree.rows import HEIGHT

_LEAST, _ROW = 340, 22  # pixels: minimum height of a figure, which the drawer needs; height of each branch
_AROUND = 96  # pixels of a frame around the figure, for the search box and margins
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ID = re.compile(rf'(?<!\\)"(?:id|docid|{_UUID.pattern})":\s*"({_UUID.pattern})"|\bid="({_UUID.pattern})"')
_STYLE = ":root { color-scheme: light dark } body { margin: 0; font: 14px system-ui, sans-serif }"


def tree_page(book: Book) -> str:
    """Return the tree as a self-contained HTML page.

    Raises:
        ImportError: bokeh is not installed.
    """
    from bokeh.document import Document
    from bokeh.embed import file_html
    from bokeh.resources import INLINE
    from bokeh.settings import settings

    from hpstage.report.tree.figure import TreeFigure

    settings.simple_ids = False
    try:
        doc = Document()
        doc.add_root(TreeFigure(rows_of(book), doc, height=_height(book)).root)
        page = file_html(doc, INLINE, title="hpstage: stage tree", suppress_callback_warning=True)
    finally:
        settings.simple_ids.unset_value()
    return _numbered(page.replace("<head>", f"<head><style>{_STYLE}</style>", 1))


def _numbered(page: str) -> str:
    """Number Bokeh's random identifiers in their order on the page: reports of equal books are then equal.

    Text of users is not changed, since its quotation marks are escaped.
    """
    numbers = {id: f"hpstage-{i}" for i, id in enumerate(dict.fromkeys(a or b for a, b in _ID.findall(page)))}
    return _UUID.sub(lambda found: numbers.get(found.group(), found.group()), page)


@dataclass(frozen=True, slots=True, repr=False)
class Tree:
    """The stage tree of a search, which a notebook shows as the interactive tree."""

    book: Book

    def __repr__(self) -> str:
        return f"Tree(trials={len(self.book.trials)}, branches={len(self.book.branches)})"

    def _repr_html_(self) -> str:
        return frame(self.book) or 'The tree needs bokeh: <code>pip install "hpstage[dashboard]"</code>'


def frame(book: Book) -> str:
    """Return the tree as an HTML element; ``""`` without bokeh."""
    try:
        page = tree_page(book)
    except ImportError:
        return ""
    style = f"width: 100%; height: {height_of(book)}px; border: 0"
    return f'<iframe title="Stage tree" sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def height_of(book: Book) -> int:
    return _AROUND + _height(book)


def _height(book: Book) -> int:
    """Return the height of the figure in pixels, smaller for trees with few branches."""
    return max(_LEAST, min(HEIGHT, _ROW * (len(book.branches) + 6)))
