"""Packs a trainable for sending it to training processes, and explains failures.

The trainable is sent with the settings that this process has changed. Training processes import the modules that this
process has imported, and the script, but do not run the script's code under ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Collection, Mapping
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from hpstage.errors import UsageError
from hpstage.training.code.patches import lacking, patches
from hpstage.training.identity.settings import refuse_modes, settings_here, write_all


def pack(trainable: object, libraries: Collection[str]) -> bytes:
    """Pickle the trainable with cloudpickle: definitions in its script are included, its imports are not.

    A process that unpickles it first applies the settings of this one: those of Python, of NumPy, and of the
    ``libraries`` that its code names.

    Raises:
        UsageError: a part of it cannot be sent; the message names the attribute that holds it.
        StateError: a mode of torch is active, which would be missing in training.
    """
    refuse_modes()
    try:
        packed = _dumps(_Shipped(trainable, settings_here(libraries), patches()))
    except Exception as error:
        name = type(trainable).__name__ if not callable(trainable) else getattr(trainable, "__name__", "it")
        where = _culprit(trainable)
        place = f"its attribute {where!r}" if where else "something it refers to"
        raise UsageError(
            f"{name} cannot be sent to the workers, since {place} cannot be pickled ({error}); make it where it is "
            f"used (in model() or dataset() of a TorchTrainable, in setup(), or in the function), and name it in "
            f"`stateless` if training does not depend on it; or leave it out in __getstate__"
        ) from error
    return packed


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles modules of a subclass of ``ModuleType``, such as ``torch.backends``, by name as well. Classes that are
    sent whole keep their qualified names, by which their code is identified, also if they are defined in functions or
    other classes. Code objects keep their file names, which tracebacks show."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is CodeType:
            make, parts = self.dispatch_table[CodeType](obj)
            return make, tuple(obj.co_filename if type(part) is str and part == _NO_FILE else part for part in parts)
        if kind is not ModuleType and issubclass(kind, ModuleType):
            name = vars(obj).get("__name__")
            if sys.modules.get(name) is obj:
                return importlib.import_module, (name,)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            attributes, _ = reduced[2]
            attributes["__qualname__"] = obj.__qualname__
        return reduced


_NO_FILE = "<dynamic-code>"
"""The file name that cloudpickle uses instead."""


def _dumps(value: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Shipped:
    """Pickles so that unpickling applies the settings and returns the trainable itself."""

    def __init__(self, trainable: object, settings: Mapping[str, Any], patched: Mapping[str, str]) -> None:
        self._parts = trainable, settings, patched

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def _unpacked(trainable: object, settings: Mapping[str, Any], patched: Mapping[str, str]) -> object:
    """Apply the settings of the process that packed the trainable; return the trainable.

    Raises:
        UsageError: a setting cannot be applied, or libraries were patched there, and not here.
    """
    try:
        write_all(settings)
    except RuntimeError as error:
        raise UsageError(f"a setting of the search's process cannot be applied in this process: {error}") from error
    missing = lacking(patched)
    if missing:
        names = ", ".join(place.replace(":", ".") for place in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise UsageError(
            f"{names}{more}: the search's process has put your code there, and the training process has not. Trials "
            f'would train without it. Do it at module level, above `if __name__ == "__main__":` or in a module that '
            f"the trainable's module imports, or in model()"
        )
    return trainable


_NAMED = 5
"""Maximum number of places that are named."""


def _culprit(value: object) -> str | None:
    """Return the path to the innermost attribute that cannot be pickled."""
    for name, attribute in getattr(value, "__dict__", {}).items():
        try:
            _dumps(attribute)
        except Exception:
            inner = _culprit(attribute) if not isinstance(attribute, type) else None
            return f"{name}.{inner}" if inner else name
    return None
