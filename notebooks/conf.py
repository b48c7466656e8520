"""Sphinx builds the book: sphinx-build -W notebooks FOLDER. Notebooks and code are run by tests, not here."""

from __future__ import annotations

import hpstage

project = "hpstage"
author = "the hpstage developers"
release = hpstage.__version__
extensions = [
    *("myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"),
    *("sphinx_copybutton", "sphinx_design"),
]
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["porting/*", "recorded/*"]
nb_execution_mode = "off"
myst_heading_anchors = 3
highlight_language = "text"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_title = f"hpstage {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
