"""Settings of the process that decide bits and that training code may change: put back before each trial, and captured.

Each is a name in a namespace like a global variable, with functions of its own for reading and binding it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpstage.training.kinds import numpy, torch
from hpstage.training.reach import Slot


class Setting(Slot):
    """A setting of a library's."""

    __slots__ = ("_read", "_write")

    def __init__(self, path: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        super().__init__(path, {}, path)
        self._read, self._write = read, write

    def get(self) -> object:
        return self._read()

    def set(self, value: object) -> None:
        self._write(value)


def settings() -> list[tuple[str, object]]:
    """Paths and settings of the libraries that are imported."""
    found: list[Setting] = []
    library = torch()
    if library is not None:
        backends = library.backends
        found += [
            Setting("torch.get_default_dtype()", library.get_default_dtype, library.set_default_dtype),
            Setting("torch.get_num_threads()", library.get_num_threads, library.set_num_threads),
            Setting("torch.is_grad_enabled()", library.is_grad_enabled, library.set_grad_enabled),
            Setting(
                "torch.get_float32_matmul_precision()",
                library.get_float32_matmul_precision,
                library.set_float32_matmul_precision,
            ),
            Setting(
                "torch.are_deterministic_algorithms_enabled()",
                lambda: (
                    library.are_deterministic_algorithms_enabled(),
                    library.is_deterministic_algorithms_warn_only_enabled(),
                ),
                lambda value: library.use_deterministic_algorithms(value[0], warn_only=value[1]),
            ),
            _attribute("torch.backends.cudnn.benchmark", backends.cudnn, "benchmark"),
            _attribute("torch.backends.cudnn.deterministic", backends.cudnn, "deterministic"),
            _attribute("torch.backends.mkldnn.enabled", backends.mkldnn, "enabled"),
        ]
    arrays = numpy()
    if arrays is not None:
        found.append(
            Setting(
                "numpy.geterr()",
                lambda: tuple(sorted(arrays.geterr().items())),
                lambda value: arrays.seterr(**dict(value)),
            )
        )
    return [(setting.path, setting) for setting in found]


def _attribute(path: str, owner: Any, name: str) -> Setting:
    return Setting(path, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))
