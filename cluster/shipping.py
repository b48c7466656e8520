"""Pack a trainable to send it to training processes, and explain failures.

The trainable is sent with the settings that this process has changed. Training processes import its modules and the
script, but do not run the script's code under ``if __name__ == "__main__":``.
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
    """Pickle the trainable with cloudpickle. Definitions in its script are included, modules that it imports are not.

    A process that unpickles it first applies the settings of this process: those of Python, of NumPy, and of the
    ``libraries`` that the trainable's code uses.

    Raises:
        UsageError: a part of the trainable cannot be pickled; the message names the attribute that holds the part.
        StateError: a mode of torch is active here; training processes would not have it.
    """
    refuse_modes()
    try:
        packed = _dumps(_Shipped(trainable, settings_here(libraries), patches()))
    except Exception as error:
        name = type(trainable).__name__ if not callable(trainable) else getattr(trainable, "__name__", "it")
        where = _culprit(trainable)
        place = f"its attribute {where!r}" if where else "an object it refers to"
        raise UsageError(
            f"{name} cannot be sent to the workers, since {place} cannot be pickled ({error}). Create the object where "
            f"it is used (in model() or dataset() of a TorchTrainable, in setup(), or in the function), and name it in "
            f"`stateless` if training does not depend on it; or omit it in __getstate__"
        ) from error
    return packed


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Cloudpickle's pickler with three changes. Modules of a subclass of ``ModuleType``, such as ``torch.backends``,
    are pickled by reference. Classes that are pickled by value keep their qualified names, which identify their code,
    even if they are defined in functions or other classes. Code objects keep their file names, for tracebacks."""

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
"""The file name that cloudpickle would use instead."""


def _dumps(value: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Shipped:
    """A trainable with settings. Unpickling it applies the settings, and returns the trainable itself."""

    def __init__(self, trainable: object, settings: Mapping[str, Any], patched: Mapping[str, str]) -> None:
        self._parts = trainable, settings, patched

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def _unpacked(trainable: object, settings: Mapping[str, Any], patched: Mapping[str, str]) -> object:
    """Apply the settings of the process that packed the trainable; return the trainable.

    Raises:
        UsageError: a setting cannot be applied, or libraries were patched in that process, but not in this one.
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
            f"your code has set {names}{more} in the search's process, but not in the training process. Set it "
            f'at module level, above `if __name__ == "__main__":` or in a module that the trainable\'s module imports, '
            f"or in model()"
        )
    return trainable


_NAMED = 5
"""Maximum number of replaced names in a message."""


def _culprit(value: object) -> str | None:
    """Return the path to the innermost attribute that cannot be pickled."""
    for name, attribute in getattr(value, "__dict__", {}).items():
        try:
            _dumps(attribute)
        except Exception:
            inner = _culprit(attribute) if not isinstance(attribute, type) else None
            return f"{name}.{inner}" if inner else name
    return None
