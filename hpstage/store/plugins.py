"""Plugins: what installed distributions add by entry points, in one group for each port."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar

from hpstage.errors import UsageError

Group = Literal["hpstage.algorithms", "hpstage.executors", "hpstage.stores", "hpstage.checkpoints"]
"""The names of algorithms and executors are those of the command line, of the others the schemes of their URLs.

``hpstage.algorithms``, ``hpstage.executors``: subclasses of the port. ``hpstage.stores``: functions such as
:func:`hpstage.store.redis_plans.open_redis`. ``hpstage.checkpoints``: functions such as
:func:`hpstage.checkpoints.opening.open_folder`; other schemes are fsspec's.
"""

_T = TypeVar("_T")


def names(group: Group) -> list[str]:
    """Return the names in a group, sorted; nothing is loaded.

    Raises:
        UsageError: hpstage's own are missing.
    """
    found = sorted({point.name for point in entry_points(group=group)})
    if not found:
        raise UsageError(f"the entry points {group} of hpstage itself are missing: install it again")
    return found


def subclass(group: Group, name: str, port: type[_T]) -> type[_T]:
    """Return the class of that name.

    Raises:
        UsageError: there is none, it cannot be imported, or it is no subclass of ``port``.
    """
    point = _the_one(group, name)
    found = _loaded(point)
    if not isinstance(found, type) or not issubclass(found, port):
        raise UsageError(f"{_described(point)} is no subclass of {port.__module__}.{port.__name__}; {_remedy(point)}")
    return found


def function(group: Group, name: str) -> Callable[..., Any]:
    """Return the function of that name. Raises as :func:`subclass` does."""
    point = _the_one(group, name)
    found = _loaded(point)
    if not callable(found):
        raise UsageError(f"{_described(point)} is no function; {_remedy(point)}")
    return found  # type: ignore[no-any-return]


def _the_one(group: Group, name: str) -> EntryPoint:
    points = list(entry_points(group=group, name=name))
    if not points:
        raise UsageError(f"there is no {name!r} among {group}: {', '.join(names(group))}")
    if len({point.value for point in points}) > 1:
        raise UsageError(f"{' and '.join(map(_described, points))} have one name; uninstall one of them")
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
