"""A headless browser: the system's chromium, else playwright's own. Without one, tests that need it are skipped.

``HPSTAGE_SCREENSHOTS=FOLDER`` keeps pictures of what they look at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

Open = Callable[..., Any]


@pytest.fixture(scope="module")  # playwright holds the thread's event loop: the next file's tests may need their own
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as play:
        own = play.chromium.executable_path
        program = next(filter(None, map(shutil.which, _BROWSERS)), own if Path(own).exists() else None)
        if program is None:
            pytest.skip(f"none of {', '.join(_BROWSERS)} is installed (apt-get install chromium), nor playwright's own")
        browser = play.chromium.launch(executable_path=program, headless=True, args=list(_OPTIONS))
        yield browser
        browser.close()


@pytest.fixture
def open_at(browser: Any) -> Iterator[Open]:
    """Opens an address; at the end no page may have raised, logged an error, or requested anything from elsewhere."""
    problems: list[str] = []
    contexts = []

    def open_at(address: str, *own: str, width: int = 1400, height: int = 950, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        allowed = (address, "data:", "blob:", *own)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith(allowed) else problems.append(request.url))
        page.goto(address)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not problems


def keep(page: Any, name: str) -> None:
    folder = os.environ.get("HPSTAGE_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)
