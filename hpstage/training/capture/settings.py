"""Process-wide settings, mostly of torch, that decide bits: they are restored like any other object."""

from __future__ import annotations

import decimal
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hpstage.training.capture.kind import Child, Kind, attribute_children, numpy, torch


class Settings:
    """torch's settings as one object."""


SETTINGS = Settings()
NEXT_HOOK = "next hook"
"""Not a setting: the number under which the next hook is registered."""


def hooks_of_all() -> Iterator[tuple[str, object]]:
    """Yield path and dict of the hooks that torch calls for every module and every optimizer of the process."""
    for path in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, value in vars(sys.modules[path]).items():
            if name.startswith("_global_") and isinstance(value, dict):
                yield f"{path}.{name}", value


def _of_process(library: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return a getter and a setter for each setting."""
    handle = library.utils.hooks.RemovableHandle
    hold, modules = library.backends, sys.modules["torch.nn.modules.module"]
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "default dtype": (library.get_default_dtype, library.set_default_dtype),
        "gradients": (library.is_grad_enabled, library.set_grad_enabled),
        "threads": (library.get_num_threads, library.set_num_threads),
        "deterministic algorithms": (
            lambda: (
                library.are_deterministic_algorithms_enabled(),
                library.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: library.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "float32 matmul precision": (library.get_float32_matmul_precision, library.set_float32_matmul_precision),
        "autocast on the CPU": (
            functools.partial(library.is_autocast_enabled, "cpu"),
            functools.partial(library.set_autocast_enabled, "cpu"),
        ),
        "autocast dtype on the CPU": (
            functools.partial(library.get_autocast_dtype, "cpu"),
            functools.partial(library.set_autocast_dtype, "cpu"),
        ),
        "anomaly detection": (library.is_anomaly_enabled, library.autograd.set_detect_anomaly),
        "denormal numbers": (lambda: bool(_SMALLEST_NORMAL / 2), _keep_denormals(library)),
        "working directory": (os.getcwd, os.chdir),
        "decimal numbers": (_of_decimals, _set_decimals),
        NEXT_HOOK: (functools.partial(getattr, handle, "next_id"), functools.partial(setattr, handle, "next_id")),
    }
    for name, owner, attribute in (
        ("full backward hooks", modules, "_global_is_full_backward_hook"),
        ("cudnn.benchmark", hold.cudnn, "benchmark"),
        ("cudnn.deterministic", hold.cudnn, "deterministic"),
        ("cudnn.enabled", hold.cudnn, "enabled"),
        ("mkldnn.enabled", getattr(hold, "mkldnn", None), "enabled"),
    ):
        if hasattr(owner, attribute):
            found[name] = functools.partial(getattr, owner, attribute), functools.partial(setattr, owner, attribute)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        ask = getattr(hold.cuda, f"{name}_sdp_enabled", None)
        if ask is not None:
            found[f"{name} attention"] = ask, getattr(hold.cuda, f"enable_{name}_sdp")
    saved = library._C._autograd
    if hasattr(saved, "_top_saved_tensors_default_hooks"):
        found["hooks of saved tensors"] = functools.partial(_of_saved, saved), functools.partial(_set_saved, saved)
    arrays = numpy()
    if arrays is not None:
        found["numpy errors"] = (
            lambda: tuple(sorted(arrays.geterr().items())),
            lambda value: arrays.seterr(**dict(value)),
        )
    return found


def _of_saved(library: Any) -> Any:
    """Return the hooks pushed last: torch does not expose the others."""
    return library._top_saved_tensors_default_hooks(True)


def _set_saved(library: Any, hooks: Any) -> None:
    while (present := _of_saved(library)) is not None and present != hooks:
        library._pop_saved_tensors_default_hooks()
    if present != hooks:
        library._push_saved_tensors_default_hooks(*hooks)


_SMALLEST_NORMAL = sys.float_info.min


def _keep_denormals(library: Any) -> Callable[[Any], None]:
    def keep(value: bool) -> None:
        library.set_flush_denormal(not value)

    return keep


_DECIMALS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _of_decimals() -> tuple[Any, ...]:
    context = decimal.getcontext()
    return tuple(getattr(context, name) for name in _DECIMALS)


def _set_decimals(values: tuple[Any, ...]) -> None:
    context = decimal.getcontext()
    for name, value in zip(_DECIMALS, values, strict=True):
        setattr(context, name, value)


_COMPILED = 32
"""Number of versions of a function that torch may compile in a process, for shapes and modes. More are refused."""

_REFUSE = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
"""The setting that refuses them, of torch 2.7 and of 2.6. torch 2.5 cannot refuse them: there is no limit."""

_NO_LIMIT = 2**31


def compile_by_arguments_alone() -> None:
    """Make what ``torch.compile`` generates depend on a function's arguments only, not on those of earlier calls.

    By default it depends on the history of the process: a function called with two shapes is compiled for all shapes,
    which changes the bits for the first one, too; a function compiled too often is not compiled any more.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None:
        return
    refuse = next((name for name in _REFUSE if hasattr(config, name)), None)
    if refuse is None and config.cache_size_limit < _NO_LIMIT:
        config.automatic_dynamic_shapes = False
        config.cache_size_limit = config.accumulated_cache_size_limit = _NO_LIMIT
    elif refuse is not None and not getattr(config, refuse):
        config.automatic_dynamic_shapes = False
        config.cache_size_limit = max(config.cache_size_limit, _COMPILED)  # since torch 2.7 also called recompile_limit
        setattr(config, refuse, True)


class OfProcess(Kind):
    """The kind of :data:`SETTINGS`."""

    name = "settings"

    def __init__(self) -> None:
        self._known: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] | None = None

    def _all(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
        if self._known is None:
            self._known = _of_process(torch())
        return self._known

    def read(self, obj: Any, skip: frozenset[str]) -> dict[str, Any]:
        return {name: _asked(ask) for name, (ask, _) in self._all().items()}

    def write(self, obj: Any, content: dict[str, Any], skip: frozenset[str] = frozenset()) -> None:
        present = self.read(obj, skip)
        for name, (_, put) in self._all().items():
            if name in content and content[name] != present[name]:
                put(content[name])

    def children(self, content: dict[str, Any]) -> Iterator[Child]:
        return attribute_children(content)


def _asked(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (RuntimeError, FileNotFoundError):
        return None  # precision set through both the old and the new API; a directory that no longer exists
