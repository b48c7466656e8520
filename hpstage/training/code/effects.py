"""What the user's modules do to libraries and to the process when they are imported: ``F.gelu.__defaults__ = ...``,
``os.environ["X"] = ...``, calls whose results are dropped.

Code that trains does not name these effects, and many cannot be read back. Therefore their source counts: the
statements, the code they name, and the statements that make the values they name. The values do not count: they may be
the time, or a folder.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpstage.training.code.owner import is_users, is_users_code, is_users_file, module_of
from hpstage.training.code.source import beginnings, compiled

_PASSED_BY = frozenset(
    (
        *("argparse", "asyncio", "atexit", "copyreg", "faulthandler", "logging", "multiprocessing", "pdb", "shutil"),
        *("signal", "subprocess", "tblib", "threading", "time", "traceback", "tracemalloc", "unittest", "urllib"),
        *("warnings", "IPython", "dask", "distributed", "hypothesis", "ipykernel", "optuna", "pytest", "hpstage"),
        *("absl", "altair", "bokeh", "clearml", "click", "colorama", "comet_ml", "fire", "huggingface_hub", "loguru"),
        *("matplotlib", "mlflow", "neptune", "plotly", "ray", "requests", "rich", "seaborn", "setproctitle"),
        *("structlog", "tensorboard", "tqdm", "typer", "tyro", "wandb"),
    )
)
"""Packages in which effects do not count: they observe a process, move files, show results or run trainings. The table
of ``copyreg`` is inspected instead."""
_OBSERVES = re.compile(
    r"[._](?:logg|logs?[._]|log_(?:level|dir|path|file)|verbos|progress|multiprocessing)"
    r"|^sys\.(?:path|std|argv|\w*hook|tracebacklimit)|^pandas\.options\.display",
    re.IGNORECASE,
)
"""Paths of objects for logging, and of settings for how and from where Python runs."""
_SHOWS = re.compile(
    r"[._](?:print|show|plot|display|save|dump|write|to_csv|mkdir|makedirs|chdir|unlink|download|login|exit)"
    r"|seed\w*$|threads$|[._]set_device$|^os\.(?:remove|rename|replace)|^sys\.set(?:trace|profile)",
    re.IGNORECASE,
)
"""Paths of functions that show or write results, or that set seeds, devices and threads: every training sets these
itself."""
_OF_PLACES = re.compile(
    r"^(?:WANDB|MLFLOW|COMET|NEPTUNE|CLEARML)_|(?:DIR|PATH)$|(?:^|_)(?:DEVICES|THREADS|HOME|CACHE|FOLDER|ROOT|LOG|LEVEL"
    r"|VERBOSE|VERBOSITY|PROGRESS_BARS?|TOKEN|KEY|PARALLELISM|PORT|ADDR|HOST|URL)$"
)
"""Environment variables for where a process runs, reads and writes. Threads are pinned, and devices are in the key."""
_BY_TEXT = ("getattr", "setattr", "delattr", "vars")
_RUN_TRAININGS = ("hpstage", "optuna")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class Effects:
    """The effects of importing a module.

    Attributes:
        statements: the statements that have effects, in order, each as code.
        made_by: the statements that make the values which ``statements`` name, in this and other modules.
        code: the user's functions and classes that any of these statements name.
    """

    statements: list[types.CodeType] = field(default_factory=list)
    made_by: list[types.CodeType] = field(default_factory=list)
    code: list[Any] = field(default_factory=list)


def imported_with(names: Iterable[str]) -> Iterator[types.ModuleType]:
    """Yield the user's modules with these names and those that they import, directly or indirectly; all with their
    parent packages, sorted by name."""
    found: dict[str, types.ModuleType] = {}
    todo = [*names]
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in found or not isinstance(module, types.ModuleType) or not is_users(name):
            continue
        found[name] = module
        todo += (each for path in (name, *_imports_of(module).values()) for each in beginnings(path))
    return iter([found[name] for name in sorted(found)])


def effects_of(module: types.ModuleType) -> Effects:
    """Return the effects that importing a user's module has outside of that module.

    Effects are assignments and deletions in libraries, calls of libraries whose result is dropped, and calls of the
    user's functions with such effects. Code under ``if __name__ == "__main__"`` does not count.
    """
    found = Effects()
    traced: set[tuple[str, str]] = set()
    for statement in _acting(_tree(module).body, _Scope(module)):
        found.statements.append(compiled(ast.Module([statement], []), ""))
        _trace(statement, module, found, traced)
    return found


class _Scope:
    """The meaning of names in a module, or in a function of it."""

    def __init__(self, module: types.ModuleType, within: ast.AST | None = None) -> None:
        self.module = module
        self.imports = _imports_of(module)
        self.local: set[str] = set()
        if within is not None:
            inner = _imports(within, _package(module), everywhere=True)
            self.local = _bound_in(within) - inner.keys()
            self.imports = {**self.imports, **inner}

    def value(self, name: str) -> object:
        return None if name in self.local else vars(self.module).get(name)

    def path(self, node: ast.expr) -> str | None:
        """Return the dotted path of the library object that an expression reads or calls, such as
        ``torch.nn.functional.gelu``; ``None`` if the expression begins with the user's own code."""
        if isinstance(node, ast.Name):
            return self._root(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.path(node.value)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Subscript):
            return self.path(node.value)
        if isinstance(node, ast.Call):
            by_text = isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT and bool(node.args)
            return self.path(node.args[0] if by_text else node.func)
        return None

    def _root(self, name: str) -> str | None:
        if name in self.local:
            return None
        value = vars(self.module).get(name)
        if isinstance(value, types.ModuleType):
            return None if is_users(value.__name__) else value.__name__
        if isinstance(value, types.FunctionType | type):
            return None if is_users_code(value) else f"{module_of(value)}.{value.__qualname__}"
        path = self.imports.get(name)
        return None if path is None or is_users(path) else path


def _acting(body: list[ast.stmt], scope: _Scope) -> Iterator[ast.stmt]:
    """Yield the statements that act outside of the module. A compound statement is yielded as a whole, since it decides
    which of its statements run."""
    for statement in _not_of_main(body):
        if isinstance(statement, ast.ClassDef):
            yield from _acting(statement.body, scope)
            continue
        called: list[types.FunctionType] = []
        acts = _acts(statement, scope, called) or _any_acts(called)
        if acts or any(any(_acting(inner, scope)) for inner in _bodies(statement)):
            yield statement


def _not_of_main(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import; for ``if __name__ == "__main__"``, only those under its ``else``."""
    for statement in body:
        if isinstance(statement, ast.If) and _is_main(statement.test):
            yield from _not_of_main(statement.orelse)
        else:
            yield statement


def _is_main(test: ast.expr) -> bool:
    parts = [*ast.walk(test)]
    named = any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)
    compared = any(isinstance(part, ast.Constant) and part.value == "__main__" for part in parts)
    return named and compared and any(isinstance(part, ast.Eq) for part in parts)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, _FUNCTIONS):
        return
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _acts(statement: ast.stmt, scope: _Scope, called: list[types.FunctionType]) -> bool:
    """Return whether a statement itself acts outside of the module; the user's functions that it calls are added to
    ``called``."""
    if isinstance(statement, ast.Assign | ast.Delete):
        targets = [part for target in statement.targets for part in _parts(target)]
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr):
        return _does(statement.value, scope, called)
    else:
        return False
    held = [target for target in targets if isinstance(target, ast.Attribute | ast.Subscript)]
    if any(_counts(scope.path(target), target) for target in held):
        return True
    if not isinstance(statement, ast.Assign):
        return False
    if [getattr(one, "id", "") for one in targets] == ["_"]:
        return _does(statement.value, scope, called)
    if isinstance(statement.value, ast.Call):  # a call of a library is no effect: its result is used
        called += _function(statement.value.func, scope)
    return False


def _parts(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _parts(element)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def _does(expression: ast.expr, scope: _Scope, called: list[types.FunctionType]) -> bool:
    """Return whether an expression whose result is dropped does something outside of the module."""
    if isinstance(expression, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return _does(expression.elt, scope, called)
    if isinstance(expression, ast.BoolOp):
        return any(_does(value, scope, called) for value in expression.values)
    if isinstance(expression, ast.IfExp):
        return any(_does(value, scope, called) for value in (expression.body, expression.orelse))
    if isinstance(expression, ast.Tuple | ast.List):
        return any(_does(value, scope, called) for value in expression.elts)
    if not isinstance(expression, ast.Call):
        return False
    if isinstance(expression.func, ast.Name):
        name = expression.func.id
        if name in ("any", "all", "list", "set", "tuple"):
            return any(_does(value, scope, called) for value in expression.args)
        if name == "exec" and scope.value(name) is None:
            return True
        if name in ("getattr", "vars"):  # which only read
            return False
    called += _function(expression.func, scope)
    return _counts(scope.path(expression), expression)


def _counts(path: str | None, node: ast.expr) -> bool:
    """Return whether a change or a call of the object at this path may affect training."""
    if path is None:
        return False
    package = path.partition(".")[0]
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    if package == "warnings":
        return "error" in texts  # warnings then raise
    if package in _PASSED_BY and not path.startswith("unittest.mock"):
        return False
    if _OBSERVES.search(path) or (isinstance(node, ast.Call) and _SHOWS.search(path)):
        return False
    if path == "pandas.set_option" and any(text.startswith("display") for text in texts):
        return False
    if path.startswith(("os.environ", "os.putenv")):
        variables = [text for text in texts if text.isidentifier() and text.isupper()]
        return not variables or not all(map(_OF_PLACES.search, variables))
    return True


def _function(node: ast.expr, scope: _Scope) -> list[types.FunctionType]:
    """Return the user's function that an expression names: ``setup``, ``patches.setup``, ``Patches.setup`` or
    ``Patches().setup``."""
    found: object = None
    if isinstance(node, ast.Name):
        found = scope.value(node.id)
    elif isinstance(node, ast.Attribute):
        owner = node.value.func if isinstance(node.value, ast.Call) else node.value
        holder = scope.value(owner.id) if isinstance(owner, ast.Name) else None
        if isinstance(holder, types.ModuleType):
            found = vars(holder).get(node.attr)
        elif isinstance(holder, type):
            found = next((vars(base)[node.attr] for base in holder.__mro__ if node.attr in vars(base)), None)
    while (inner := getattr(found, "__wrapped__", None)) is not None:  # also of class methods and static ones
        found = inner
    return [found] if isinstance(found, types.FunctionType) and is_users_code(found) else []


def _any_acts(functions: list[types.FunctionType]) -> bool:
    """Return whether any of the user's functions, or a function that they call, does something outside of its module.
    Functions that run trainings are skipped: they do not train themselves."""
    todo = [*functions]
    seen: set[types.FunctionType] = set()
    while todo:
        function = todo.pop()
        module = sys.modules.get(function.__module__)
        if function in seen or module is None or vars(module) is not function.__globals__:
            continue
        seen.add(function)
        for node in _written(function, module):
            scope = _Scope(module, node)
            paths = {scope.path(part) for part in ast.walk(node) if isinstance(part, ast.Name)}
            if any(path.partition(".")[0] in _RUN_TRAININGS for path in paths if path is not None):
                continue
            if any(_acts(part, scope, todo) for part in ast.walk(node) if isinstance(part, ast.stmt)):
                return True
    return False


def _written(function: types.FunctionType, module: types.ModuleType) -> list[ast.AST]:
    bodies, nodes = [_tree(module).body], list[ast.AST]()
    for name in function.__qualname__.split("."):
        nodes = [node for body in bodies for node in body if getattr(node, "name", "") == name]
        bodies = [node.body for node in nodes if isinstance(node, ast.ClassDef)]
    return [node for node in nodes if isinstance(node, _FUNCTIONS)]


def _trace(node: ast.AST, module: types.ModuleType, found: Effects, traced: set[tuple[str, str]]) -> None:
    """Add the user's code that a statement names, and the statements that make the values it names."""
    own = _bound_in(node)
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part.id not in own:
            _trace_name(part.id, module, found, traced)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            owner = vars(module).get(part.value.id)
            if isinstance(owner, types.ModuleType) and is_users(owner.__name__):
                _trace_name(part.attr, owner, found, traced)


def _trace_name(name: str, module: types.ModuleType, found: Effects, traced: set[tuple[str, str]]) -> None:
    if (module.__name__, name) in traced:
        return
    traced.add((module.__name__, name))
    value = vars(module).get(name)  # None if it was deleted
    if isinstance(value, types.ModuleType):
        return
    if is_users_code(value):
        found.code.append(value)
        return
    for statement in _makers(_tree(module)).get(name, ()):
        found.made_by.append(compiled(ast.Module([statement], []), ""))
        _trace(statement, module, found, traced)
    imports = _imports_of(module)
    paths = [imports[name]] if name in imports else [f"{base}.{name}" for base in imports.values()]  # import *
    for path in paths:
        owner, _, member = path.rpartition(".")
        if owner in sys.modules and is_users(owner):
            _trace_name(member, sys.modules[owner], found, traced)


@functools.lru_cache(256)
def _makers(tree: ast.Module) -> Mapping[str, list[ast.stmt]]:
    """Return the statements of a module that bind names in it, by name. Imports are in :func:`_imports`."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in _not_of_main(tree.body):
        todo: list[ast.AST] = [] if isinstance(statement, ast.Import | ast.ImportFrom) else [statement]
        names: set[str] = set()
        while todo:
            part = todo.pop()
            if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
                names.add(part.id)
            elif isinstance(part, _WITH_NAMES_OF_THEIR_OWN):
                names.add(getattr(part, "name", ""))
            else:
                todo += ast.iter_child_nodes(part)
        for name in names:
            found.setdefault(name, []).append(statement)
    return types.MappingProxyType(found)


_WITH_NAMES_OF_THEIR_OWN = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def _bound_in(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            found.add(part.id)
        elif isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(part.name)
    return found


def _imports_of(module: types.ModuleType) -> Mapping[str, str]:
    return _imports(_tree(module), _package(module))


def _package(module: types.ModuleType) -> str:
    return vars(module).get("__package__") or ""


@functools.lru_cache(1024)
def _imports(node: ast.AST, package: str, *, everywhere: bool = False) -> Mapping[str, str]:
    """Return the paths that import statements bind, by name; and the module of each ``from`` import under
    ``<module>.*``, which is no valid name. Imports inside functions are included only if ``everywhere`` is set."""
    found: dict[str, str] = {}
    todo: list[ast.AST] = [node]
    while todo:
        part = todo.pop()
        if isinstance(part, ast.Import):
            for alias in part.names:
                found[alias.asname or alias.name] = alias.name
                if alias.asname is None:
                    top = alias.name.partition(".")[0]
                    found.setdefault(top, top)
        elif isinstance(part, ast.ImportFrom):
            base = f"{'.' * part.level}{part.module or ''}"
            with suppress(ImportError):  # above the package: no such module is loaded
                base = importlib.util.resolve_name(base, package)
            found.update({alias.asname or alias.name: f"{base}.{alias.name}" for alias in part.names})
            found[f"{base}.*"] = base
        elif isinstance(part, ast.If) and "TYPE_CHECKING" in ast.unparse(part.test):
            todo += part.orelse  # the body never runs
        elif everywhere or not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(part)
    return types.MappingProxyType(found)


def _tree(module: types.ModuleType) -> ast.Module:
    """Return the syntax tree of a module's source, as it was first read after the module was imported or reloaded; an
    empty tree if there is no source, as in a notebook."""
    spec = vars(module).get("__spec__")
    of, by, tree = _read.get(module.__name__, (None, None, _NOTHING))
    if of is None or of() is not module or by is not spec:
        tree = _parsed_of(vars(module).get("__file__"))
        _read[module.__name__] = weakref.ref(module), spec, tree
    return tree


_read: dict[str, tuple[weakref.ref[types.ModuleType] | None, object, ast.Module]] = {}
_NOTHING = ast.Module([], [])


def _parsed_of(file: object) -> ast.Module:
    if not isinstance(file, str) or not file.endswith(".py") or not is_users_file(file):
        return _NOTHING
    try:
        tree: ast.Module = compiled(Path(file).read_bytes(), file, ast.PyCF_ONLY_AST)
        return tree
    except (OSError, SyntaxError, ValueError):
        return _NOTHING  # removed, or in the midst of being edited
