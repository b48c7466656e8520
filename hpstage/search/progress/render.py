"""Rendering of a view with rich: in a terminal of any width, or exported as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.text import Text

from hpstage.errors.text import writable
from hpstage.search.progress.view import ProgressView, items, name, times, trials

_BAR = (10, 40)
"""Minimum and maximum columns of the bar; it is omitted if there is less room."""
_BETWEEN = " · "


def render(view: ProgressView) -> Rendered:
    """Return a renderable of the view for rich's consoles. Names are shown literally, not as markup."""
    return Rendered(view)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A view on as many lines as the console's width requires."""

    view: ProgressView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text in self._lines(console, options):
            text.truncate(options.max_width, overflow="crop" if options.ascii_only else "ellipsis")
            yield text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(20, options.max_width), options.max_width)

    def _lines(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = options.max_width
        between = " - " if options.ascii_only else _BETWEEN
        yield self._header(console, options)
        for line in _packed(
            [writable(text, options.encoding) for text in (*items(self.view), times(self.view))], width, between
        ):
            text = Text(line)
            text.highlight_regex(r"(?<![\w\\])\d[\d,.:]*(e[-+]\d+)?(?!\w)", "bold")
            text.highlight_regex(r"\b[\d,]+ failed", "bold red")
            yield text

    def _header(self, console: Console, options: ConsoleOptions) -> Text:
        """Return the name, the bar and the number of trials, as far as there is room."""
        view, width = self.view, options.max_width
        count = trials(view)
        left = width - len(count) - 2
        known = writable(name(view), options.encoding)
        if cell_len(known) > max(8, left // 2):
            known = set_cell_size(known, max(8, left // 2) - 1).rstrip() + ("~" if options.ascii_only else "…")
        header = Text(known, "bold", end="")
        columns = min(_BAR[1], left - cell_len(known) - 2)
        if view.n_trials and columns >= _BAR[0]:
            header.append("  ")
            done, whole = view.finished, view.n_trials
            if whole == 1 and not done:  # a single run's bar moves by its steps
                done, whole = view.steps_trained, max(1, view.steps_trained + view.steps_left)
            bar = ProgressBar(
                whole,
                min(done, whole),
                width=columns,
                complete_style="cyan",  # distinguishable from the bar's grey with 16 colours
                finished_style="green",
            )
            for segment in console.render(bar, options.update(width=columns)):
                header.append(segment.text.rstrip("\n"), segment.style)
            header.append(" " * (cell_len(known) + 2 + columns - cell_len(header.plain)))
        header.append(f"  {count}", "bold")
        header.end = "\n"
        return header


def _packed(texts: Sequence[str], width: int, between: str) -> list[str]:
    """Pack the texts in order on as few lines of ``width`` columns as possible. Texts that are too wide are not cut."""
    lines: list[str] = []
    for text in texts:
        if lines and cell_len(lines[-1] + between + text) <= width:
            lines[-1] += between + text
        else:
            lines.append(text)
    return lines
