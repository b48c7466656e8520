"""Blocks of ``with`` in bytecode, also as Python 3.14 compiles them."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dis import Instruction
from types import CodeType, FrameType

import pytest

from hpstage.training.capture import context_managers, liveness
from hpstage.training.capture.context_managers import letting_through, swallowing


def frame_in_blocks() -> FrameType:
    with nullcontext():
        frame = sys._getframe()
    with suppress(ValueError):
        frame = sys._getframe()
    return frame


def as_in_3_14(code: CodeType) -> list[Instruction]:
    """The instructions of ``code``, with blocks entered by those to which Python 3.14 compiles ``with``."""

    def entered(before: Instruction) -> Iterator[Instruction]:
        for name, arg in (("COPY", 1), ("LOAD_SPECIAL", 1), ("SWAP", 2), ("SWAP", 3), ("LOAD_SPECIAL", 0), ("CALL", 0)):
            yield before._replace(opname=name, arg=arg, argval=arg)

    found: list[Instruction] = []
    for instruction in dis.get_instructions(code):
        found.extend(entered(instruction) if instruction.opname == "BEFORE_WITH" else [instruction])
    return found


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    caches = (swallowing, context_managers._blocks, liveness.starts_of, liveness._exception_entries)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("compiled", ["here", "in 3.14"])
def test_a_block_lets_exceptions_through_unless_its_context_manager_may_swallow_them(
    compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled == "in 3.14":
        for module in (context_managers, liveness):
            monkeypatch.setattr(module, "all_instructions_of", as_in_3_14)
    frame = frame_in_blocks()
    blocks = swallowing(frame.f_code)
    assert len(blocks) == 2
    assert letting_through(frame, {}) == {min(blocks)}  # that of nullcontext(), the first one
