"""Packs a trainable for sending it to the processes that train it, and explains failures.

What this process has set for itself goes with it: those processes import the modules that it has imported, and the
script, but not what the script does under ``if __name__ == "__main__":``.
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

    A process that unpickles it has the settings of this one: of Python, NumPy, and the ``libraries`` that its code
    names.

    Raises:
        UsageError: a part of it cannot be sent; names the attribute that holds it.
        StateError: a mode of torch is open, which training does not see.
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
    """Pickles modules of classes of their own, as in ``torch.backends``, by name, too. Classes that are sent whole keep
    their qualified names, by which their code is known: those of classes in functions and in other classes; and code
    keeps its file, which tracebacks show."""

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
"""What cloudpickle has in its place."""


def _dumps(value: object) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Shipped:
    """Pickles as what unpickling it gives: the trainable, in a process that is then set up for it."""

    def __init__(self, trainable: object, settings: Mapping[str, Any], patched: Mapping[str, str]) -> None:
        self._parts = trainable, settings, patched

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


def _unpacked(trainable: object, settings: Mapping[str, Any], patched: Mapping[str, str]) -> object:
    """Return the trainable, once this process has the settings of the one that has packed it.

    Raises:
        UsageError: that cannot be; or libraries were altered there, and not here.
    """
    try:
        write_all(settings)
    except RuntimeError as error:
        raise UsageError(f"the process that searches has a setting that this one cannot have: {error}") from error
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
