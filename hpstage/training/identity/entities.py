"""Digests functions, classes and modules that refer to each other, even in cycles, by their content."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpstage.training.code.string_digest import hashed

_REFERENCE = re.compile("\0(\\d+)\0")


@dataclass(slots=True)
class Entity:
    """A function, class or module, described by ``lines``, in which ``\\0number\\0`` refers to another entity.

    ``outer`` describes the objects that it refers to by name; in another process, they may be others, or be missing.
    """

    name: str
    place: str
    lines: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)


class Entities:
    """The visited entities, in order."""

    def __init__(self) -> None:
        self._all: list[Entity] = []
        self._numbers: dict[int, int] = {}
        self._held: list[object] = []  # keeps ids unique

    def __contains__(self, target: object) -> bool:
        return id(target) in self._numbers

    def new(self, target: object, name: str, place: str) -> Entity:
        self._numbers[id(target)] = len(self._all)
        self._held.append(target)
        self._all.append(Entity(name, place))
        return self._all[-1]

    def visited(self) -> list[tuple[object, Entity]]:
        """Return the visited objects, each with the entity that describes it."""
        return list(zip(self._held, self._all, strict=True))

    def reference(self, target: object) -> str:
        """Return the reference that represents ``target`` in the lines of other entities."""
        return f"\0{self._numbers[id(target)]}\0"

    def named(self, text: str) -> str:
        """Replace references in a string by the names of the entities."""
        return _resolved(text, [entity.name for entity in self._all])

    def digests(self) -> dict[str, list[str]]:
        """Return digests of the entities at each place, each without what the entity refers to."""
        found: dict[str, list[str]] = {}
        for entity, mark in zip(self._all, self._marks(), strict=True):
            found.setdefault(f"{entity.place}.{entity.name}" if entity.name else entity.place, []).append(mark)
        return found

    def digest(self, texts: Iterable[str], others: Iterable[str], more: Iterable[str]) -> str:
        """Return the digest of ``texts``, the entities ``others`` refer to, ``more`` lines, and all entities."""
        final = self._refined()
        held = [final[int(number)] for text in others for number in _REFERENCE.findall(text)]
        return hashed("\n".join([*(_resolved(text, final) for text in texts), *held, *more, *sorted(final)]))

    def _marks(self) -> list[str]:
        names = [entity.name for entity in self._all]
        return [
            hashed("\n".join([entity.name, *sorted(_resolved(line, names) for line in entity.lines)]))
            for entity in self._all
        ]

    def _refined(self) -> list[str]:
        """Return marks that differ for entities of the same name if they, or the entities that they refer to, differ.

        This is the refinement of colours by Weisfeiler and Leman (1968).
        """
        marks = self._marks()
        while True:
            finer = [
                hashed("\n".join([mark, *sorted(_resolved(line, marks) for line in entity.lines | entity.outer)]))
                for mark, entity in zip(marks, self._all, strict=True)
            ]
            if len(set(finer)) == len(set(marks)):
                return finer
            marks = finer


def _resolved(text: str, marks: list[str]) -> str:
    return _REFERENCE.sub(lambda found: marks[int(found[1])], text)
