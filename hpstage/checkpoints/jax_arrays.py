"""Converts JAX arrays in a state to NumPy arrays of the same bytes with a description, and back.

JAX is never imported to save a state: only a process that has imported it can hold one of its arrays.
"""

from __future__ import annotations

import sys
from typing import Any

from hpstage.checkpoints.leaves import Leaf

Described = tuple[str, str, bool]
"""Description of an array: its kind (``"array"`` or ``"key"``), its dtype or the implementation of its keys, and
whether its dtype is weak (in JAX, as that of a Python number, which yields to other dtypes)."""

_DTYPES = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    )
)


def is_array(value: object) -> bool:
    """Whether this is a JAX array (of numbers or of random keys), and not a value that ``jax.jit`` or ``jax.grad``
    traces."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def split(value: Any) -> tuple[Described, Any] | str:
    """Return the description of an array and a NumPy array of its bytes (which may share its memory), or the reason why
    it cannot be captured."""
    import jax
    import numpy

    if value.is_deleted():
        return "is a JAX array that was donated to a jitted function, and is gone"
    if not value.is_fully_addressable or len(value.devices()) > 1:
        return "is a JAX array on several devices"
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        keys = numpy.asarray(jax.random.key_data(value))
        return ("key", str(jax.random.key_impl(value)), False), keys
    dtype = value.dtype.name
    if dtype not in _DTYPES:
        return f"is a JAX array of dtype {dtype}"
    array = numpy.asarray(value)
    if value.weak_type and not _same(_weak(array), value, array):
        return f"is a JAX array with a weak dtype ({dtype}): fix its dtype by jnp.asarray(x, jnp.{dtype})"
    return ("array", dtype, bool(value.weak_type)), _plain(array)


def join(what: Described, array: Any) -> Any:
    """Return the JAX array that :func:`split` has converted, with memory of its own.

    Raises:
        ValueError: JAX has no such array, or not in this process, such as one of 64 bits if JAX is limited to 32.
    """
    import jax
    import numpy

    kind, name, weak = what
    if kind == "key":
        return jax.random.wrap_key_data(jax.numpy.array(array), impl=name)
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name} of a JAX array")
    array = array.view(numpy.dtype(getattr(jax.numpy, name)))
    made = _weak(array) if weak else jax.numpy.array(array)
    if made.dtype != array.dtype:
        raise ValueError(f"the state holds {name}; enable it in JAX by jax_enable_x64, as it was during training")
    return made


def check(what: Described, leaf: Leaf) -> None:
    """Raise ``ValueError`` if a leaf cannot hold the array of this description on any host."""
    kind, name, _ = what
    if leaf.kind != "numpy" or (kind != "key" and (kind, name) not in {("array", dtype) for dtype in _DTYPES}):
        raise ValueError(f"a leaf of kind {leaf.kind} is not a JAX array of {what}")


def _plain(array: Any) -> Any:
    """Return the bytes of an array under a dtype that NumPy itself has."""
    import numpy

    return array.view(numpy.uint16) if array.dtype.name == "bfloat16" else array


def _weak(array: Any) -> Any:
    """Return an array that JAX makes of a Python number, with a weak dtype. JAX has no public way to give other shapes
    one."""
    import jax

    return jax.numpy.asarray(array.item()) if array.ndim == 0 else jax.numpy.asarray(array)


def _same(made: Any, value: Any, array: Any) -> bool:
    import numpy

    return (
        bool(made.weak_type == value.weak_type)
        and made.dtype == value.dtype
        and numpy.asarray(made).tobytes() == array.tobytes()
    )
