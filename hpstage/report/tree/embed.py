"""The interactive stage tree as a page of its own, which loads nothing, and as a frame of that page.

A frame is what a report and a notebook show: styles and scripts of the tree and of what is around it stay apart.
"""

from __future__ import annotations

import html

from hpstage.report.book import Book
from hpstage.report.tree.layout import lay_out

_HEIGHT = 760  # pixels of a frame; what is longer is scrolled
_STYLE = ":root { color-scheme: light dark } body { margin: 0; font: 14px system-ui, sans-serif }"


def tree_page(book: Book) -> str:
    """Return the tree as a self-contained HTML page.

    Raises:
        ImportError: bokeh is not installed.
    """
    from bokeh.document import Document
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    from hpstage.report.tree.figure import component

    doc = Document()
    component(lay_out(book), doc)
    page = file_html(doc, INLINE, title="hpstage: stage tree", suppress_callback_warning=True)
    return page.replace("<head>", f"<head><style>{_STYLE}</style>", 1)


def frame(book: Book) -> str:
    """Return the tree as an HTML element; ``""`` without bokeh."""
    try:
        page = tree_page(book)
    except ImportError:
        return ""
    return (
        f'<iframe title="Stage tree" sandbox="allow-scripts" style="width: 100%; height: {_HEIGHT}px; border: 0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )
