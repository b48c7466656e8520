"""An object's content as a short text, equal for equal content in every process: what two runs are compared by."""

from __future__ import annotations

import enum
import types
from typing import Any

import xxhash

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError
from hpstage.training.kind import is_atom, numpy, torch
from hpstage.training.kinds import VALUES
from hpstage.training.reach import MISSING
from hpstage.training.survey import Record, Survey

_LONGEST = 120


def text_of(record: Record, survey: Survey) -> str:
    """The content of a record; of values the form and a digest of all of them."""
    if record.kind is VALUES:
        return _values(record.obj)
    text = _entry(record.content, survey) if record.kind.name != "random state" else digest(record.content)
    return text if len(text) <= _LONGEST else f"{text[:60]}... ({xxhash.xxh3_128_hexdigest(text.encode())})"


def _values(obj: Any) -> str:
    library = torch()
    try:
        content = digest(obj)[:16]
    except StateError:
        content = "?"
    if library is not None and isinstance(obj, library.Tensor):
        if obj.numel() == 1 and obj.layout is library.strided and not obj.is_meta:
            content = repr(obj.detach().cpu().reshape(-1)[0].item())
        form = [str(obj.dtype).removeprefix("torch."), str(list(obj.shape))]
        if obj.layout is library.strided and not obj.is_contiguous():
            form.append(f"strides {list(obj.stride())}")
        if obj.requires_grad:
            form.append("trained")
        return f"{' '.join(form)} {content}"
    return f"{obj.dtype.str} {list(obj.shape)} {content}"


def _entry(value: Any, survey: Survey) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    path = survey.path_of(value)
    if path is not None:
        return f"-> {path}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_entry(k, survey)}: {_entry(v, survey)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_entry(item, survey) for item in value) + ")"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_entry(item, survey) for item in value)) + "}"
    if isinstance(value, types.MethodType):
        return f"{_entry(value.__self__, survey)}.{value.__func__.__name__}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    arrays = numpy()
    if arrays is not None and isinstance(value, arrays.generic):
        return repr(value)
    if is_atom(value) and "object at 0x" not in repr(value):
        return repr(value)
    return f"a {type(value).__qualname__}"


Difference = tuple[str, str, str]
"""A path, and what is there in the one and in the other."""


LOCAL = "local variable "


_CONSEQUENCES = ("model", "optimizer", "the state")


def first_difference(straight: dict[str, str], forked: dict[str, str]) -> Difference | None:
    """The first thing that is not the same; what is more likely the cause comes before what follows from it.

    Local variables that a fork has not set are passed by: they hold what was reported earlier, and what reads them
    would fail in the fork.
    """
    found = []
    for path in [*straight, *(path for path in forked if path not in straight)]:
        here, there = straight.get(path, "absent"), forked.get(path, "absent")
        if here != there and not (path.startswith(LOCAL) and path not in forked):
            found.append((path, here, there))
    return min(found, key=lambda difference: _rank(difference[0]), default=None)


def _rank(path: str) -> int:
    if path.startswith(LOCAL):
        return 0
    return 2 if path.startswith(_CONSEQUENCES) else 1
