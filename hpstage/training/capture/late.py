"""What modules hold that only setup has loaded: how it was before is not known, so that no reset can restore it."""

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
    """Yield the records of what such modules hold.

    What setup puts under a name that was known before is not among them, although its path begins with that name: a
    reset restores the name, and setup makes the object again.

    Args:
        base: everything as of the end of setup.
        pristine: everything as of before it.
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
        local = "<locals>" in record.path  # made again
        if record.kind is MODULES or (id(record.obj) in held and by_code and not local):
            yield record


def registered_late(pristine: Survey, modules: Set[str]) -> Iterator[tuple[Record, str]]:
    """Yield the records that modules have changed by registering their classes or functions while setup imported them,
    each with the name of a module. Python runs a module once, so that it does not register them again after a reset.

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
    """Return whether a record is of a name of a module or class, or of a function, that exists from the import on."""
    obj = record.obj
    if type(obj) is types.FunctionType:
        # A name that was known, under which setup has put this function. It may have the library's name, of which it
        # is a wrapper.
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
