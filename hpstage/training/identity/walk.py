"""Visits loaded code, that is functions, classes, modules, values and all that they name, and digests it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import CodeType, FunctionType, GenericAlias, MemberDescriptorType, MethodType, ModuleType
from typing import Any, get_args

from hpstage.errors import UsageError
from hpstage.training.code import bytecode
from hpstage.training.code.attributes import COMPILED, own_of
from hpstage.training.code.bytecode import Imported, cells_of, references
from hpstage.training.code.effects import Effects, effects_of, imported_with
from hpstage.training.code.lookups import Lookups, lookups
from hpstage.training.code.made import functions_into, is_script, script_digest
from hpstage.training.code.names import READERS, names_in, notes, texts_in
from hpstage.training.code.owner import (
    bound_to,
    classes_below,
    found_in,
    functions_in,
    has_name,
    is_users,
    is_users_code,
    module_of,
    name_of,
    of_user,
)
from hpstage.training.code.patches import operators
from hpstage.training.code.registrations import registrations_of
from hpstage.training.code.source import ABSENT, as_written, code_of, see_as_written, submodules_of, version_of
from hpstage.training.code.string_digest import hashed
from hpstage.training.identity.entities import Entities, Entity
from hpstage.training.identity.files import DataFiles, found_at, paths_read
from hpstage.training.identity.values import Values, is_function, is_recorded_elsewhere, without_keys

_FORMAT = "hpstage-code-2"
FIXED, COMPUTED = "=", "~"
"""Suffixes of names of values in :meth:`Walk.loaded`: literals or code; and values that each host computes."""
_SCRIPT = "__main__"
# Python's own bookkeeping in classes; some of it appears late.
_IGNORED_MEMBERS = frozenset(
    (
        "_abc_impl",
        *(f"__{name}__" for name in ("abstractmethods", "annotate", "annotate_func", "annotations", "classcell")),
        *(f"__{name}__" for name in ("annotations_cache", "dataclass_fields", "dataclass_params", "dict", "doc")),
        *(f"__{name}__" for name in ("firstlineno", "module", "parameters", "qualname")),
        *(f"__{name}__" for name in ("slotnames", "static_attributes", "type_params", "weakref")),
    )
)
_NAMES = ("__wrapped__", "__module__", "__name__", "__qualname__", "__doc__", "__annotations__")
"""Attributes that ``functools.update_wrapper`` sets."""
# Names in every module for where it is, and how it was loaded.
_IGNORED_NAMES = frozenset(
    f"__{name}__"
    for name in ("name", "file", "path", "spec", "loader", "cached", "builtins", "package", "doc", "annotations")
)


class Walk:
    """Visits code and what it names. The digest covers everything visited, regardless of the order.

    Args:
        subject: the trainable or function, of which some attributes are recorded elsewhere, and whose ``stateless``
            names globals that do not count.
        files: if given, paths in values count by the files that they name.
        within: objects whose content is not visited.
        check: whether to check that modules which count as a whole match their files.

    Attributes:
        packages: versions of the libraries that are named.
        values: converts values to strings.
        paths: possible paths of files that the code reads by names written in it.
        sources: files of modules that count by all of their code, imported or not.
    """

    def __init__(
        self,
        subject: object = None,
        *,
        files: DataFiles | None = None,
        within: Iterable[object] = (),
        check: bool = True,
    ) -> None:
        self.packages: dict[str, str] = {}
        self.values = Values(self.refer, self._with_functions, files=files, within=within)
        self._stateless = frozenset(getattr(subject, "stateless", ()))
        self._subject = subject
        self._subjects = frozenset() if is_function(subject) else frozenset(type(subject).__mro__)
        self.paths: set[str] = set()
        self.sources: set[str] = set()
        self._files = files
        self._check = check
        self._entities = Entities()
        self._values: dict[str, tuple[str, bool]] = {}
        self._written: dict[str, frozenset[str]] = {}
        self._names_script = False
        self._names_operators = False
        self._effects: dict[str, Effects] = {}
        self._acting: set[str] = set()
        self._reads: set[str] = set()
        self.names_defaults = False

    def patched(self, found: Iterable[tuple[str, Any]]) -> str:
        """Visit the user's code in libraries, given as pairs of place and value. Return the string that represents
        it."""
        defining = [self.refer(module) for module in operators()] if self._names_operators else []
        return "\n".join([*sorted({self._put(place, value) for place, value in found}), *defining])

    def _put(self, place: str, value: Any) -> str:
        if isinstance(value, list):  # an entry of a table, which several modules may hold under any names
            place = place[place.index("[") :]
        return f"at {place}: {self.values.content([*value.values()] if isinstance(value, dict) else value)}"

    def add_effects(self, *, of_script: bool = False) -> None:
        """Include the effects on libraries and on the process of importing the user's modules: those with visited code,
        and those that they import. The script is included only if ``of_script`` is set, since a worker does not have
        it."""
        while (names := self._modules(of_script)) != self._acting:
            self._acting = names
            for module in imported_with(names):
                self._add_effects(module)

    def _modules(self, of_script: bool) -> set[str]:
        targets = [target for target, _ in self._entities.visited()]
        found = {target.__name__ if isinstance(target, ModuleType) else module_of(target) for target in targets}
        return found if of_script else found - {_SCRIPT}

    def _add_effects(self, module: ModuleType) -> None:
        if module.__name__ in self._effects:
            return
        found = self._effects[module.__name__] = effects_of(module)
        if found.statements:
            entity = self._entities.new(found, "<import>", module.__name__)
            entity.lines.add(f"does {' '.join(map(bytecode.digest, found.statements))}")
            entity.lines.update(f"with {bytecode.digest(statement)}" for statement in found.made_by)
            with self.values.counting(lenient=True):
                entity.outer.update(f"names {self.refer(code)}" for code in found.code)

    def add_notes(self) -> None:
        """Include the docstrings, or the annotations, of everything visited if any visited code reads such."""
        noted: set[int] = set()
        while new := [pair for pair in self._entities.visited() if id(pair[0]) not in noted]:
            for target, entity in new:
                noted.add(id(target))
                if isinstance(target, type | FunctionType):
                    with self.values.counting(lenient=True):
                        entity.lines.update(f"notes {self.values.content(note)}" for note in notes(target, self._reads))

    def digest(self, root: str, *others: str) -> str:
        """Return the digest of ``root``, of the entities that ``others`` refer to, and of everything visited."""
        versions = [f"{name} {version}" for name, version in sorted(self.packages.items())]
        return self._entities.digest([_FORMAT, root], others, versions)

    def loaded(self) -> dict[str, str]:
        """Return digests of loaded objects by readable names, each without what the object refers to."""
        texts = {name: hashed("".join(sorted(marks)))[:16] for name, marks in self._entities.digests().items()}
        for name, (text, fixed) in self._values.items():
            texts[f"{name} {FIXED if fixed else COMPUTED}"] = hashed(self.named(text))[:16]
        return texts

    def named(self, text: str) -> str:
        """Replace references in a string of this walk by the names of the entities."""
        return self._entities.named(text)

    def refer(self, target: object) -> str:
        """Visit a function, class or module that code names. Return the string that represents it."""
        if isinstance(target, functools.partial):
            arguments = [
                self.refer(target.func),
                self.values.value(target.args),
                self.values.value(dict(target.keywords)),
            ]
            return f"partial({', '.join(map(str, arguments))})"
        if isinstance(target, MethodType) and not _is_librarys(target):
            return f"{self.refer(target.__self__)}.{self.refer(target.__func__)}"
        if (owner := bound_to(target)) is not None:
            return f"{self.values.content(owner)}.{name_of(target).rpartition('.')[2]}"
        if isinstance(target, GenericAlias) and any(map(is_users_code, target.__args__)):
            return f"{self.refer(target.__origin__)}{self.values.content(target.__args__)}"
        if isinstance(target, ModuleType):
            return self._module(target)
        if is_script(target):
            return self._script(target)
        if not has_name(target):
            return self.values.content(target)
        module = module_of(target)
        name = name_of(target)
        if not (is_users_code(target) or is_users_code(type(target)) or of_user(module)):
            self._library(module)
            return self._with_functions(f"library {module}.{name}", target)
        if target not in self._entities:
            entity = self._entities.new(target, name, module)
            with self.values.counting(lenient=True):
                if isinstance(target, type):
                    self._class(entity, target)
                else:
                    self._function(entity, target)
        return f"code {self._entities.reference(target)}"

    def _with_functions(self, text: str, target: object) -> str:
        """Add to the string of a library's object the user's functions that it was built from."""
        functions = (function for function in functions_into(target) if is_users_code(function))
        return " of ".join([text, *map(self.refer, functions)])

    def _script(self, target: Any) -> str:
        if target not in self._entities:
            self._library("torch")
            name = str(getattr(target, "name", None) or getattr(target, "original_name", ""))
            entity = self._entities.new(target, name, "TorchScript")
            original = getattr(target, "_torchdynamo_inline", None)
            if original is not None:
                entity.outer.add(f"script of {self.refer(original)}")
            else:
                entity.lines.add(f"script {script_digest(target)}")
        return f"code {self._entities.reference(target)}"

    def _library(self, module: str) -> str:
        package = module.partition(".")[0]
        if package != "hpstage":  # the parts of hpstage that decide bits are named separately: the numerics class
            self.packages[package] = version_of(package)
        return f"library {module}"

    def _class(self, entity: Entity, cls: type) -> None:
        bases = [self.refer(base) for base in cls.__bases__]
        entity.lines.add(f"class({', '.join(bases)})")
        if is_users_code(type(cls)):
            entity.lines.add(f"metaclass {self.refer(type(cls))}")
        entity.outer.update(registrations_of(cls))
        ignored = _IGNORED_MEMBERS.union(without_keys(cls))
        if of_subject := cls in self._subjects:
            ignored = ignored.union(self._stateless)
        for member, value in sorted(vars(cls).items()):
            if member in ignored or isinstance(value, MemberDescriptorType):  # of __slots__
                continue
            if member == "__match_args__" and value == _fields_of(cls):
                continue
            if member == "__orig_bases__" and not any(is_users_code(arg) for base in value for arg in get_args(base)):
                continue
            if of_subject and is_recorded_elsewhere(member, value):
                continue
            whole = isinstance(value, functools.partialmethod)  # its arguments count, too
            parts = [] if whole else list(functions_in(value))
            for part in parts:
                entity.lines.add(f"{member}: {self.refer(part)}")
            if not parts:
                self._hold(
                    entity, f"{member} =", self.values.content(value), module_of(cls), f"{cls.__name__}.{member}"
                )

    def _function(self, entity: Entity, function: Any) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            entity.lines.add(f"wraps {self.refer(wrapped)}")
        if not isinstance(function, FunctionType):
            if wrapped is None:
                entity.lines.add(self._with_functions("made", function))
            if is_users_code(type(function)):  # a wrapper with the wrapped function's name, by update_wrapper()
                entity.outer.add(f"of {self.refer(type(function))}")
                self._add_attributes(entity, function, own_of(function), _NAMES)
            return
        code = as_written(function)
        entity.lines.add(f"does {bytecode.digest(code)}")
        entity.lines.add(f"defaults {self.values.value((function.__defaults__ or (), function.__kwdefaults__ or {}))}")
        cells = cells_of(function)
        cells.pop("__class__", None)
        self._add_attributes(entity, function, vars(function), ("__wrapped__", COMPILED))
        self._reads.update(READERS.intersection((*names_in(code), *texts_in(code))))
        self._names_operators |= "ops" in names_in(code)
        self.names_defaults |= "defaults" in names_in(code) or "defaults" in texts_in(code)
        found = references(code, function.__globals__, cells, self._imported, of_user)
        for named in found.named:
            if named.path not in _IGNORED_NAMES and not self._is_stateless(named.module, named.name):
                what = f"names {named.path}:"
                opaque = self.values.opaque.copy()
                self._hold(entity, what, self.values.content(named.content), named.module, named.name)
                if self._check and named.module and (found_here := self.values.opaque - opaque):
                    raise UsageError(
                        f"{named.module}.{named.name} is or holds a {min(found_here)}, which has no digest: two runs "
                        f"may differ in it. Make it where it is used, keep plain values instead, or name "
                        f"{named.name!r} in `stateless` if training does not depend on it"
                    )
        for imported in found.imported:
            entity.outer.add(f"imports {imported.member} {self._import(imported)}")
        self.paths.update(found_at(path, function.__globals__) for path in paths_read(code, function.__globals__))
        self._look_up(entity, lookups(code, function.__globals__), function)

    def _add_attributes(
        self, entity: Entity, function: object, own: Mapping[str, object], ignored: Collection[str]
    ) -> None:
        for name, value in sorted(own.items()):
            if name not in ignored and not (function is self._subject and is_recorded_elsewhere(name, value)):
                entity.lines.add(f"has {name}: {self.values.content(value)}")

    def _look_up(self, entity: Entity, found: Lookups, function: FunctionType) -> None:
        """Visit everything that names computed at run time may refer to."""
        for name in sorted(found.modules):
            if is_users(name):
                entity.outer.add(f"imports {self._import(Imported(name))}")
        for base in found.bases:
            entity.outer.update(f"subclass {self.refer(cls)}" for cls in _users_below(base))
        module = sys.modules.get(function.__module__)
        if not (found.own or found.anywhere) or module is None or vars(module) is not function.__globals__:
            return  # no lookups, or code sent by value, whose objects were sent along and count already
        entity.outer.add(f"in {self._module(module)}")
        if found.anywhere:
            package = module.__name__.partition(".")[0]
            if package != module.__name__:
                entity.outer.add(f"in {self._import(Imported(package))}")
            elif (file := vars(module).get("__file__")) is not None:
                for spec in submodules_of("", [os.path.dirname(file)]):
                    self._submodule(entity, spec, following=False)

    def _is_stateless(self, module: str, name: str) -> bool:
        return not self._stateless.isdisjoint((name, f"{module}.{name}", f"{module}:{name}")) if module else False

    def _hold(self, entity: Entity, what: str, text: str, module: str, name: str) -> None:
        """Record a value that code refers to. Module globals count separately: they may differ between hosts."""
        if not module:
            entity.lines.add(f"{what} {text}")
            return
        entity.outer.add(f"{what} {text}")
        place = f"{module}.{name}"
        if place not in self._values and (self._files is None):
            code = "\0" in text
            self._values[place] = text, code or name in self._literals(module)

    def _literals(self, module: str) -> frozenset[str]:
        if module not in self._written:
            code = code_of(getattr(sys.modules.get(module), "__spec__", None))
            self._written[module] = frozenset(bytecode.literals(code) if code is not None else ())
        return self._written[module]

    def _import(self, imported: Imported) -> str:
        content = self._imported(imported)
        return self._library(imported.module) if content is None else self.values.content(content)

    def _imported(self, imported: Imported) -> object:
        """Return the object that a function imports when it runs; ``None`` if it is not the user's or does not
        exist."""
        if not is_users(imported.module):
            return None
        try:
            return imported.result()
        except ImportError:
            # It may exist on workers only, or not be needed; if it is, the code raises when it runs.
            self.packages[imported.module] = ABSENT
            return None

    def _module(self, module: ModuleType) -> str:
        """Visit a module that is used as a whole: its contents, and its own code, submodules included."""
        if not of_user(module.__name__):
            return self._library(module.__name__)
        if module.__name__ == _SCRIPT:
            self._names_script = True
            return "the script"
        if module not in self._entities:
            entity = self._entities.new(module, "", module.__name__)
            with self.values.counting(lenient=True):
                code = code_of(module.__spec__)
                if code is not None:
                    entity.lines.add(f"does {bytecode.digest(code)}")
                    self.sources.add(os.path.abspath(vars(module).get("__file__") or ""))
                    self._see_as_written(module, code)
                for spec in submodules_of(module.__name__, vars(module).get("__path__", ())):
                    self._submodule(entity, spec)
                written = set(code.co_names) if code is not None else set()
                for name, content in sorted(vars(module).items()):
                    # Whether a submodule is already imported, and so an attribute, may be arbitrary.
                    chance = isinstance(content, ModuleType) and content.__name__ == f"{module.__name__}.{name}"
                    kept = name in written or not (chance or name.startswith(("__", "@")))  # @: pytest's
                    if kept and name not in _IGNORED_NAMES and not self._is_stateless(module.__name__, name):
                        self._hold(entity, f"{name} =", self.values.content(content), module.__name__, name)
        return f"module {self._entities.reference(module)}"

    def look_through_script(self) -> None:
        """Include the whole script if something that was visited uses it as a whole.

        A worker does not have the script. It receives only the objects that the code names; they count there
        themselves.
        """
        module = sys.modules[_SCRIPT]
        if not self._names_script or module in self._entities:
            return
        entity = self._entities.new(module, "", _SCRIPT)
        file = vars(module).get("__file__")
        code = code_of(module.__spec__ or (file and spec_from_file_location(_SCRIPT, file)))
        fixed: set[str] = set()
        if code is not None:
            entity.lines.add(f"does {bytecode.digest(code)}")
            self._see_as_written(module, code)
            fixed.update(bytecode.literals(code))
            for imported in references(code, {"__package__": module.__package__}, {}).imported:
                if is_users(imported.module):
                    entity.outer.add(f"imports {imported.member} {self._import(imported)}")
        for name, content in sorted(vars(module).items()):
            # The rest was created by this run: a study, results, a clock.
            if name in fixed or (not name.startswith("_") and _is_code(content)):
                entity.outer.add(f"{name} = {self.values.content(content)}")

    def _submodule(self, entity: Entity, spec: ModuleSpec, following: bool = True) -> None:
        """Visit a submodule of a package that is used as a whole: its code, and with ``following`` its imports."""
        code = code_of(spec)
        if code is None:
            return
        self.sources.add(os.path.abspath(spec.origin or ""))
        (entity.lines if following else entity.outer).add(f"submodule {spec.name} {bytecode.digest(code)}")
        if spec.name in sys.modules:
            self._see_as_written(sys.modules[spec.name], code)
        if not following:
            return
        for imported in references(code, {"__package__": spec.parent}, {}).imported:
            if not is_users(imported.module):
                self._library(imported.module)
            elif imported.module.partition(".")[0] != spec.name.partition(".")[0]:
                entity.outer.add(f"{spec.name} imports {imported.member} {self._import(imported)}")

    def _see_as_written(self, module: ModuleType, code: CodeType) -> None:
        if self._check:
            see_as_written(module, code)


def _fields_of(cls: type) -> object:
    """Return the default ``__match_args__`` of a dataclass or named tuple."""
    fields = vars(cls).get("__dataclass_fields__")
    if fields is None:
        return vars(cls).get("_fields")
    given = (field for field in fields.values() if field.init and not field.kw_only)
    return tuple(field.name for field in given if getattr(field._field_type, "name", "") != "_FIELD_CLASSVAR")


def _users_below(cls: type) -> Iterator[type]:
    """Yield the user's subclasses of a class, at any depth, except those that were replaced, as in notebooks:
    how long these stay alive is arbitrary."""
    for below in classes_below(cls):
        now = found_in(sys.modules.get(below.__module__), below.__qualname__)
        if is_users_code(below) and (now is None or now is below):
            yield below


def _is_code(value: object, depth: int = 3) -> bool:
    """Return whether ``value`` is the user's code, or a container of nothing else."""
    if isinstance(value, ModuleType):
        return is_users(value.__name__) and value.__name__ != _SCRIPT
    if isinstance(value, type) or is_function(value):
        return is_users_code(value) or of_user(module_of(value))
    if isinstance(value, dict | list | tuple | set | frozenset) and value and depth:
        return all(_is_code(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))
    return False


def _is_librarys(method: MethodType) -> bool:
    """Return whether a method is a function of a library, bound to the library's own object, as ``random.shuffle`` is.

    The states of such generators differ between processes. Before each step, they are set from the seed.
    """
    module = module_of(method.__func__)
    library = None if is_users(module) else sys.modules.get(module)
    return library is not None and getattr(library, getattr(method, "__name__", ""), None) == method
