"""Names that a state may contain, so that loading it runs only known code.

A state may come from anyone: it names classes, functions and generators, which are looked up. Of the functions of
libraries, it may name those that only compute, not arbitrary loaded ones: one that reads files or runs programs would
do so with arguments that the state also provides. Looking up a name imports nothing but modules of the libraries that
are listed here.
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
    """Return an object's method of this name if its class has a function for it, or one of those that Python's own
    types and libraries have in C (``__len__``, ``append``), or ``None``; of a class, its class method.

    Methods in C of Python's protocols (``__reduce_ex__``) are none of them, except operators', and neither are those
    that look up attributes by names in a text."""
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
    """Return whether a state may provide arguments for a function: the user's, or one that only computes."""
    if isinstance(function, functools.partial):
        return may_be_given(function.func)
    if isinstance(function, types.FunctionType) and is_users_code(function):
        return True
    found = pure_name(function)
    return found is not None and found not in _CALLING


def creatable(base: Survey, module: str, qualname: str) -> type | None:
    """Return the class of that name if its instances are defined by their attributes: a class of the user, or a
    dataclass, met before training began, a named tuple of a module that is imported, one of the kinds of libraries
    that are listed here, a class that the user's code names, or one of a package of which training begins with objects.
    Creating an instance runs none of its code."""
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
    """Return whether Python makes instances of a class as it does plain ones: a base in C may have a way of its own."""
    try:
        return type(object.__new__(kind)) is kind
    except TypeError:
        return False


def _is_among_met(base: Survey, kind: type) -> bool:
    """Return whether a library's class is one that the user's code names (``np.polynomial.Polynomial``), or is of a
    package of which training begins with objects, whose attributes a state holds as well (``Subset`` next to
    ``TensorDataset``), and is called for a new instance each time: no singleton."""
    plain = type(kind) in (type, abc.ABCMeta) and not any("__new__" in vars(part) for part in kind.__mro__[:-1])
    met = f"{OF_LIBRARY}{module_of(kind)}.{kind.__qualname__}" in base.paths or package_of(kind) in base.packages
    return plain and met and kind_of_type(kind) is INSTANCE


def _kinds_in(module: str) -> tuple[type, ...]:
    """Return the kinds of a library's module of which a state may create instances."""
    listed = _KINDS.get(next((package for package in _KINDS if f"{module}.".startswith(f"{package}.")), ""), ())
    try:
        # Training may be the first to import the module, which a fork has not done yet.
        kinds = [found_in(importlib.import_module(of), name) for of, name in listed]
    except ImportError:
        return ()
    return tuple(kind for kind in kinds if isinstance(kind, type))


def _module(name: str) -> types.ModuleType | None:
    """Return the module of a class that a state names: loaded, or imported now if it is of the libraries listed."""
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
"""By package, classes whose instances, and those of their subclasses in it, are defined by their attributes."""


def nameable(base: Survey, module: str, qualname: str) -> Any:
    """Return the class or function of that name if a state may name it without training having met it as a value: a
    class of which a state may hold instances, or a function in a class of the user's that was met; ``None`` for others.
    """
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
"""Functions without those that change an argument (``setitem``, ``iadd``)."""
_OF_SCHEDULERS = frozenset(("SWALR._cosine_anneal", "SWALR._linear_anneal"))
_NOT_PURE = frozenset(("from_file", "boolean_dispatch", "handle_torch_function", "call"))
"""Functions that open files or call their arguments."""


def pure_name(function: Any) -> tuple[str, str] | None:
    """Return module and name under which a pure function is found; ``None`` for any other."""
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
    """Return module and name under which a state may name a function of NumPy's kind (``scipy.special.expit``), which
    only computes; ``None`` for any other."""
    if type(function) is numpy().ufunc:
        for module in sorted(sys.modules):
            if ufunc(base, module, function.__name__) is function:
                return module, function.__name__
    return None


def ufunc(base: Survey, module: str, name: str) -> Any:
    """Return the function of NumPy's kind of that name in a module that a state may name; ``None`` if none is there."""
    found = vars(module_named(base, module) or types).get(name)
    return found if type(found) is numpy().ufunc else None


def module_named(base: Survey, name: str) -> types.ModuleType | None:
    """Return the module of that name if a state may name it: one that training had met as a value, a library's that its
    code names, or one of functions that only compute; ``None`` for any other."""
    names = base.paths.get(f"{OF_LIBRARY}{name}")
    found = base.named.get((name, "")) if names is None else getattr(names.obj, "owner", None)
    if found is None and name in _OF_FUNCTIONS:
        found = sys.modules.get(name)
    return found if isinstance(found, types.ModuleType) else None
