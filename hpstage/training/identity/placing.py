"""Paths of files, written in the same way wherever the code is checked out."""

from __future__ import annotations

import os
import sys
from inspect import unwrap
from pathlib import PurePath
from types import FunctionType, MethodType

CODE = "<code>"


def folder_of(target: object) -> str:
    """Return the folder that holds a class's or function's code: that of its script, or of its top-level package.

    Code that was sent by value to another host is considered to be where it was written. Empty if that is unknown.
    """
    while not isinstance(target, type | FunctionType):
        inner = getattr(target, "__func__", None) if isinstance(target, MethodType) else getattr(target, "func", None)
        target = type(target) if inner is None else inner
    code = _code(target)
    module = (code or target).__module__
    file: str | None = getattr(sys.modules.get(module), "__file__", None)
    if code is not None:  # sent by value, it knows the file of its module, not that of the code
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
    """Return a function that was written where a class or function was, not one that wraps it."""
    members = vars(target).values() if isinstance(target, type) else [target]
    functions = [unwrap(member) for member in members if isinstance(member, FunctionType)]
    own = (each for each in functions if isinstance(each, FunctionType) and each.__module__ == target.__module__)
    return next(own, None)


def from_code(path: str | PurePath, folder: str) -> str | None:
    """Return an absolute path as one relative to the folder of the code, if it is in it or next to it.

    Next to it, since code is often in a folder ``src`` next to one of data.
    """
    text = str(path)
    if not folder or not os.path.isabs(text) or "\0" in text:
        return None
    for place in dict.fromkeys((folder, os.path.realpath(folder))):
        for base, shown in ((place, CODE), (os.path.dirname(place), f"{CODE}/..")):
            if base != os.path.dirname(base) and f"{os.path.normpath(text)}{os.sep}".startswith(f"{base}{os.sep}"):
                return os.path.normpath(text).replace(base, shown, 1)
    return None
