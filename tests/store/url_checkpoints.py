"""What the tests of UrlCheckpoints share: states, and what lies behind a URL in memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from hpstage.checkpoints import UrlCheckpoints
from hpstage.checkpoints import format as files
from hpstage.plan.facts import StateKey

KEY = StateKey("0" * 31 + "a")
OTHER = StateKey("0" * 31 + "b")
STATE = {"w": torch.arange(5.0), "n": np.arange(3), "raw": b"bytes", "step": 7}

memory = fsspec.filesystem("memory")
FILES = ("manifest", "tensors", "structure")


def names(store: UrlCheckpoints) -> list[str]:
    """Every file below the store's URL, by its path there."""
    return sorted(store._remote.sizes())


def saved(store: UrlCheckpoints, key: StateKey = KEY) -> dict[str, str]:
    """Full path in memory of the manifest, the tensors and the structure of a checkpoint that is saved here."""
    store.save(key, STATE, step=7, parent=None)
    return paths(store, key)


def paths(store: UrlCheckpoints, key: StateKey = KEY) -> dict[str, str]:
    root = store.url.removeprefix("memory:/")
    manifest = store.manifest(key)
    tensors, structure = files.data_files(store._place(key), manifest)
    folder = f"{root}/{key[:2]}/{key}"
    return {
        "manifest": f"{folder}/{files.MANIFEST}",
        "tensors": f"{folder}/{tensors}",
        "structure": f"{folder}/{structure}",
    }


def wrap(patch: pytest.MonkeyPatch, method: str, around: Callable[..., Any]) -> None:
    """Let ``around(call, path, **options)`` stand for a method of the driver; ``call()`` calls the method itself."""
    original = getattr(type(memory), method)

    def wrapped(self: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        return around(lambda: original(self, path, *arguments, **options), path, **options)

    patch.setattr(type(memory), method, wrapped)


class Dying(BaseException):
    """What a kill would be, seen from within."""


def a_day_passes(store: UrlCheckpoints) -> None:
    for path in memory.find(store.url.removeprefix("memory:/")):
        memory.store[path].modified -= timedelta(days=1, minutes=1)
