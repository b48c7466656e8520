"""Objects that the slots of a process share besides the code of their model: they must be the same for all trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpstage.training.capture.kind import same_value
from hpstage.training.capture.kinds import CACHE, MODULES
from hpstage.training.capture.survey import Record
from hpstage.training.code.graph import OF_CODE
from hpstage.training.identity.settings import settings_here


def changed_settings(first: dict[str, Any]) -> list[str]:
    """Describe the settings of the process that decide bits and are no longer what they were when each was first seen,
    by ``first``, to which new ones are added."""
    return [
        f"the setting {name!r} of the process from {first[name]} to {value} (all trials need the same)"
        for name, value in settings_here(("torch", "jax")).items()
        if first.setdefault(name, value) != value
    ]


def changed_objects(records: Iterable[Record]) -> list[str]:
    """Return the paths of what has changed in the user's object, its data set and its code."""
    return [
        _changed(record)
        for record in records
        if (record.path.partition(".")[0] in ("self", "dataset") or OF_CODE.match(record.path))
        and record.kind not in (CACHE, MODULES)
        and record.changed()
    ]


def _changed(record: Record) -> str:
    """Return the path of what has changed in an object: of an attribute or an item, if it is one."""
    present = record.read()
    if isinstance(record.content, Mapping) and isinstance(present, Mapping):
        for name in {**present, **record.content}:
            if not (name in present and name in record.content and same_value(record.content[name], present[name])):
                return f"{record.path}.{name}"
    return record.path
