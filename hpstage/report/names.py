"""Names that users typed, as they are shown."""

from __future__ import annotations

_MOST = 60  # characters of a name


def plain(name: object, most: int = _MOST) -> str:
    """A name that a user typed, on one line and of at most ``most`` characters."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))
    return text if len(text) <= most else f"{text[: most - 1]}…"
