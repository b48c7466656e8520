"""Edits by name, each a text with a gap ``@@``: with 1 and 2 in it, those of ``decides.txt`` train differently, those
of ``same.txt`` the same."""

from __future__ import annotations

from pathlib import Path

_OTHERS = {
    "{lines}": ("", "\n\n\n"),
    "{passes}": ("", "        pass\n"),
    "{first}": ("def f(): return 1", "def g(): return 2"),
    "{second}": ("def g(): return 2", "def f(): return 1"),
}


def read(file: str) -> dict[str, str]:
    parts = Path(__file__).with_name(file).read_text().split("### ")[1:]
    return {name: text.strip("\n") for name, _, text in (part.partition("\n") for part in parts)}


PRELUDE = Path(__file__).with_name("prelude.txt").read_text()
"""What every edited module begins with."""
DECIDES, SAME = read("decides.txt"), read("same.txt")
LIMITS = {
    "content of a library's object that cannot be pickled": "it may hold what differs between hosts",
}
"""Edits that the key does not show, each with the reason. The book lists them."""


def filled(text: str, value: int) -> str:
    for gap, choices in _OTHERS.items():
        text = text.replace(gap, choices[value - 1])
    return text.replace("@@", str(value))
