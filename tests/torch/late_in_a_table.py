"""Taken out of ``sys.modules``."""

ticks = 0


def tick() -> int:
    global ticks
    ticks += 1
    return ticks
