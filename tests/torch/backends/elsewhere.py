"""Run as a script, it trains compiled in a process of its own, and prints what must agree."""

from __future__ import annotations

import json

import torch

from tests.torch.backends.forking import by, compiled_of
from tests.torch.backends.odd_programs import Tiny
from tests.torch.trainables import STEPS, advance, fresh, outcome


def main() -> None:
    torch.set_num_threads(1)
    trainable = advance(fresh(by("compiled", Tiny)()), 0, STEPS)
    print(json.dumps([compiled_of(trainable).compiled, outcome(trainable)]))  # noqa: T201


if __name__ == "__main__":
    main()
