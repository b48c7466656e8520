"""The ``with`` blocks of a function that let every exception through.

A block that swallows an exception may leave variables as they were before the block. torch's context managers never
swallow one.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import types
from collections.abc import Sequence
from dis import Instruction
from itertools import pairwise
from types import CodeType, FrameType

from hpstage.training.capture.liveness import all_instructions_of, handlers, names_at
from hpstage.training.code.namespaces import MISSING

_LET_THROUGH = ("torch", "tqdm", "warnings", "threading", "_thread", "io", "_io")

_ENTERED = ("COPY", "LOAD_SPECIAL", "SWAP", "SWAP", "LOAD_SPECIAL", "CALL")
"""The instructions by which Python 3.14 enters a ``with`` block, once its context manager is on the stack."""
_EXIT = 1  # the argument of LOAD_SPECIAL for __exit__


def letting_through(frame: FrameType, held: dict[str, object]) -> frozenset[int]:
    """Return the offsets of the jumps after swallowing an exception, for the blocks that never swallow one.

    Args:
        frame: frame that runs the function.
        held: the frame's variables.
    """

    def value_of(names: Sequence[str]) -> object:
        if not names:
            return MISSING
        first, *attributes = names
        value = held.get(first, frame.f_globals.get(first, getattr(builtins, first, MISSING)))
        for name in attributes:
            # Statically, and only from modules and classes: access to other attributes may run the user's code.
            known = isinstance(value, types.ModuleType | type)
            value = inspect.getattr_static(value, name, MISSING) if known else MISSING
        return value

    found = ((jump, value_of(names), called) for jump, names, called in _blocks(frame.f_code))
    return frozenset(jump for jump, value, called in found if _lets_through(value if called else type(value)))


@functools.lru_cache(256)
def swallowing(code: CodeType) -> frozenset[int]:
    """Return the offset of each block's jump after it has swallowed an exception."""
    instructions = all_instructions_of(code)
    handlers = (index for index, item in enumerate(instructions) if item.opname == "WITH_EXCEPT_START")
    return frozenset(_jump(instructions, handler) for handler in handlers)


def _jump(instructions: Sequence[Instruction], handler: int) -> int:
    """Return the offset of the jump for the block whose ``__exit__`` is called at the index ``handler``."""
    return next(item.offset for item in instructions[handler:] if "IF_TRUE" in item.opname)


def _lets_through(made_by: object) -> bool:
    """Return whether context managers made by this class or function let every exception through."""
    module = getattr(made_by, "__module__", None)
    if made_by is MISSING or not isinstance(module, str):
        return False
    if module.partition(".")[0] in _LET_THROUGH or made_by is contextlib.nullcontext or made_by is contextlib.closing:
        return True
    leave = getattr(made_by, "__exit__", None) if isinstance(made_by, type) else None
    return isinstance(leave, types.FunctionType) and _returns_nothing(leave.__code__)


def _returns_nothing(code: CodeType) -> bool:
    instructions = all_instructions_of(code)
    for before, instruction in pairwise(instructions):
        if instruction.opname == "RETURN_VALUE" and not (before.opname == "LOAD_CONST" and not before.argval):
            return False
    return not any((item.opname == "RETURN_CONST" and item.argval) or "YIELD" in item.opname for item in instructions)


@functools.lru_cache(256)
def _blocks(code: CodeType) -> list[tuple[int, list[str], bool]]:
    """Return each block's jump offset, the names that lead to its context manager, and whether these are called."""
    instructions = all_instructions_of(code)
    found = []
    for index, instruction in enumerate(instructions[:-1]):
        if instruction.opname == "BEFORE_WITH":
            block = index + 1
        elif instruction.opname == "COPY" and _is_exit(instructions[index + 1]):  # Python 3.14
            block = index + len(_ENTERED)
        else:
            continue
        for handler in handlers(code, instructions[block].offset):
            if instructions[handler + 1].opname == "WITH_EXCEPT_START":
                found.append((_jump(instructions, handler + 1), *names_at(instructions, index - 1)))
    return found


def _is_exit(instruction: Instruction) -> bool:
    return instruction.opname == "LOAD_SPECIAL" and instruction.arg == _EXIT
