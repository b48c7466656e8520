"""The local variables of a paused frame that matter: those that may be read before they are written again.

A backward data-flow analysis (Aho, Lam, Sethi, Ullman: Compilers, section 9.2.5) on bytecode, for the instruction names
of Python 3.11 to 3.14. Too many live variables cause a refusal, too few a wrong result: where the control flow is not
known, both branches are followed.
"""

from __future__ import annotations

import dis
import functools
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dis import Instruction
from types import CodeType

from hpstage.training.code.bytecode import inner

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_NEVER_GO_ON = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT", *_ALWAYS_JUMPS)
_FAST = re.compile(r"(LOAD|STORE|DELETE)_FAST(_BORROW|_CHECK|_AND_CLEAR)?(?=_LOAD_FAST|_STORE_FAST|$)")
"""The parts of a superinstruction: STORE_FAST_LOAD_FAST writes its first variable and reads its second."""
_READ_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_WRITE_CELLS = ("STORE_DEREF", "DELETE_DEREF")
_QUIET = re.compile(
    r"(LOAD_(FAST|DEREF|CLOSURE|CONST|SMALL_INT|GLOBAL)|STORE_(FAST|DEREF)|COPY|SWAP|PUSH_NULL|NOP|RESUME|NOT_TAKEN"
    r"|MAKE_CELL|EXTENDED_ARG|CACHE|JUMP_)"
)
"""Instructions that cannot run any other code."""
_ENDS = re.compile(r"STORE|DELETE|POP_TOP|RETURN|RESUME|RAISE|(POP_)?JUMP|FOR_ITER|END_|YIELD")
"""Instructions where the search for operands ends: before these, none is left on the stack, or that is not known."""
_REMEMBERED = 256
_READ_EVERYTHING = frozenset(("locals", "vars", "dir", "eval", "exec"))
"""Functions that may read any variable of their caller."""

Access = tuple[bool, str]
"""Whether a variable is read rather than written, and its name."""
Cut = frozenset[tuple[int, bool]]
"""Offsets of jumps that go one way only, and whether they always jump rather than never."""


def place(code: CodeType, lasti: int) -> int:
    """Return the offset of the instruction that contains ``f_lasti``, which may point to the caches that follow it."""
    instructions = all_instructions_of(code)
    index = bisect_right([instruction.offset for instruction in instructions], lasti) - 1
    if instructions[index].opname == "PRECALL":  # in 3.11; once specialized, it performs the call
        index += 1
    return instructions[index].offset


@functools.lru_cache(_REMEMBERED)
def live(
    code: CodeType,
    offset: int,
    *,
    innermost: bool = True,
    outermost: bool = True,
    untaken: frozenset[int] = frozenset(),
    entered: frozenset[int] = frozenset(),
    runs: frozenset[str] | None = None,
    but: frozenset[int] = frozenset(),
) -> frozenset[str]:
    """Return the variables of ``code``, paused at ``offset``, on which its further execution may depend.

    Args:
        code: code of the frame.
        offset: offset of an instruction, as returned by :func:`place`.
        innermost: whether no generator frame is between a loop that is paused here and its iterator. That iterator
            never ends, so the loop is left only by ``break``, ``return`` and errors.
        outermost: whether training ends when this frame ends. Then, code from which no path leads back to a loop that
            is paused here is ignored.
        untaken: offsets of jumps that are never taken.
        entered: what :func:`never_empty` returns.
        runs: variables of which attributes and items can be read without running a nested function. If given, every
            other instruction that may run other code reads the variables that functions nested in ``code`` read.
        but: indices of instructions whose own accesses to variables are ignored.
    """
    instructions, starts = all_instructions_of(code), starts_of(code)
    paused = starts[offset]
    cut = frozenset((jump, False) for jump in untaken)
    after = [list(_successors(instructions, index, starts, cut)) for index in range(len(instructions))]
    on_error = [handlers(code, instruction.offset) for instruction in instructions]
    for begins in entered:
        after[starts[begins]] = [starts[begins] + 2]  # past FOR_ITER, in the loop
    loop = instructions[paused].opname == "FOR_ITER"
    if innermost:
        on_error[paused] = []  # exceptions that are raised there end training
        if loop:
            after[paused] = [paused + 1]
    ways = [[*normal, *raised] for normal, raised in zip(after, on_error, strict=True)]
    counts = _leading_to(paused, ways) if loop and outermost else range(len(instructions))
    accesses = [[] if index in but else list(accesses_of(code, index)) for index in range(len(instructions))]
    if runs is not None:
        inside = [(True, name) for name in _read_inside(code)]
        for index, own in enumerate(accesses):
            if not _QUIET.match(instructions[index].opname) and not _is_of(runs, instructions, index):
                own[:0] = inside
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    changed = True
    while changed:
        changed = False
        for index in reversed(counts):
            names = {name for following in after[index] for name in before[following]}
            for read, name in reversed(accesses[index]):
                (names.add if read else names.discard)(name)
            for handler in on_error[index]:  # the exception may precede the write
                names |= before[handler]
            if names != before[index]:
                before[index] = frozenset(names)
                changed = True
    return frozenset(name for following in ways[paused] for name in before[following])


@functools.lru_cache(_REMEMBERED)
def keeps_only_variables(code: CodeType, offset: int, *, innermost: bool) -> bool:
    """Return whether variables alone decide how ``code``, paused at ``offset``, continues: it is in no other ``for``
    loop than one that is paused here, and, if ``innermost``, in no expression."""
    items = all_instructions_of(code)
    loops = [item for item in items if item.opname == "FOR_ITER" and item.offset < offset < item.argval]
    at = next(item for item in items if item.offset == offset)
    return not loops and (not innermost or at.opname == "FOR_ITER")


@functools.lru_cache(_REMEMBERED)
def operands(code: CodeType, offset: int) -> frozenset[str]:
    """Return the variables that the expression around a call at ``offset`` may have read before the call: ``total`` in
    ``total + next(steps)``. The frame keeps their values on its stack, where no fork can set them."""
    items = all_instructions_of(code)
    index = next(index for index, item in enumerate(items) if item.offset == offset)
    names: set[str] = set()
    if items[index].opname == "FOR_ITER":
        return frozenset()
    while index and not _ENDS.match(items[index].opname):
        index -= 1
        names |= {name for read, name in accesses_of(code, index) if read}  # also of STORE_FAST_LOAD_FAST
    return frozenset(names)


@functools.lru_cache(_REMEMBERED)
def all_instructions_of(code: CodeType) -> Sequence[Instruction]:
    return list(dis.get_instructions(code))


@functools.lru_cache(_REMEMBERED)
def starts_of(code: CodeType) -> dict[int, int]:
    """Return the indices of the instructions by their offsets."""
    return {instruction.offset: index for index, instruction in enumerate(all_instructions_of(code))}


def reachable(code: CodeType, offset: int, *, cut: Cut = frozenset(), handled: bool = True) -> frozenset[int]:
    """Return the indices of the instructions that may be executed after the one at ``offset``.

    Args:
        cut: jumps that go one way only.
        handled: whether exceptions may be raised and handled.
    """
    instructions, starts = all_instructions_of(code), starts_of(code)
    found: set[int] = set()
    todo = [starts[offset]]
    while todo:
        index = todo.pop()
        on_error = handlers(code, instructions[index].offset) if handled else ()
        for following in (*_successors(instructions, index, starts, cut), *on_error):
            if following not in found:
                found.add(following)
                todo.append(following)
    return frozenset(found)


class AlwaysAfter:
    """Finds the instructions that are always executed after a given one before ``code`` is paused at ``offset`` again:
    its postdominators (Allen: Control flow analysis, 1970). Exceptions, and paths that do not lead to ``offset``, are
    ignored."""

    def __init__(self, code: CodeType, offset: int) -> None:
        instructions, self._starts = all_instructions_of(code), starts_of(code)
        self._paused = self._starts[offset]
        every = [list(_successors(instructions, at, self._starts, frozenset())) for at in range(len(instructions))]
        leading = _leading_to(self._paused, every)
        known = frozenset(leading)
        self._ways = {at: [way for way in every[at] if way in known] for at in leading}
        self._after = dict.fromkeys(leading, -1)  # the bits of an integer are indices
        self._after[self._paused] = 1 << self._paused
        changed = True
        while changed:
            changed = False
            for at in reversed(leading):
                if at != self._paused:
                    found = 1 << at | functools.reduce(int.__and__, (self._after[way] for way in self._ways[at]), -1)
                    changed |= found != self._after[at]
                    self._after[at] = found

    def between(self, cut: Cut) -> frozenset[int]:
        """Return the indices of instructions that are executed only if a jump in ``cut`` goes the other way: those from
        there to where its two ways join."""
        found: set[int] = set()
        for offset, jumps in cut:
            at = self._starts[offset]
            todo = [way for way in self._ways.get(at, ()) if (way == at + 1) is jumps]
            while todo:
                index = todo.pop()
                if index not in found and index != self._paused and not self._after[at] >> index & 1:
                    found.add(index)
                    todo += self._ways[index]
        return frozenset(found)


always_after = functools.lru_cache(_REMEMBERED)(AlwaysAfter)


def _successors(instructions: Sequence[Instruction], index: int, starts: dict[int, int], cut: Cut) -> Iterator[int]:
    instruction = instructions[index]
    at = instruction.offset
    if instruction.opname not in _NEVER_GO_ON and index + 1 < len(instructions) and (at, True) not in cut:
        yield index + 1
    if instruction.opcode in _JUMPS and (at, False) not in cut:
        yield starts[instruction.argval]


def handlers(code: CodeType, offset: int) -> list[int]:
    """Return the indices at which the handlers of exceptions begin that are raised at ``offset``."""
    return [target for start, end, target in _exception_entries(code) if start <= offset < end]


@functools.lru_cache(_REMEMBERED)
def _exception_entries(code: CodeType) -> list[tuple[int, int, int]]:
    entries, starts = dis.Bytecode(code).exception_entries, starts_of(code)  # type: ignore[attr-defined]
    return [(entry.start, entry.end, starts[entry.target]) for entry in entries]


def _leading_to(paused: int, ways: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the instructions from which a path leads to ``paused``, in order."""
    before: dict[int, list[int]] = {}
    for index, following in enumerate(ways):
        for target in following:
            before.setdefault(target, []).append(index)
    found: set[int] = set()
    todo = [paused]
    while todo:
        index = todo.pop()
        if index not in found:
            found.add(index)
            todo += before.get(index, ())
    return sorted(found)


def accesses_of(code: CodeType, index: int) -> Iterator[Access]:
    """Yield the variables that the instruction at ``index`` reads and writes, in order."""
    instructions = all_instructions_of(code)
    instruction = instructions[index]
    name, names = instruction.opname, instruction.argval
    if name in ("LOAD_GLOBAL", "LOAD_NAME") and names in _READ_EVERYTHING:
        yield from ((True, variable) for variable in (*code.co_varnames, *code.co_cellvars, *code.co_freevars))
    elif name in _READ_CELLS:
        yield True, names
    elif name in _WRITE_CELLS:
        yield False, names
    elif name == "LOAD_CLOSURE":
        if names in _read_inside(code):
            yield True, names
    else:
        parts = list(_FAST.finditer(name))
        every = names if isinstance(names, tuple) else (names,) * len(parts)
        for part, variable in zip(parts, every, strict=True) if parts else ():
            if part[1] == "LOAD":
                cell = variable in code.co_cellvars or variable in code.co_freevars
                # Since 3.12, an inlined comprehension saves the variable that it borrows, and restores it.
                saved = part[2] == "_AND_CLEAR"
                if not saved and (not cell or variable in _read_inside(code)):
                    yield True, variable
            elif not (variable in _borrowed(code) and _follows_swap(instructions, index)):
                yield False, variable


@functools.lru_cache(_REMEMBERED)
def _read_inside(code: CodeType) -> frozenset[str]:
    """Return the variables that functions nested in ``code`` read."""
    within = (part for part in inner(code) if part is not code)
    return frozenset(item.argval for part in within for item in all_instructions_of(part) if item.opname in _READ_CELLS)


def written_first(code: CodeType, offset: int, *, outermost: bool, runs: frozenset[str]) -> frozenset[str]:
    """Return variables that nested functions read only after ``code``, paused at ``offset``, has written them again."""
    shared = _read_inside(code).intersection(code.co_cellvars)
    return shared - live(code, offset, innermost=True, outermost=outermost, runs=runs) if shared else shared


_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_AROUND_NAMES = ("PRECALL", "KW_NAMES", "LOAD_CONST", "LOAD_SMALL_INT", "PUSH_NULL")


def names_at(instructions: Sequence[Instruction], last: int) -> tuple[list[str], bool]:
    """Return the names in an expression like ``torch.autocast(...)`` ending at ``last``, and whether it is a call."""
    called = instructions[last].opname.startswith("CALL")
    begin = _begin(instructions[last])
    parts = [item for item in instructions[: last + (not called)] if _begin(item) == begin] if begin else []
    parts = [item for item in parts if item.opname not in _AROUND_NAMES]
    plain = parts and parts[0].opname in _LOADS and all(item.opname in _ATTRIBUTES for item in parts[1:])
    return [item.argval for item in parts] if plain else [], called


def _begin(instruction: Instruction) -> tuple[int, int] | None:
    """Return the line and column of an instruction, or ``None`` if Python was set not to keep them."""
    place = instruction.positions
    if place is None or place.lineno is None or place.col_offset is None:
        return None
    return place.lineno, place.col_offset


@functools.lru_cache(_REMEMBERED)
def never_empty(code: CodeType, runs: frozenset[str], *, counted: bool) -> frozenset[int]:
    """Return the offsets where loops over ``run.batches(...)`` begin: an epoch without a batch is an error.

    Args:
        code: code of a function.
        runs: variables that hold a run.
        counted: whether ``enumerate`` is Python's own. Then it may be around ``run.batches(...)``.
    """
    instructions = [item for item in all_instructions_of(code) if item.opname not in _AROUND_NAMES]
    found = set()
    for index in range(2, len(instructions) - 1):
        begins, loop = instructions[index : index + 2]
        if (begins.opname, loop.opname) != ("GET_ITER", "FOR_ITER"):
            continue
        names, called = names_at(instructions, index - 1)
        if counted and called and names == ["enumerate"]:
            names, called = names_at(instructions, index - 2)
        if called and len(names) == 2 and names[0] in runs and names[1] == "batches":
            found.add(begins.offset)
    return frozenset(found)


def _is_of(runs: frozenset[str], instructions: Sequence[Instruction], index: int) -> bool:
    """Return whether an instruction reads an attribute or item, perhaps a nested one, of one of these variables."""
    while index > 1:
        item = instructions[index]
        if item.opname == "BINARY_SUBSCR" or (item.opname == "BINARY_OP" and item.argrepr == "[]"):
            if not instructions[index - 1].opname.startswith("LOAD_CONST"):
                return False
            index -= 2
        elif item.opname == "LOAD_ATTR":
            index -= 1
        else:
            return item.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and item.argval in runs
    return False


@functools.lru_cache(_REMEMBERED)
def _borrowed(code: CodeType) -> frozenset[str]:
    return frozenset(item.argval for item in all_instructions_of(code) if item.opname == "LOAD_FAST_AND_CLEAR")


def _follows_swap(instructions: Sequence[Instruction], index: int) -> bool:
    """Return whether the instruction restores the value of a variable borrowed by a comprehension."""
    while index and instructions[index].opname.startswith("STORE_FAST"):
        index -= 1
    return instructions[index].opname == "SWAP"
