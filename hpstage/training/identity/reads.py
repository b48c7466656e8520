"""Files that code reads by a name written in it or held by a global: initial weights of a model, tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dis import Instruction
from pathlib import PurePath
from types import CodeType
from typing import Any

from hpstage.training.code.bytecode import FROM_GLOBALS, inner, instructions_of

_READS = re.compile(r"load|load_\w+|open|read_\w+|imread|fromfile|from_file|memmap|genfromtxt|loadtxt|File|safe_open")
_WRITES = re.compile(r"save|save_\w+|savez|savez_compressed|savetxt|savefig|dump|write|write_\w+|tofile|to_\w+")
_NO_FILE = frozenset(("load_state_dict", "to_tensor", "to_dense", "to_sparse", "to_empty"))
_WRITING = re.compile(r"[rbt]*[wax+][bt+]*")  # modes of open()


def paths_read(code: CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield strings that may be paths of files read by ``code`` and the code nested in it.

    Files that training writes are not inputs: where code also writes files, only statements that do nothing but read
    count, and no path that another statement writes, such as that of a checkpoint to resume from.

    Args:
        code: code of a function.
        names: the function's globals.
    """
    read, written = list[str](), set[str]()
    for part in inner(code):
        instructions = instructions_of(part)
        for scope in _statements(instructions) if _matches(_WRITES, instructions) else [instructions]:
            if _matches(_WRITES, scope):
                written.update(_texts(scope, names))
            elif _matches(_READS, scope):
                read += _texts(scope, names)
    return (path for path in read if path not in written)


def found_at(path: str, names: Mapping[str, Any]) -> str:
    """Return the path, or if it does not exist, that of a file of this name next to the code that names it."""
    next_to_code = os.path.join(os.path.dirname(names.get("__file__") or ""), path)
    return next_to_code if not os.path.exists(path) and os.path.exists(next_to_code) else path


def _statements(instructions: Sequence[Instruction]) -> Iterator[Sequence[Instruction]]:
    start = 0
    for index, instruction in enumerate(instructions, 1):
        if instruction.opname.startswith(("STORE_", "POP_TOP", "RETURN_", "BEFORE_WITH", "LOAD_SPECIAL")):
            yield instructions[start:index]
            start = index


def _matches(pattern: re.Pattern[str], instructions: Sequence[Instruction]) -> bool:
    for instruction in instructions:
        name = instruction.argval
        if not isinstance(name, str):
            continue
        if instruction.opname == "LOAD_CONST":
            if pattern is _WRITES and _WRITING.fullmatch(name):
                return True
        elif pattern.fullmatch(name) and name not in _NO_FILE:
            return True
    return False


def _texts(instructions: Sequence[Instruction], names: Mapping[str, Any]) -> Iterator[str]:
    for instruction in instructions:
        content = instruction.argval
        if instruction.opname in FROM_GLOBALS:
            content = names.get(content)
        elif instruction.opname != "LOAD_CONST":
            continue
        if isinstance(content, str | PurePath):
            yield str(content)
