"""The process-wide settings of the installed torch, found where torch sets them rather than listed.

Most settings, such as those of ``torch.backends``, are set by a function ``torch._C._set_X`` and read by its
counterpart. A few are kept in Python, as global names that a function ``set_x`` assigns. A setting may be unreadable:
the older functions for the precision of matmuls raise once the newer ones were used. Then the newer settings decide.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

from hpstage.training.code.names import stored_in

Setting = tuple[Callable[[], Any], Callable[[Any], None]]
"""The getter and the setter of a setting."""

_PLAIN = (bool, int, float, str)
_APART = frozenset(("deterministic_algorithms", "thread_name", "torch_function_state", "tracing_state"))
"""Names to leave out: settings of more than one value, and functions that set something else."""
_IN_PYTHON = ("torch.backends", "torch.__future__")
"""The packages whose settings are kept in Python."""


def torch_settings(library: Any) -> dict[str, Setting]:
    """Return the settings by name. A setting that changes others comes before them: set all in this order."""
    return {**dict(_precisions(library)), **dict(_of_core(library._C)), **dict(_of_python())}


def read(ask: Callable[[], Any]) -> Any:
    """Return the value of a setting, as plain values.

    Raises:
        RuntimeError: the setting cannot be read.
    """
    value = ask()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return tuple(value)
    return value.name if hasattr(type(value), "__members__") else value


def _precisions(library: Any) -> Iterator[tuple[str, Setting]]:
    """Yield the settings for the precision of 32-bit floats, by library and operation (torch 2.9 and later)."""
    core = library._C
    ask = getattr(core, "_get_fp32_precision_getter", None)
    if ask is None:
        return
    objects = [value for module in _backends() for value in _members(module).values()]
    named = [value for value in objects if isinstance(value, library.backends._FP32Precision)]
    for owner in ("generic", *sorted({value.backend for value in named})):
        for operation in ("all", *sorted({value.op for value in named})):
            if _is_setting(partial(ask, owner, operation)):
                put = partial(core._set_fp32_precision_setter, owner, operation)
                yield f"fp32 precision of {owner}, {operation}", (partial(ask, owner, operation), put)


def _of_core(core: Any) -> Iterator[tuple[str, Setting]]:
    for setter in sorted(name for name in vars(core) if name.startswith("_set_")):
        name = setter.removeprefix("_set_")
        readers = f"_get_{name}", f"_is_{name}", f"_{name}", f"_get_{name.removeprefix('sdp_use_')}_sdp_enabled"
        ask = next((getattr(core, reader) for reader in readers if hasattr(core, reader)), None)
        if name not in _APART and ask is not None and _is_setting(ask):
            yield name.replace("_", " "), (ask, partial(_put, ask, getattr(core, setter)))


def _is_setting(ask: Callable[[], Any]) -> bool:
    try:
        return _is_plain(read(ask))
    except RuntimeError as error:
        return "Invalid (backend, op) pair" not in str(error)  # else it has become unreadable
    except TypeError:
        return False  # it takes arguments


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def _put(ask: Callable[[], Any], put: Callable[..., None], value: Any) -> None:
    try:
        kind: Any = type(ask())
    except RuntimeError:
        kind = type(value)
    if hasattr(kind, "__members__"):
        put(kind.__members__[value])
    elif kind is tuple:
        put(*value)
    else:
        put(list(value) if kind is list else value)


def _of_python() -> Iterator[tuple[str, Setting]]:
    for module in _backends():
        names = vars(getattr(module, "m", module))
        for function in [value for name, value in names.items() if name.lstrip("_").startswith("set_")]:
            if isinstance(function, FunctionType) and function.__globals__ is names:
                for name in {*stored_in(function.__code__)}:
                    if type(names.get(name)) in _PLAIN:
                        yield (
                            f"{module.__name__}.{name}",
                            (partial(getattr, module, name), partial(_assign, module, name)),
                        )


def _assign(module: Any, name: str, value: Any) -> None:
    if hasattr(module, "m"):
        vars(module).pop(name, None)  # an attribute of the object that stands for the module would hide the name
    vars(getattr(module, "m", module))[name] = value


def _backends() -> list[Any]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(_IN_PYTHON)]


def _members(module: Any) -> dict[str, Any]:
    """Return the attributes of a module and of its class; modules in ``torch.backends`` have classes of their own."""
    return {**vars(getattr(module, "m", module)), **vars(type(module))}
