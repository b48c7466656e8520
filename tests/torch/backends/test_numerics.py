"""The numerics class: named by the trainable, part of the workload's key, and refused where it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hpstage.errors import StoreError, UsageError
from hpstage.store import MemoryJournal
from hpstage.torch import environment
from hpstage.torch.backends.stacked_backend import StackedBackend
from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable
from tests.torch.backends.forking import by
from tests.torch.backends.odd_programs import Tiny
from tests.torch.backends.searches import search

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")


def described(numerics: str) -> dict[str, str]:
    return describe(as_trainable(by(numerics, Tiny)())).described


def test_numerics_eager_adds_no_compiler_to_the_key() -> None:
    found = described("eager")
    assert found["numerics"] == "eager-v1"
    assert environment.describe("cpu").items() <= found.items()
    assert not {"compiler", "numerics read"} & found.keys()


@needs_compiler
def test_the_numerics_class_changes_the_environment_and_not_the_identity_of_the_code() -> None:
    eager, compiled = described("eager"), described("compiled")
    assert {name for name in compiled if compiled[name] != eager.get(name)} == {"numerics", "compiler"}
    assert compiled.keys() - eager.keys() == {"compiler"}
    ours, theirs = (describe(as_trainable(by(name, Tiny)())).identity for name in ("eager", "compiled"))
    assert ours == theirs


def test_an_unknown_numerics_class_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="numerics is 'quick'; give one of 'compiled', 'eager', 'graphed'"):
        described("quick")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_numerics_graphed_is_refused_without_a_gpu() -> None:
    with pytest.raises(UsageError, match="numerics = 'graphed' cannot be used here: CUDA graphs need a GPU"):
        described("graphed")


@needs_compiler
def test_a_store_of_another_numerics_class_is_refused_with_the_remedy(tmp_path: Path) -> None:
    search("eager", tmp_path)
    with pytest.raises(
        StoreError, match=r"environment:numerics: 'eager-v1' there, 'compiled-v2' here.*numerics = 'eager'"
    ):
        search("compiled", tmp_path)


@pytest.mark.ci
def test_the_error_for_a_store_does_not_suggest_a_numerics_class_that_no_longer_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = MemoryJournal()
    with monkeypatch.context() as before:
        before.setattr(StackedBackend, "numerics", "stacked-v2")
        search("stacked", journal)
    with pytest.raises(StoreError, match=r"'stacked-v2' there, 'stacked-v3' here\); choose another store$"):
        search("stacked", journal)
