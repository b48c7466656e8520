"""Digests of code objects, which do not depend on comments, layout, docstrings or the file; and the objects that the
names in code refer to."""

from __future__ import annotations

import builtins
import dis
import functools
import importlib
import importlib.util
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dis import Instruction
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

from hpstage.training.code.owner import as_run, is_users_code, module_of
from hpstage.training.code.string_digest import hashed

# Instructions without an effect: room for the interpreter's caches, further bytes of an argument, and lines at which a
# debugger may stop.
_NOISE = frozenset(("CACHE", "EXTENDED_ARG", "RESUME", "NOP"))
_BEFORE_CALLS = frozenset(("PUSH_NULL", "PRECALL"))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_CONSTANTS = frozenset(dis.hasconst)
_LOCAL = frozenset((*dis.haslocal, *dis.hasfree))
_BY_NAME = frozenset(("locals", "vars", "dir", "eval", "exec", "f_locals", "_getframe", "currentframe"))
"""Names by which code may read the names of its variables."""
# Names that the compiler binds in classes and modules for readers: docstrings, line numbers, and strings in hash-table
# order.
_NOTES = frozenset(("__doc__", "__firstlineno__", "__static_attributes__"))
# Flags for the kinds of arguments and of function; not those for docstrings and imports from __future__.
_FLAGS = 0x3BF

_REMEMBERED = 4096
"""Size of caches of disassembled functions: an identity is requested several times."""

FROM_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_FROM_CELLS = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
FROM_LOCALS = frozenset(("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF"))
_INTO_LOCALS = frozenset(("STORE_FAST", "STORE_DEREF"))
_FOR_INNER_CODE = frozenset(("MAKE_CELL", "LOAD_CLOSURE"))


@functools.lru_cache(_REMEMBERED)
def digest(code: CodeType, free: tuple[str, ...] | None = None) -> str:
    """Return a digest that is equal for code that performs the same operations on the same names.

    Local variables are numbered in the order of their first use; their names count only if the code may read them.

    Args:
        free: placeholders for the names of the code's free variables, in order.
    """
    return hashed(_text(code, free or code.co_freevars))


def inner(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and the functions, classes and comprehensions in it, at any depth."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from inner(constant)


def _text(code: CodeType, free: tuple[str, ...]) -> str:
    instructions = instructions_of(code)
    local = _Locals(code, free)
    starts = [instruction.offset for instruction in instructions]

    def place(offset: int) -> int:
        return bisect_left(starts, offset)

    operations = []
    for instruction in instructions:
        argument: object
        if instruction.opcode in _CONSTANTS:
            argument = _constant_text(instruction.argval, local)
        elif instruction.opcode in _LOCAL:
            argument = local.named(instruction.argval)
        elif instruction.opcode in _JUMPS:
            argument = place(instruction.argval)
        else:
            argument = instruction.argrepr or instruction.arg
        operations.append((instruction.opname, argument))
    handlers = {
        (place(entry.start), place(entry.end), place(entry.target), entry.depth, entry.lasti)
        for entry in dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    }
    return repr(
        (
            code.co_name,
            code.co_flags & _FLAGS,
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, _arguments(code)),
            (local.named(code.co_cellvars), free),
            operations,
            sorted(handler for handler in handlers if handler[0] < handler[1]),
        )
    )


@functools.lru_cache(_REMEMBERED)
def instructions_of(code: CodeType) -> Sequence[Instruction]:
    found: list[Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _NOISE:
            continue
        if instruction.opname == "STORE_NAME" and instruction.argval in _NOTES and found:
            found.pop()  # the value to store
            continue
        found.append(instruction)
    return found


@functools.lru_cache(_REMEMBERED)
def operations_of(code: CodeType) -> Sequence[Instruction]:
    """Return the instructions without those that prepare a call, so that the first argument directly follows the
    function."""
    return [instruction for instruction in instructions_of(code) if instruction.opname not in _BEFORE_CALLS]


class _Locals:
    """Placeholders for the names of local variables in a digest: numbers, except for arguments, which callers may
    name."""

    def __init__(self, code: CodeType, free: tuple[str, ...]) -> None:
        self._known = dict(zip(code.co_freevars, free, strict=True)) | {name: name for name in _arguments(code)}
        if not _BY_NAME.isdisjoint(name for part in inner(code) for name in part.co_names):
            self._known |= {name: name for name in (*code.co_varnames, *code.co_cellvars)}

    def named(self, names: Any) -> Any:
        """Return the placeholder of a name, or those of a tuple of names. A new name gets the next number."""
        if isinstance(names, tuple):
            return tuple(map(self.named, names))
        return self._known.setdefault(names, f"#{len(self._known)}") if isinstance(names, str) else names


def _arguments(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args and **kwargs
    return code.co_varnames[:count]


def _constant_text(constant: object, local: _Locals) -> str:
    if isinstance(constant, CodeType):
        return f"code {digest(constant, local.named(constant.co_freevars))}"
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(_constant_text(item, local) for item in constant)})"
    if isinstance(constant, tuple):
        return f"({', '.join(_constant_text(item, local) for item in constant)})"
    return repr(constant)


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import statement in a function: a module, its ``member``, or its top-level package."""

    module: str
    member: str = ""
    package: bool = False

    def result(self) -> object:
        """Import the object and return it. Errors of the import are raised."""
        module = importlib.import_module(self.module)
        if self.package:
            return sys.modules[self.module.partition(".")[0]]
        if not self.member:
            return module
        if not hasattr(module, self.member):
            return importlib.import_module(f"{self.module}.{self.member}")
        return getattr(module, self.member)


Resolve = Callable[[Imported], object]
"""A function that returns the imported module or object, or ``None`` if it is not to be followed."""


@dataclass(frozen=True, slots=True)
class Named:
    """The object that a name in code refers to. ``module`` and ``name`` locate a global; they are empty for other
    objects."""

    path: str
    content: object
    module: str = ""
    name: str = ""


def cells_of(function: FunctionType) -> dict[str, object]:
    """Return the values of those free variables of a function that are bound, by name."""
    found: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            found[name] = cell.cell_contents
    return found


@dataclass(slots=True)
class References:
    """The objects that code refers to: by names, and by imports whose result is used as a whole."""

    named: list[Named] = field(default_factory=list)
    imported: list[Imported] = field(default_factory=list)


def references(
    code: CodeType,
    names: Mapping[str, Any],
    cells: Mapping[str, Any],
    resolve: Resolve = lambda imported: None,
    is_open: Callable[[str], bool] = lambda module: False,
) -> References:
    """Return the objects that ``code`` and the code nested in it refer to.

    A module is followed to the member that is read from it: ``nets.build`` refers to the function, not to ``nets``.

    Args:
        code: code of a function or of a module.
        names: the code's globals.
        cells: the values of the code's free variables.
        resolve: resolves the code's imports.
        is_open: whether a module is followed to its members, by the module's name; other modules count as a whole.
    """
    found = References()
    _collect(code, names, dict(cells), resolve, is_open, found)
    return found


def literals(code: CodeType) -> Iterator[str]:
    """Yield names that are bound only once, to a literal, in a module's code and in the classes in it.

    Other names may depend on the host: whether there is a GPU, where the file is.
    """
    instructions = instructions_of(code)
    stored = [
        instruction.argval for instruction in instructions if instruction.opname in ("STORE_NAME", "STORE_GLOBAL")
    ]
    for value, store in pairwise(instructions):
        if value.opcode in _CONSTANTS and store.opname == "STORE_NAME" and stored.count(store.argval) == 1:
            yield store.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and not constant.co_flags & 0x01:  # not a function (CO_OPTIMIZED)
            yield from (f"{constant.co_name}.{name}" for name in literals(constant))


def _collect(
    code: CodeType,
    names: Mapping[str, Any],
    cells: dict[str, Any],
    resolve: Resolve,
    is_open: Callable[[str], bool],
    found: References,
) -> None:
    instructions = instructions_of(code)
    bound = _imports(instructions, names, resolve, found)
    for index, instruction in enumerate(instructions):
        name = instruction.argval
        module = ""
        if instruction.opname in FROM_GLOBALS and name in names:
            content, module = names[name], as_run(names.get("__name__", ""))
        elif instruction.opname in FROM_GLOBALS and _is_put(content := vars(builtins).get(name)):
            pass
        elif instruction.opname in FROM_LOCALS and name in bound:
            content = bound[name]
        elif instruction.opname in _FROM_CELLS and name in cells:
            content = cells[name]
        else:
            continue
        first = Named(name, content, module, name if module else "")
        found.named.append(_followed(first, instructions[index + 1 :], is_open))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            known = {**cells, **bound}
            outer = {name: known[name] for name in constant.co_freevars if name in known}
            _collect(constant, names, outer, resolve, is_open, found)


def _followed(named: Named, instructions: Sequence[Instruction], is_open: Callable[[str], bool]) -> Named:
    """Follow modules to the member that the code reads. A library's member counts only if other code has put it
    there."""
    counts = named
    for following in instructions:
        owner, member = named.content, following.argval
        if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        if not isinstance(owner, ModuleType | type):
            own = getattr(owner, "__dict__", None)
            if named is not counts and type(own) is dict and type(own.get(member)) in _PUT:  # an object of a library's
                wrote = (module_of(cls) for cls in type(owner).__mro__)
                if not any(member in written_in(sys.modules[name]) for name in wrote if name in sys.modules):
                    counts = Named(f"{named.path}.{member}", own[member])
            break
        if isinstance(owner, ModuleType) and is_open(owner.__name__):
            if member not in vars(owner):  # the whole module counts
                break
            named = counts = Named(f"{named.path}.{member}", vars(owner)[member], owner.__name__, member)
        elif is_users_code(owner) or member not in vars(owner):
            break
        else:
            named = Named(f"{named.path}.{member}", vars(owner)[member])
            put = type(named.content) in _PUT or is_users_code(type(named.content))
            if put and not _is_of_the_library(owner, member):
                counts = named
    return counts


_PUT = frozenset((bool, int, float, complex, str, bytes))
_OF_SYS = frozenset(
    (
        *("abiflags", "api_version", "byteorder", "copyright", "dont_write_bytecode", "executable", "float_repr_style"),
        *("hexversion", "maxsize", "maxunicode", "platform", "platlibdir", "version", "winver", "pycache_prefix"),
        *("prefix", "base_prefix", "exec_prefix", "base_exec_prefix"),
        *("_base_executable", "_framework", "_git", "_home", "_stdlib_dir", "last_value", "ps1", "ps2"),
    )
)
"""The plain values in ``sys`` that are Python's own."""


def _is_put(content: object) -> bool:
    """Return whether other code has put this object into ``builtins``: Python's own built-ins are no plain values."""
    return type(content) in _PUT or is_users_code(content)


def _is_of_the_library(owner: ModuleType | type, member: str) -> bool:
    """Return whether a library's own code names this member of its module or class: its version then fixes the
    value."""
    module = owner if isinstance(owner, ModuleType) else sys.modules.get(module_of(owner))
    names = written_in(module) if module is not None else frozenset()
    return member in names or (member.startswith("__") and member.endswith("__"))


@functools.lru_cache(_REMEMBERED)
def written_in(module: ModuleType) -> frozenset[str]:
    """Return the names in a module's code; if it is not written in Python, all names in its namespace."""
    code = code_in(module)
    if code is None:
        return _OF_SYS if module is sys else frozenset(vars(module))
    return frozenset(name for part in inner(code) for name in part.co_names)


@functools.lru_cache(_REMEMBERED)
def code_in(module: ModuleType) -> CodeType | None:
    """Return a module's code, as cached by Python; ``None`` if it has none."""
    get_code = getattr(vars(module).get("__loader__"), "get_code", None)
    try:
        code: CodeType | None = get_code(module.__name__) if get_code is not None else None
    except (ImportError, OSError, SyntaxError):
        return None
    return code


def _imports(
    instructions: Sequence[Instruction], names: Mapping[str, Any], resolve: Resolve, found: References
) -> dict[str, object]:
    """Return the imported modules by local name, for names bound to nothing else; add all other imports to
    ``found``."""
    bindings: list[tuple[str | None, Imported]] = []
    for index, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            bindings += _bindings(instructions, index, names)
    stored = [instruction.argval for instruction in instructions if instruction.opname in _INTO_LOCALS]
    bound: dict[str, object] = {}
    for name, imported in bindings:
        content = resolve(imported)
        sole = name is not None and stored.count(name) == 1 and isinstance(content, ModuleType)
        if name is not None and sole and not _slips_away(name, instructions):
            bound[name] = content
        else:
            found.imported.append(imported)
    return bound


def _bindings(
    instructions: Sequence[Instruction], index: int, names: Mapping[str, Any]
) -> Iterator[tuple[str | None, Imported]]:
    """Yield the imports of the statement whose IMPORT_NAME is at ``index``, each after its local name or ``None``."""
    level, members = instructions[index - 2].argval, instructions[index - 1].argval
    module = "." * level + instructions[index].argval
    if level:
        module = importlib.util.resolve_name(module, names.get("__package__") or "")
    following = instructions[index + 1 :]
    if not members:
        if following[0].opname != "IMPORT_FROM":  # import a.b: binds a
            yield _stored(following[0]), Imported(module, package=True)
        else:  # import a.b as c
            last = next((place for place in following if place.opname.startswith("STORE_")), None)
            yield _stored(last), Imported(module)
        return
    for place, then in pairwise(following):
        if place.opname == "IMPORT_FROM":
            yield _stored(then), Imported(module, place.argval)
        elif place.opname == "POP_TOP":
            return
        elif place.opname in ("IMPORT_STAR", "CALL_INTRINSIC_1"):
            yield None, Imported(module)
            return


def _stored(instruction: Instruction | None) -> str | None:
    return instruction.argval if instruction is not None and instruction.opname in _INTO_LOCALS else None


def _slips_away(name: str, instructions: Sequence[Instruction]) -> bool:
    """Return whether a local name is used in ways that are not followed here."""
    for instruction in instructions:
        mentioned = instruction.argval == name or (
            isinstance(instruction.argval, tuple)
            and name in instruction.argval
            and instruction.opcode not in _CONSTANTS
        )
        local = instruction.opcode in dis.haslocal or instruction.opcode in dis.hasfree
        followed = instruction.opname in FROM_LOCALS | _INTO_LOCALS | _FOR_INNER_CODE
        if mentioned and local and not followed:
            return True
    return False
