"""The interactive tree on an open page: what it says, and what a user does with it."""

from __future__ import annotations

from typing import Any

_FIGURE = """(() => {
  for (const document of Bokeh.documents)
    for (const model of document._all_models.values()) if (model.hpstage) return model
})()"""


class Tree:
    def __init__(self, page: Any, trials: int = 1) -> None:
        self.page = page
        page.wait_for_function(f"trials => {_FIGURE}?.hpstage.size().trials >= trials", arg=trials)

    def ask(self, what: str) -> Any:
        """The value of an expression of ``tree``."""
        return self.page.evaluate(f"() => {{ const fig = {_FIGURE}, tree = fig.hpstage; return {what} }}")

    def wait(self, what: str) -> None:
        self.page.wait_for_function(f"() => {{ const fig = {_FIGURE}, tree = fig?.hpstage; return tree && ({what}) }}")

    def find(self, text: str) -> None:
        box = self.page.get_by_placeholder("Find: trial 212")
        box.fill(text)
        box.press("Enter")

    def point(self, branch: int, share: float = 0.5) -> tuple[float, float]:
        """Where a branch is in the window, so far along it."""
        x, y = self.page.evaluate(
            f"""([i, share]) => {{
                const fig = {_FIGURE}, view = Bokeh.index.find_one(fig), place = fig.hpstage.place(i)
                const box = view.canvas_view.el.getBoundingClientRect()
                return [box.left + view.frame.x_scale.compute(place.x + share * (place.right - place.x)),
                        box.top + view.frame.y_scale.compute(place.y)]
            }}""",
            [branch, share],
        )
        return x, y

    def click(self, branch: int, share: float = 0.5) -> None:
        self.page.mouse.click(*self.point(branch, share))

    def tap(self, branch: int, share: float = 0.5) -> None:
        self.page.touchscreen.tap(*self.point(branch, share))

    @property
    def drawer(self) -> Any:
        return self.page.locator(".hpstage-drawer")

    def read(self, selector: str = "") -> list[str]:
        """The texts of elements in the drawer, of all if none are selected, also of those not drawn yet.

        ``inner_text`` leaves out what the page has not rendered: with ``content-visibility: auto`` that is every card
        until the next frame.
        """
        texts = "selector => Array.from(document.querySelectorAll(selector), e => e.textContent)"
        within = f".hpstage-drawer {selector or '*:not(:has(*))'}"
        return [str(text) for text in self.page.evaluate(texts, within)]
