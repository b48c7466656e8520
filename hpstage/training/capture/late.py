"""Objects of modules that setup was the first to load. Their earlier content is not known: no reset can restore it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Set
from typing import Any

from hpstage.training.capture.kinds import MODULES, SETS
from hpstage.training.capture.survey import Record, Survey
from hpstage.training.code.graph import OF_CODE
from hpstage.training.code.namespaces import OF_LIBRARY, ClassAttributes, LibraryNames, Slot
from hpstage.training.code.owner import found_in, module_of, of_user


def met_late(base: Survey, pristine: Survey) -> Iterator[Record]:
    """Yield the records of objects that belong to modules which setup was the first to load.

    An object that setup stores under a name known before is not among them, although its path begins with that name: a
    reset restores the name, and setup makes the object again.

    Args:
        base: survey of everything at the end of setup.
        pristine: survey of everything before setup.
    """
    names = [record for record in base if record.obj not in pristine and _is_of_module(record, pristine)]
    paths, held, todo = tuple(record.path for record in names), {id(record.obj) for record in names}, names
    while todo:
        for obj in _led_to(todo.pop()):
            found = base.records.get(id(obj))
            if found is not None and obj not in pristine and id(obj) not in held:
                held.add(id(obj))
                todo.append(found)
    for record in base:
        by_code = OF_CODE.match(record.path) or record.path.startswith(paths)
        local = "<locals>" in record.path  # setup makes it again
        if record.kind is MODULES or (id(record.obj) in held and by_code and not local):
            yield record


def registered_late(pristine: Survey, modules: Set[str]) -> Iterator[tuple[Record, str]]:
    """Yield the records of objects with which modules registered their classes or functions when setup imported them,
    each with the name of such a module. Python runs a module only once: after a reset, it does not register them again.

    Args:
        modules: the names of the modules that were loaded when ``pristine`` was surveyed.
    """
    late = {name for name in sys.modules.keys() - modules if of_user(name)}
    if not late:
        return
    for record in pristine:
        if not record.changed():
            continue
        before = {id(obj) for _, obj in record.kind.children(record.content)}
        for _, obj in record.kind.children(record.read()):
            if id(obj) in before or not issubclass(type(obj), (type, types.FunctionType)):
                continue
            code: Any = obj
            if module_of(code) in late and _stands(code):
                yield record, module_of(code)
                break


def _is_of_module(record: Record, pristine: Survey) -> bool:
    """Return whether a record is of a module's name, a class's attributes or a function that an import creates."""
    obj = record.obj
    if type(obj) is types.FunctionType:
        # Setup may have put this function under a name that was known, such as that of the library function it wraps.
        library = f"{OF_LIBRARY}{obj.__module__}.{obj.__qualname__}".rpartition(".")[0]
        known = library in pristine.paths or f"{obj.__module__}:{obj.__qualname__}" in pristine.paths
        return not known and _stands(obj)
    if type(obj) is ClassAttributes:
        return _stands(obj.owner)
    # By its type: isinstance() reads the attribute __class__, which an object of the user's may not have.
    return issubclass(type(obj), (Slot, LibraryNames, ClassAttributes)) and "<locals>" not in record.path


def _stands(code: types.FunctionType | type) -> bool:
    module = sys.modules.get(module_of(code))
    return module is not None and found_in(module, code.__qualname__) is code


def _led_to(record: Record) -> Iterator[object]:
    yield from (obj for _, obj in record.inner)
    if record.kind in SETS:
        yield from record.content.order
