"""Inputs: files and environment variables that training reads and that are not part of the workload's key, by name and
content.

The key must be known before anything is trained. So these inputs are reported after they were read, recorded with the
plan, and compared before a later call uses the plan's states.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import Self
from weakref import WeakKeyDictionary

from hpstage.errors.text import writable
from hpstage.training.code.owner import is_users, is_users_file
from hpstage.training.code.source import name_at, spec_of
from hpstage.training.code.string_digest import hashed
from hpstage.training.identity.files import content_of
from hpstage.training.identity.placing import CODE, folder_of, from_code
from hpstage.training.identity.watching import Watch, held_open, imported, modified, not_inputs, of_children

ABSENT = ""
"""The digest that stands for a missing input."""
FILE, FOLDER, VARIABLE, ARGUMENTS = "file ", "folder ", "variable ", "arguments "
MODULE = "module "
"""Prefix of the names of the user's modules that training has loaded without the code naming them."""
SHARED = "shared "
"""Prefix of the names of files that a step has written and a later step has read."""
MORE = "more"
"""The name that stands for all inputs after the first ``_MOST``."""
_HOME = "~"
# Variables that differ between workers: each has its own device.
_WORKERS = frozenset(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"))
_BYTE = re.compile(r"\\u(dc[89a-f][0-9a-f])")
"""A byte of a file's name that is not UTF-8, in the form that :func:`writable` gives it."""
_LOOKS = 3
"""Number of times that open files are listed: files that stay open are opened early."""
_MOST = 1000
"""Number of files whose content is compared."""


class Inputs:
    """The inputs of one trainable. Within this context, files and variables that its code reads are recorded, unless it
    states a ``data_version``; and modules that it loads, unless it states a ``version``.

    Attributes:
        keyed: files whose content is part of the workload's key.
    """

    def __init__(self, trainable: object) -> None:
        self._subject = getattr(trainable, "subject", trainable)
        self._folder = folder_of(self._subject)
        self._are_data = getattr(self._subject, "data_version", None) is None
        self._is_code = getattr(self._subject, "version", None) is None
        self._watch = Watch() if self._are_data or self._is_code else None
        self._path = [*sys.path]  # as it is before training extends it
        self._looked_at = 0  # number of files in `read` already processed
        self._looks, self._held = _LOOKS, held_open()
        self._known: set[str] = set()
        self.keyed: set[str] = set()

    def __enter__(self) -> Self:
        if self._watch is not None:
            self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.__exit__()

    def begin_step(self, *, first: bool) -> None:
        """Record that a step is trained: the ``first`` one of a chain, or a later one."""
        if self._watch is not None:
            self._watch.begin_step(first=first)

    def take(self, watch: Watch, *, reads: bool) -> None:
        """Add the inputs that another watch has recorded; without ``reads``, only files written and variables set."""
        if self._watch is None or not self._are_data:
            return
        read = ("read", "updated", "folders", "variables", "arguments") if reads else ()
        for kind in ("written", "exported", *read):
            getattr(self._watch, kind).update(getattr(watch, kind))

    def news(self) -> dict[str, str]:
        """Return digests, by name, of the inputs that were read for the first time since the last call."""
        watch = self._watch
        if watch is None:
            return {}
        of_children(watch)
        found: dict[str, str] = {}
        modules = dict(self._modules()) if self._is_code else {}
        for name in map(writable, (*modules, *(self._names(watch) if self._are_data else ()))):
            if name in self._known:
                continue
            if len(self._known) >= _MOST:
                name = MORE
            digest = modules[name] if name in modules else self._digest(name)
            if not self._is_stateless(name) and digest is not None:
                found[name] = digest
            self._known.add(name)
        return found

    def now(self, names: Iterable[str]) -> dict[str, str]:
        """Return the present digests of inputs, by name. Those that training does not depend on are left out."""
        digests = {name: self._digest(name) for name in names if not self._is_stateless(name)}
        return {name: digest for name, digest in digests.items() if digest is not None}

    def _modules(self) -> Iterator[tuple[str, str]]:
        """Yield names of modules that training has loaded, with digests of what was loaded."""
        for place, digest in [*imported.items()]:
            name = name_at(place, self._path)
            if place not in self.keyed and (is_users(name) if name else is_users_file(place)):
                yield MODULE + name if name else FILE + self._shown(place), digest

    def _names(self, watch: Watch) -> Iterator[str]:
        """Yield names of inputs that were read and not written."""
        held = set[str]()
        if self._looks:
            self._looks -= 1
            held = held_open() - self._held - not_inputs.keys() - {os.path.realpath(path) for path in watch.read}
        for path in (*islice(watch.read, self._looked_at, None), *sorted(held)):
            place, at = os.path.abspath(path), modified(path)
            is_changed = at >= watch.began or (path in watch.updated and at != watch.read[path])
            if place not in self.keyed and not is_changed and not _is_within(place, watch.written):
                yield FILE + self._shown(path)
        self._looked_at = len(watch.read)
        for path in sorted(watch.folders):
            place = os.path.abspath(path)
            is_changed = modified(path) >= watch.began or any(_is_within(each, {place}) for each in watch.written)
            if not is_changed and not _is_within(place, watch.written):
                yield FOLDER + self._shown(path)
        yield from (SHARED + self._shown(path) for path in sorted(watch.shared))
        yield from (VARIABLE + name for name in sorted(watch.variables - watch.exported - _WORKERS))
        yield from (ARGUMENTS + name for name in watch.arguments)

    def _shown(self, path: str) -> str:
        """Return a path in a form that stays valid in another checkout, and for another user."""
        if not os.path.isabs(path):
            return os.path.normpath(path)
        home = os.path.expanduser(_HOME)
        text = from_code(path, self._folder) or os.path.normpath(path)
        return text.replace(home, _HOME, 1) if text.startswith(f"{home}{os.sep}") else text

    def _place(self, shown: str) -> str:
        if shown.startswith(CODE):
            return shown.replace(CODE, self._folder, 1)
        return os.path.expanduser(shown)

    def _digest(self, name: str) -> str | None:
        """Return the digest of an input; ``None`` if it has no content, as a pipe."""
        name = _BYTE.sub(lambda written: chr(int(written[1], 16)), name)  # undo writable()
        if name == MORE or name.startswith(SHARED):
            return name  # no content is compared
        if name.startswith(VARIABLE):
            value = os.environ.get(name.removeprefix(VARIABLE))
            return ABSENT if value is None else hashed(value)
        if name.startswith(ARGUMENTS):
            return hashed("\0".join(sys.argv[1:]))
        try:
            if name.startswith(FOLDER):
                entries = os.listdir(self._place(name.removeprefix(FOLDER)))
                return hashed("\n".join(sorted(entry for entry in entries if not entry.startswith((".", "__")))))
            if name.startswith(MODULE):
                spec = spec_of(name.removeprefix(MODULE))
                return ABSENT if spec is None or not spec.origin else content_of(spec.origin)
            return content_of(self._place(name.removeprefix(FILE)))
        except (OSError, ValueError):
            return ABSENT

    def _is_stateless(self, name: str) -> bool:
        text = plain(name)
        return not {text, os.path.basename(text)}.isdisjoint(getattr(self._subject, "stateless", ()))


def plain(name: str) -> str:
    """Return the name of an input as the user knows it."""
    return name.partition(" ")[2].removeprefix(f"{CODE}/")


def _is_within(place: str, folders: Container[str]) -> bool:
    """Return whether a path, or a folder above it, is in ``folders``."""
    while place not in folders:
        place, below = os.path.dirname(place), place
        if place == below:
            return False
    return True


_all: WeakKeyDictionary[object, Inputs] = WeakKeyDictionary()


def inputs_of(trainable: object) -> Inputs:
    """Return the inputs of a trainable: the same object for all calls in a process."""
    try:
        return _all.setdefault(trainable, Inputs(trainable)) if trainable not in _all else _all[trainable]
    except TypeError:
        return Inputs(trainable)  # weak references to it are not possible
