"""Randomness as a function of (seed, step): a state then holds no generator and can be forked at any step.

Before each step, the global generators of Python, NumPy and torch are seeded with a key mixed from the seed and the
step; before each sample that a data set computes, with a key mixed from the seed and the sample's position. Each
library has a separate stream: with equal keys, Python and NumPy (both MT19937) would draw related numbers.

So dropout in step 17 draws from torch's generator as ``TorchLoop.train`` (``torch/loop.py``) seeded it by
``rekey(seed, 17)``, after the random numbers that step 17 drew before. Other trainables are seeded by
``training/trainables.py`` and ``training/function.py``. A compiled step draws other numbers from the same generator
than an eager one. With ``numerics="stacked"``, each model draws from its own copy of the generator's state
(``torch/backends/stacked/streams.py``); with virtual nodes, each part of the batch has its own key
(``torch/elastic/virtual_nodes.py``).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.training.identity import accelerators

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """A use of random numbers. Each purpose has separate streams, so that evaluation does not disturb any step."""

    TRAIN = 0
    SETUP = 1
    EVALUATE = 2
    DATA = 3
    SAMPLE = 4
    COLLATE = 5
    NODE = 6


def seed_of(hp: Mapping[str, Scalar]) -> int:
    """Return the hyperparameter ``seed``, or 0 if there is none. Raises :class:`UsageError` if it is not an int."""
    seed = hp.get("seed", 0)
    if type(seed) is not int:
        raise UsageError(f"the hyperparameter 'seed' is {seed!r}; a seed is a whole number")
    return seed


def mix(seed: int, step: int, stream: int) -> int:
    """Return 64 bits that look independent for different arguments (the finaliser of SplitMix64, twice).

    Twice, since after one pass (seed, step) pairs on a line would collide.
    """
    z = _scramble((seed + 0x9E3779B97F4A7C15 * (stream + 1)) & _MASK)
    return _scramble((z + 0xD1B54A32D192ED03 * (step + 1)) & _MASK)


def _scramble(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def rekey(seed: int, step: int, purpose: Purpose = Purpose.TRAIN) -> None:
    """Seed the global generators of Python, NumPy and, if imported, of torch, as ``manual_seed`` does, from a mix of
    seed, step and purpose. About 6 microseconds.

    If torch is imported later, it is not seeded before the next call; see :func:`has_torch`.
    """
    import numpy

    # 64 bits of one mix suffice for all: Python uses all of them, NumPy and torch's CPU generator 32 each.
    key = mix(seed, step, purpose)
    random.seed(key)
    numpy.random.seed(_scramble(key ^ 0x6E756D7079) & 0xFFFFFFFF)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        key = _scramble(key ^ 0x746F726368)
        torch.default_generator.manual_seed(key)
        accelerators.seed(key, early=purpose is Purpose.SETUP)


def has_torch() -> bool:
    """Return whether torch is imported. If this changes during a call, the call may have used generators without a
    key."""
    return "torch" in sys.modules


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the global generators on exit, torch's if it was imported before."""
    import numpy

    python, of_numpy = random.getstate(), numpy.random.get_state(legacy=False)
    torch: Any = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    of_accelerators = accelerators.states()
    try:
        yield
    finally:
        random.setstate(python)
        here = numpy.random.get_state(legacy=False)
        if here["bit_generator"] == of_numpy["bit_generator"]:  # else training has replaced it
            numpy.random.set_state(of_numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)
        accelerators.restore(of_accelerators)
