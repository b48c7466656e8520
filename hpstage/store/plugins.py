"""Plugins: implementations of the ports that installed distributions provide through entry points."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar

from hpstage.errors import UsageError

Group = Literal[
    "hpstage.algorithms",
    "hpstage.executors",
    "hpstage.stores",
    "hpstage.checkpoints",
    "hpstage.step_backends",
    "hpstage.trainables",
]
"""Groups of entry points. An entry point's name is what the command line calls an algorithm or executor, the scheme of
a store's or checkpoint location's URL, or a class whose objects can be trained, as in ``package.module.Class``.

``hpstage.algorithms``, ``hpstage.executors``, ``hpstage.step_backends``: subclasses of the port. ``hpstage.stores``:
functions such as :func:`hpstage.store.redis_plans.open_redis`. ``hpstage.checkpoints``: functions such as
:func:`hpstage.checkpoints.opening.open_folder`; other schemes are fsspec's. ``hpstage.trainables``: functions that
return the :class:`~hpstage.training.adapter.Adapter` of an object.
"""

_PACKAGES = "site-packages", "dist-packages"

_T = TypeVar("_T")


def registered(group: Group) -> list[str]:
    """Return the names in a group, sorted; nothing is loaded."""
    return sorted({point.name for point in _points(group, _installed())})


@lru_cache(32)
def _points(group: Group, _: object) -> tuple[EntryPoint, ...]:
    """Return a group's entry points. Looking them up reads a file of every distribution, which takes most of the time
    of a search that trains nothing."""
    return tuple(entry_points(group=group))


def _installed() -> tuple[tuple[str, float], ...]:
    """Return a value that changes when a distribution is installed or removed, or the path changes."""
    folders = [str(folder) for folder in sys.path]  # programs put all kinds of objects there
    return tuple((folder, _modified(folder) if folder.endswith(_PACKAGES) else 0.0) for folder in folders)


def _modified(folder: str) -> float:
    try:
        return os.stat(folder).st_mtime
    except OSError:
        return 0.0


def names(group: Group) -> list[str]:
    """Return the names in a group to which hpstage itself contributes, sorted; nothing is loaded.

    Raises:
        UsageError: hpstage's own are missing.
    """
    found = registered(group)
    if not found:
        raise UsageError(f"the entry points {group} of hpstage itself are missing: install it again")
    return found


def subclass(group: Group, name: str, port: type[_T]) -> type[_T]:
    """Return the class of that name.

    Raises:
        UsageError: there is none, it cannot be imported, or it is not a subclass of ``port``.
    """
    point = _the_one(group, name)
    found = _loaded(point)
    if not isinstance(found, type) or not issubclass(found, port):
        raise UsageError(
            f"{_described(point)} is not a subclass of {port.__module__}.{port.__name__}; {_remedy(point)}"
        )
    return found


def opener(group: Group, name: str, port: type[_T]) -> Callable[..., _T]:
    """Return the function of that name, which must return an instance of ``port``.

    Raises:
        UsageError: there is none, it cannot be imported, or it is not a function; raised by the returned function if
            the result is not an instance of ``port``.
    """
    point = _the_one(group, name)
    found = _loaded(point)
    if not callable(found):
        raise UsageError(f"{_described(point)} is not a function; {_remedy(point)}")

    def checked(*args: object, **kwargs: object) -> _T:
        opened = found(*args, **kwargs)
        if not isinstance(opened, port):
            raise UsageError(
                f"{_described(point)} returned a {type(opened).__name__}, not a {port.__module__}.{port.__name__}; "
                f"{_remedy(point)}"
            )
        return opened

    return checked


def _the_one(group: Group, name: str) -> EntryPoint:
    points = [point for point in _points(group, _installed()) if point.name == name]
    if not points:
        raise UsageError(f"there is no {name!r} among {group}: {', '.join(names(group))}")
    if len({point.value for point in points}) > 1:
        raise UsageError(f"{' and '.join(map(_described, points))} have the same name; uninstall one of them")
    return points[0]


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # a module may raise anything where it is imported
        raise UsageError(
            f"{_described(point)} cannot be imported ({type(error).__name__}: {error}); {_remedy(point)}"
        ) from error


def _described(point: EntryPoint) -> str:
    of = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
    return f"the plugin {point.name!r}{of} ({point.group}, {point.value})"


def _remedy(point: EntryPoint) -> str:
    return f"fix, update or uninstall {'it' if point.dist is None else point.dist.name}"
