"""Packs a trainable for sending it to the workers, and explains failures."""

from __future__ import annotations

import cloudpickle

from hpstage.errors import UsageError


def pack(trainable: object) -> bytes:
    """Pickle the trainable with cloudpickle: definitions in its script are included, its imports are not.

    Raises:
        UsageError: a part of it cannot be sent; names the attribute that holds it.
    """
    try:
        packed: bytes = cloudpickle.dumps(trainable)
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


def _culprit(thing: object) -> str | None:
    """Return the path to the innermost attribute that cannot be pickled."""
    for name, value in getattr(thing, "__dict__", {}).items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            inner = _culprit(value) if not isinstance(value, type) else None
            return f"{name}.{inner}" if inner else name
    return None
