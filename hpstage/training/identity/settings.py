"""The settings of the process, and of the calling thread, that decide bits: Python's, NumPy's, torch's and JAX's."""

from __future__ import annotations

import decimal
import os
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any

from hpstage.errors import StateError
from hpstage.training.identity import accelerators
from hpstage.training.identity.torch_settings import Setting, read, torch_settings

NEXT_HOOK = "next hook"
"""Not a setting: the number under which the next hook is registered."""
_OF_PLACE = frozenset((NEXT_HOOK, "working directory", "threads", "hooks of saved tensors"))
"""Settings that other code manages, or that may differ between processes that train the same."""
_OF_JAX = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
"""The settings of JAX that decide bits."""
_OFF = (False, None, "none")
_UNREADABLE = object()


def read_all() -> dict[str, Any]:
    """Return the settings that can be read now. Of two settings with the same effect, one may be unreadable."""
    return _read(_all(*_imported()))


def _read(settings: Mapping[str, Setting]) -> dict[str, Any]:
    values = ((name, _value(ask)) for name, (ask, _) in settings.items())
    return {name: value for name, value in values if value is not _UNREADABLE}


def write_all(settings: Mapping[str, Any]) -> None:
    """Set those of the given settings that this process knows and that differ in it. One setting may change others:
    each is read just before it is set, and all are set twice.

    Raises:
        RuntimeError: a setting cannot be set. The message names it.
    """
    for _ in range(2):
        for name, (ask, put) in _all(*_imported()).items():
            if name in settings and _value(ask) != settings[name]:
                try:
                    put(settings[name])
                except RuntimeError as error:
                    raise RuntimeError(f"{name} cannot be set to {settings[name]}: {error}") from None


def settings_here(libraries: Collection[str]) -> dict[str, Any]:
    """Return this process's settings that decide bits: Python's, NumPy's and those of ``libraries`` (``torch``,
    ``jax``), as far as these are imported."""
    settings = _all(*(name for name in _imported() if name in ("numpy", *libraries)))
    return _read({name: setting for name, setting in settings.items() if name not in _OF_PLACE})


def described(libraries: Collection[str]) -> dict[str, str]:
    """Describe the settings of :func:`settings_here`, except those that are off."""
    return {f"setting {name}": str(value) for name, value in settings_here(libraries).items() if value not in _OFF}


def described_jax() -> dict[str, str]:
    """Describe JAX's version, device and settings, and on a CPU the number of its threads: it is the number of cores,
    and cannot be changed once JAX is in use."""
    import jax

    device = jax.devices()[0]
    described = {
        "jax": jax.__version__,
        "jax device": f"{device.platform} ({device.device_kind})",
        "jax settings": ", ".join(f"{name.removeprefix('jax_')} {getattr(jax.config, name)}" for name in _OF_JAX),
    }
    if device.platform == "cpu":
        described["jax threads"] = str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())
    return described


def refuse_modes() -> None:
    """Check that between two steps, neither ``torch.autocast`` nor any mode of torch except that of the default device
    is open. An open mode sees every call of torch, also those made to save a state between steps.

    Raises:
        StateError: a mode is open. The message names it.
    """
    library: Any = sys.modules.get("torch")
    if library is None:
        return
    library.autocast_increment_nesting()  # the depth can be read only by changing it
    if library.autocast_decrement_nesting():
        raise StateError(
            "torch.autocast is open between two steps: the casts of weights that it keeps are in no state. Enter it in "
            "each step: `with torch.autocast(...):` around the computation of the loss"
        )
    core = library._C
    functions = core._len_torch_function_stack()
    if not functions and not core._len_torch_dispatch_stack():
        return
    open_ = [core._get_function_stack_at(index) for index in range(functions)]
    open_ += [core._get_dispatch_stack_at(index) for index in range(core._len_torch_dispatch_stack())]
    for mode in open_:
        if not _is_of_device(mode):
            kind = type(mode)
            raise StateError(
                f"{kind.__module__}.{kind.__qualname__}, a mode of torch, is open between two steps. The calls of "
                f"torch that it sees there differ between processes. Enter it in each step: "
                f"`with {kind.__name__}(...):` in loss() or update()"
            )


def _imported() -> tuple[str, ...]:
    return tuple(name for name in ("numpy", "torch", "jax") if name in sys.modules)


def _value(ask: Callable[[], Any]) -> Any:
    try:
        return read(ask)
    except (RuntimeError, FileNotFoundError):
        return _UNREADABLE  # precision set through both the old and the new API; a directory that no longer exists


@cache
def _all(*libraries: str) -> dict[str, Setting]:
    """Return the getter and the setter of each setting, of Python and of libraries. Settings that decide others come
    first."""
    found: dict[str, Setting] = {
        "working directory": (os.getcwd, os.chdir),
        "decimal numbers": (_of_decimals, _set_decimals),
        "decimal traps": (_traps, _set_traps),
    }
    if "torch" in libraries:
        library = sys.modules["torch"]
        found |= torch_settings(library) | _of_torch(library)
    if "numpy" in libraries:
        arrays: Any = sys.modules["numpy"]
        found["numpy errors"] = (
            lambda: tuple(sorted(arrays.geterr().items())),
            lambda value: arrays.seterr(**dict(value)),
        )
        found["numpy generator"] = partial(_of_numpy, arrays.random), partial(_set_numpy, arrays.random)
    if "jax" in libraries:
        config: Any = sys.modules["jax"].config
        for name in _OF_JAX:
            found[name] = partial(getattr, config, name), partial(config.update, name)
    return found


def _of_torch(library: Any) -> dict[str, Setting]:
    """Return torch's settings that consist of more than one value, or that are not kept in one place."""
    handle, modules = library.utils.hooks.RemovableHandle, sys.modules["torch.nn.modules.module"]
    found: dict[str, Setting] = {
        "default dtype": (library.get_default_dtype, library.set_default_dtype),
        "default device": (_default_device, _set_default_device),
        "gradients": (library.is_grad_enabled, library.set_grad_enabled),
        "threads": (library.get_num_threads, library.set_num_threads),
        "deterministic algorithms": (
            lambda: (
                library.are_deterministic_algorithms_enabled(),
                library.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: library.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "anomaly detection": (
            lambda: (library.is_anomaly_enabled(), library.is_anomaly_check_nan_enabled()),
            lambda value: library.autograd.set_detect_anomaly(value[0], check_nan=value[1]),
        ),
        "denormal numbers": (
            lambda: bool(sys.float_info.min / 2),
            lambda value: library.set_flush_denormal(not value),
        ),
        NEXT_HOOK: _attribute(handle, "next_id"),
    }
    for device in filter(None, ("cpu", "cuda", accelerators.other())):
        found[f"autocast on {device}"] = (
            partial(library.is_autocast_enabled, device),
            partial(library.set_autocast_enabled, device),
        )
        found[f"autocast dtype on {device}"] = (
            partial(library.get_autocast_dtype, device),
            partial(library.set_autocast_dtype, device),
        )
    if hasattr(modules, "_global_is_full_backward_hook"):
        found["full backward hooks"] = _attribute(modules, "_global_is_full_backward_hook")
    saved = library._C._autograd
    if hasattr(saved, "_top_saved_tensors_default_hooks"):
        found["hooks of saved tensors"] = partial(_of_saved, saved), partial(_set_saved, saved)
    return found


def _attribute(owner: Any, name: str) -> Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _default_device() -> Any:
    """Return the default device for new tensors, which torch keeps as a mode of the thread; ``None`` if it is not
    set."""
    core: Any = sys.modules["torch"]._C
    for index in reversed(range(core._len_torch_function_stack())):
        mode = core._get_function_stack_at(index)
        if _is_of_device(mode):
            return mode.device
    return None


def _set_default_device(device: Any) -> None:
    library: Any = sys.modules["torch"]
    others = _taken_off(library._C)
    library.set_default_device(None)
    _taken_off(library._C)  # device modes that code has entered itself
    for mode in others:
        library._C._push_on_torch_function_stack(mode)
    library.set_default_device(device)


def _taken_off(core: Any) -> list[Any]:
    """Remove all modes from the stack. Return those that do not set a device."""
    modes = [core._pop_torch_function_stack() for _ in range(core._len_torch_function_stack())]
    return [mode for mode in reversed(modes) if not _is_of_device(mode)]


def _is_of_device(mode: Any) -> bool:
    """Return whether a mode of torch is the one that sets the default device."""
    return type(mode).__module__ == "torch.utils._device"


def _of_saved(library: Any) -> Any:
    """Return the hooks pushed last: torch does not expose the others."""
    return library._top_saved_tensors_default_hooks(True)


def _set_saved(library: Any, hooks: Any) -> None:
    while (present := _of_saved(library)) is not None and present != hooks:
        library._pop_saved_tensors_default_hooks()
    if present != hooks:
        library._push_saved_tensors_default_hooks(*hooks)


def _of_numpy(library: Any) -> str | None:
    """Return the name of NumPy's global bit generator if code has replaced the usual one, else ``None``."""
    name = type(library.get_bit_generator()).__name__  # its state would copy hundreds of numbers at each survey
    return None if name == _MERSENNE_TWISTER else name


def _set_numpy(library: Any, name: str | None) -> None:
    library.set_bit_generator(getattr(library, name or _MERSENNE_TWISTER)())


_MERSENNE_TWISTER = "MT19937"
_DECIMALS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _of_decimals() -> tuple[Any, ...]:
    context = decimal.getcontext()
    return tuple(getattr(context, name) for name in _DECIMALS)


def _set_decimals(values: tuple[Any, ...]) -> None:
    context = decimal.getcontext()
    for name, value in zip(_DECIMALS, values, strict=True):
        setattr(context, name, value)


_TRAPS = ("DivisionByZero", "InvalidOperation", "Overflow")


def _traps() -> tuple[str, ...] | None:
    """Return the names of the decimal signals that raise an error, or ``None`` if they are the default ones."""
    names = tuple(sorted(signal.__name__ for signal, raises in decimal.getcontext().traps.items() if raises))
    return None if names == _TRAPS else names


def _set_traps(names: tuple[str, ...] | None) -> None:
    traps = decimal.getcontext().traps
    for signal in traps:
        traps[signal] = signal.__name__ in (_TRAPS if names is None else names)
