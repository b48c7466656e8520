"""Imported by a name that is made up."""

ticks = 0


def tick() -> int:
    global ticks
    ticks += 1
    return ticks
