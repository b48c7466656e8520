"""Paths of files in a form that does not depend on where the code is checked out."""

from __future__ import annotations

import os
import sys
from inspect import unwrap
from pathlib import PurePath
from types import FunctionType, MethodType

CODE = "<code>"


def folder_of(target: object) -> str:
    """Return the folder that contains the script, or the top-level package, of a class or function.

    For code that was sent by value to another host, this is the folder where it was written. Empty if unknown.
    """
    while not isinstance(target, type | FunctionType):
        inner = getattr(target, "__func__", None) if isinstance(target, MethodType) else getattr(target, "func", None)
        target = type(target) if inner is None else inner
    code = _code(target)
    module = (code or target).__module__
    file: str | None = getattr(sys.modules.get(module), "__file__", None)
    if code is not None:  # code sent by value has only its module's file in its globals
        file = code.__globals__.get("__file__", file)
    if code is not None and not code.__code__.co_filename.startswith("<"):
        file = code.__code__.co_filename
    return folder_above(file, module) if file else ""


def folder_above(file: str, module: str) -> str:
    """Return the folder from which a module of this dotted name is imported, by its file."""
    folder = os.path.dirname(os.path.abspath(file))
    for _ in range(module.count(".") + (os.path.basename(file) == "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def _code(target: type | FunctionType) -> FunctionType | None:
    """Return a function from the module that defines a class or function, not one that wraps it."""
    members = vars(target).values() if isinstance(target, type) else [target]
    functions = [unwrap(member) for member in members if isinstance(member, FunctionType)]
    own = (each for each in functions if isinstance(each, FunctionType) and each.__module__ == target.__module__)
    return next(own, None)


def from_code(path: str | PurePath, folder: str) -> str | None:
    """Return an absolute path relative to the folder of the code, if it is in that folder or in its parent.

    The parent counts because code is often in a folder ``src`` next to a folder of data.
    """
    text = str(path)
    if not folder or not os.path.isabs(text) or "\0" in text:
        return None
    for place in dict.fromkeys((folder, os.path.realpath(folder))):
        for base, shown in ((place, CODE), (os.path.dirname(place), f"{CODE}/..")):
            if base != os.path.dirname(base) and f"{os.path.normpath(text)}{os.sep}".startswith(f"{base}{os.sep}"):
                return os.path.normpath(text).replace(base, shown, 1)
    return None
