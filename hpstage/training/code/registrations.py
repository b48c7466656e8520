"""Classes registered with abstract classes (``Sequence.register(Mine)``), which ``isinstance`` then accepts. Python
keeps the registries in C, as weak references."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import Any

from hpstage.training.code.owner import classes_below, is_users_code, module_of, name_of

Pair = tuple[type, type]
"""An abstract class, and a class that is registered with it."""
_known: tuple[object, list[Pair]] = None, []
"""Python's token at the last search, which changes with each registration; and the registrations found."""


def registered() -> list[Pair]:
    """Return the registrations in which either class is the user's; the same list object until they change."""
    global _known
    token = abc.get_cache_token()
    if _known[0] != token:
        abstract = [cls for cls in classes_below(object) if isinstance(cls, abc.ABCMeta)]
        pairs = ((each, cls) for each in abstract for cls in _registry(each))
        found: list[Pair] = [pair for pair in pairs if any(map(is_users_code, pair))]
        _known = token, _known[1] if found == _known[1] else found
    return _known[1]


def registrations_of(cls: type) -> Iterator[str]:
    """Yield a text for each class that is registered with a user's class, and for each library's class it is registered
    with."""
    for abstract, concrete in registered():
        if abstract is cls:
            yield f"registers {called(concrete)}"
        elif concrete is cls and not is_users_code(abstract):
            yield f"registered with {called(abstract)}"


def undo(made: Iterable[Pair]) -> None:
    """Undo registrations."""
    global _known
    _known = None, _known[1]  # the token does not change
    for abstract, cls in made:
        others = [other for other in _registry(abstract) if other is not cls]
        abc._reset_registry(abstract)  # type: ignore[attr-defined]
        for other in others:
            abc.ABCMeta.register(abstract, other)  # type: ignore[arg-type]
        for each in abstract.__mro__:  # whose caches may hold the former answer
            if isinstance(each, abc.ABCMeta):
                abc._reset_caches(each)  # type: ignore[attr-defined]


def called(cls: type) -> str:
    """Return the name of a class, with its module if it is a library's."""
    return name_of(cls) if is_users_code(cls) else f"{module_of(cls)}.{name_of(cls)}"


def _registry(abstract: Any) -> list[type]:
    references = abc._get_dump(abstract)[0]  # type: ignore[attr-defined]
    return [cls for cls in (reference() for reference in references) if cls is not None]
