"""The description of NumPy dtypes in a state."""

from __future__ import annotations

from typing import Any

from hpstage.training.capture.kind import numpy


def described_wholly(dtype: Any) -> str | list[Any] | None:
    """Return the description of a dtype, ``None`` if it says less than the dtype (metadata, alignment)."""
    described = description(dtype)
    if described is None or numpy().lib.format.drop_metadata(dtype) is not dtype:
        return None
    again = numpy().lib.format.descr_to_dtype(described if isinstance(described, str) else [*map(tuple, described)])
    return described if again == dtype and repr(again) == repr(dtype) else None


def description(dtype: Any) -> str | list[Any] | None:
    """Return the description of a dtype, ``None`` if it has none: fields that overlap, or are in another order.
    Metadata are left out."""
    try:
        described = numpy().lib.format.dtype_to_descr(numpy().lib.format.drop_metadata(dtype))
    except ValueError:
        return None
    return described if isinstance(described, str) else [list(field) for field in described]
