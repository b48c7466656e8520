"""Side effects of a recorded step: what it changes besides the tensors that it is given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpstage.torch.backends.stacked import NeedsPython, NotStackable
from hpstage.torch.loop import TorchLoop

_OWN = re.compile(r"(model|optimizer)(?![\w:])")  # "model:" is a user's module of that name


@contextmanager
def put_back(who: str, loops: Sequence[TorchLoop]) -> Iterator[None]:
    """Watch all that training can reach. What has changed on exit is as it was before, and refused by name.

    Raises:
        NeedsPython: a model or an optimizer has changed: each has its own, and can be trained by itself.
        NotStackable: something has changed that all of them share.
    """
    before = [(loop, loop.portrait(), loop.snapshot()) for loop in loops]
    try:
        yield
    finally:
        changed: set[str] = set()
        for loop, described, snapshot in before:
            now = loop.portrait()
            paths = {path for path in described.keys() | now.keys() if described.get(path) != now.get(path)}
            if paths:
                loop.put_back(snapshot)
            changed |= paths
        if changed:
            kind = NeedsPython if all(map(_OWN.match, changed)) else NotStackable
            first = ", ".join(sorted(changed)[:3])
            raise kind(f"{who} changes {first}; in a stack, Python code runs once, not at each step")
