"""Names that a state may contain, so that loading it runs only known code.

A state may come from anyone. It names classes, functions and generators, which are looked up when it is loaded. From
libraries, it may name only functions that do nothing but compute: a function that reads files or runs programs would do
so with arguments that the state also provides. Looking up a name imports only modules of the libraries listed here.
"""

from __future__ import annotations

import abc
import builtins
import collections
import dataclasses
import functools
import importlib
import inspect
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from hpstage.training.capture.kind import RUNNERS, is_struct, numpy, torch
from hpstage.training.capture.kinds import INSTANCE, kind_of_type
from hpstage.training.capture.survey import Survey
from hpstage.training.code.attributes import container_of, has_own_memory
from hpstage.training.code.namespaces import OF_LIBRARY
from hpstage.training.code.owner import found_in, is_users_code, module_of, package_of

RANDOM: dict[str, Callable[[], Any]] = {
    "Random": lambda: sys.modules["random"].Random,
    "Generator": lambda: torch() and torch().Generator,
    "RandomState": lambda: numpy().random.RandomState,
}

_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, range, slice)
CONTAINERS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(list, dict, set, frozenset, bytearray),
        *(collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque),
    )
}
Method = types.MethodType | types.MethodWrapperType | types.BuiltinMethodType


def method_of(owner: object, name: str) -> Method | None:
    """Return the method ``name`` of an object, or the class method ``name`` of a class; ``None`` if a state may not
    name it.

    A state may name methods written in Python, and methods of types written in C (``append``, ``__len__``). It may not
    name other special methods written in C (``__reduce_ex__``), except operators, nor ``str.format`` and
    ``str.format_map``, which look up attributes by names in a text."""
    found: Any
    if isinstance(owner, type):
        found = next((vars(kind)[name] for kind in owner.__mro__ if name in vars(kind)), None)
        if isinstance(found, classmethod) and isinstance(found.__func__, types.FunctionType):
            return types.MethodType(found.__func__, owner)
        if not isinstance(found, types.ClassMethodDescriptorType) or _is_special(name):
            return None
        method: Method = found.__get__(None, owner)
        return method
    found = next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, owner)
    if isinstance(found, types.MethodDescriptorType) and found not in _FORMATTING:
        return found.__get__(owner) if name in _OPERATORS or not _is_special(name) else None
    return found.__get__(owner) if isinstance(found, types.WrapperDescriptorType) else None


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


_OPERATORS = frozenset(name for name, value in vars(operator).items() if isinstance(value, types.BuiltinFunctionType))
_FORMATTING = (str.format, str.format_map)


def may_be_given(function: object) -> bool:
    """Return whether a state may provide arguments for a function: it must be the user's, or do nothing but compute."""
    if isinstance(function, functools.partial):
        return may_be_given(function.func)
    if isinstance(function, types.FunctionType) and is_users_code(function):
        return True
    found = pure_name(function)
    return found is not None and found not in _CALLING


def creatable(base: Survey, module: str, qualname: str) -> type | None:
    """Return the class of that name if a state may create its instances from their attributes; else ``None``.

    It may do so for the user's classes and dataclasses that were met before training began, named tuples of imported
    modules, the library classes that :data:`_KINDS` lists, and those for which :func:`_is_among_met` is true. Creating
    an instance runs none of the class's code."""
    kind = base.named.get((module, qualname)) or found_in(_module(module), qualname)
    if not isinstance(kind, type):
        return None
    met = (module, qualname) in base.named and (is_users_code(kind) or dataclasses.is_dataclass(kind))
    has_named_items = issubclass(kind, tuple) and (hasattr(kind, "_fields") or is_struct(kind))
    if not (met or has_named_items or issubclass(kind, _kinds_in(module)) or _is_among_met(base, kind)):
        return None
    if any("__del__" in vars(part) for part in kind.__mro__) or inspect.isabstract(kind):
        return None
    if issubclass(kind, tuple):
        return kind if kind.__itemsize__ == tuple.__itemsize__ else None
    if container_of(kind) is None and (has_own_memory(kind) or not _is_made_by_object(kind)):
        return None
    return None if issubclass(kind, RUNNERS) else kind


def _is_made_by_object(kind: type) -> bool:
    """Return whether ``object.__new__`` can create instances of a class: a base in C may need its own ``__new__``."""
    try:
        return type(object.__new__(kind)) is kind
    except TypeError:
        return False


def _is_among_met(base: Survey, kind: type) -> bool:
    """Return whether training uses a library's class, or its package, so that a state may create instances of it.

    Either the user's code names the class (``np.polynomial.Polynomial``), or training begins with objects from its
    package that a state holds by their attributes, too (``Subset`` next to ``TensorDataset``). Each call of the class
    must return a new instance: it is no singleton."""
    plain = type(kind) in (type, abc.ABCMeta) and not any("__new__" in vars(part) for part in kind.__mro__[:-1])
    met = f"{OF_LIBRARY}{module_of(kind)}.{kind.__qualname__}" in base.paths or package_of(kind) in base.packages
    return plain and met and kind_of_type(kind) is INSTANCE


def _kinds_in(module: str) -> tuple[type, ...]:
    """Return the classes listed for a library's module. A state may create instances of these and their subclasses."""
    listed = _KINDS.get(next((package for package in _KINDS if f"{module}.".startswith(f"{package}.")), ""), ())
    try:
        # The module may have been imported by training only: a fork has yet to import it.
        kinds = [found_in(importlib.import_module(of), name) for of, name in listed]
    except ImportError:
        return ()
    return tuple(kind for kind in kinds if isinstance(kind, type))


def _module(name: str) -> types.ModuleType | None:
    """Return the module of this name if it is loaded, after importing the modules listed for its package."""
    _kinds_in(name)
    return sys.modules.get(name)


_OF_TORCH = (
    ("torch.nn", "Module"),
    ("torch.optim", "Optimizer"),
    ("torch.optim.lr_scheduler", "LRScheduler"),
    ("torch.nn.modules.module", "_WrappedHook"),
    ("torch.nn.utils.weight_norm", "WeightNorm"),
    ("torch.nn.utils.prune", "BasePruningMethod"),
    *(
        ("torch.nn.utils.spectral_norm", f"SpectralNorm{name}")
        for name in ("", "LoadStateDictPreHook", "StateDictHook")
    ),
)
_KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "torch.nn": _OF_TORCH,
    "torch.optim": _OF_TORCH,
    "torch.utils.hooks": (("torch.utils.hooks", "RemovableHandle"),),
    "torch.distributions": (
        ("torch.distributions.distribution", "Distribution"),
        ("torch.distributions.transforms", "Transform"),
        ("torch.distributions.constraints", "Constraint"),
    ),
    "scipy.sparse": (("scipy.sparse._base", "_spbase"),),
}
"""By package: classes whose instances, like those of their subclasses in it, are defined by their attributes."""


def nameable(base: Survey, module: str, qualname: str) -> Any:
    """Return the class or function of that name if a state may name it although training has not met it as a value;
    else ``None``. It must be a class whose instances a state may hold, or a function in a class of the user's that
    training has met."""
    owner = base.named.get((module, qualname.rpartition(".")[0]))
    if isinstance(owner, type) and is_users_code(owner):
        member = vars(owner).get(qualname.rpartition(".")[2])
        member = member.__func__ if isinstance(member, staticmethod) else member
        if isinstance(member, types.FunctionType):
            return member
    plain = (kind for kind in _plain_kinds() if (kind.__module__, kind.__qualname__) == (module, qualname))
    return next(plain, None) or creatable(base, module, qualname)


def _plain_kinds() -> Iterator[type]:
    """Yield the classes of plain values, containers, tensors and arrays, and Python's own exceptions."""
    library, arrays = torch(), numpy()
    yield from (*_PLAIN, *CONTAINERS.values(), arrays.ndarray, *arrays.sctypeDict.values(), *_EXCEPTIONS)
    if library is not None:
        yield from (library.Tensor, library.nn.Parameter, library.Generator)


_EXCEPTIONS = tuple(
    kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)
)


_OF_FUNCTIONS = frozenset(
    (
        *(f"torch{name}" for name in ("", ".nn.functional", ".nn.init", ".special", ".linalg", ".fft")),
        *("math", "cmath", "numpy", "numpy.linalg", "numpy.fft"),
    )
)
_MODULES = _OF_FUNCTIONS | {"torch.optim.swa_utils", "operator", "builtins", "functools"}
_OF_PYTHON = frozenset(
    (
        *("abs", "all", "any", "ascii", "bin", "callable", "chr", "divmod", "format", "hash", "hex", "id"),
        *("isinstance", "issubclass", "iter", "len", "max", "min", "next", "oct", "ord", "pow", "repr", "round"),
        *("sorted", "sum"),
    )
)
_CALLING = frozenset(
    (
        *(("builtins", name) for name in ("iter", "max", "min", "next", "sorted")),
        *(("numpy", name) for name in ("apply_along_axis", "apply_over_axes", "array2string", "pad", "piecewise")),
        ("functools", "reduce"),
    )
)
"""Functions that call an argument or pass it on. No state may provide arguments for them."""
_WRITING = re.compile(r"save|load|from|genfrom|to|copyto$|fill_|put")
"""Prefixes of the names of NumPy functions that open files or change an argument."""
_OF_OPERATORS = frozenset(
    (
        *("abs", "add", "and_", "concat", "contains", "countOf", "eq", "floordiv", "ge", "getitem", "gt", "index"),
        *("indexOf", "inv", "invert", "is_", "is_not", "le", "length_hint", "lshift", "lt", "matmul", "mod", "mul"),
        *("ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "truth", "xor"),
    )
)
"""Functions of ``operator`` that change no argument, unlike ``setitem`` and ``iadd``."""
_OF_SCHEDULERS = frozenset(("SWALR._cosine_anneal", "SWALR._linear_anneal"))
_NOT_PURE = frozenset(("from_file", "boolean_dispatch", "handle_torch_function", "call"))
"""Functions that open files or call their arguments."""


def pure_name(function: Any) -> tuple[str, str] | None:
    """Return the module and name of a pure function, one that only computes; ``None`` for any other function."""
    if not _may_be_pure(function):
        return None
    for module in sorted(_MODULES):
        for name in (function.__name__, getattr(function, "__qualname__", "")):
            if pure_function(module, name) is function:
                return module, name
    return None


def pure_function(module: str, name: str) -> Any:
    """Return the pure function of that name, or ``None`` if there is none."""
    space = sys.modules.get(module)
    if module not in _MODULES or space is None or name in _NOT_PURE:
        return None
    if module == "torch.optim.swa_utils":
        return getattr(space.SWALR, name.partition(".")[2]) if name in _OF_SCHEDULERS else None
    found = None if name.startswith("_") else vars(space).get(name)
    if module == "torch":  # functions that work on tensors, not those that change settings
        of_tensors = type(found) is types.BuiltinFunctionType and found.__qualname__.startswith("_VariableFunctions")
        return found if of_tensors else None
    if module.startswith("numpy") and (type(found) not in functions_of_numpy() or _WRITING.match(name)):
        return None
    if module == "functools" and name != "reduce":
        return None
    if (module == "builtins" and name not in _OF_PYTHON) or (module == "operator" and name not in _OF_OPERATORS):
        return None
    return found if _may_be_pure(found) else None


def _may_be_pure(function: object) -> bool:
    return type(function) in (types.FunctionType, types.BuiltinFunctionType, *functions_of_numpy())


def functions_of_numpy() -> tuple[type, ...]:
    """Return the types of NumPy's own functions: that of ``np.add`` and that of ``np.mean``."""
    return numpy().ufunc, type(numpy().mean)


def ufunc_name(base: Survey, function: Any) -> tuple[str, str] | None:
    """Return the module and name under which a state may name a NumPy ufunc (``scipy.special.expit``), which only
    computes; ``None`` for any other function."""
    if type(function) is numpy().ufunc:
        for module in sorted(sys.modules):
            if ufunc(base, module, function.__name__) is function:
                return module, function.__name__
    return None


def ufunc(base: Survey, module: str, name: str) -> Any:
    """Return the NumPy ufunc of that name in a module that a state may name; ``None`` if the module has none."""
    found = vars(module_named(base, module) or types).get(name)
    return found if type(found) is numpy().ufunc else None


def module_named(base: Survey, name: str) -> types.ModuleType | None:
    """Return the module of that name if a state may name it; else ``None``. It must be a module that training has met
    as a value, a library's module that its code names, or a module of functions that only compute."""
    names = base.paths.get(f"{OF_LIBRARY}{name}")
    found = base.named.get((name, "")) if names is None else getattr(names.obj, "owner", None)
    if found is None and name in _OF_FUNCTIONS:
        found = sys.modules.get(name)
    return found if isinstance(found, types.ModuleType) else None
