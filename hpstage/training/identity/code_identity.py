"""Code identity: a digest of the code that trains, which changes with the code but not with its comments.

It covers the code that training reaches, as it was loaded in this process, even if its files have been edited since:
the methods of a class and of its user-defined bases, and the functions, classes and constants that they name,
transitively through the user's own modules. A module that is used as a whole (``getattr(nets, name)``) counts with all
its contents. So does the module of code that looks names up by strings (``globals()``, ``eval``, ``__subclasses__``),
and its package if it imports modules by such names. Statements by which a module changes libraries when it is imported
count by their source. The rest of a script (the search space, the study) does not count. If a script is used as a
whole, its code counts, but not the objects that a run has created. Libraries count by name and version of the package.
An object in a global that can be neither digested nor pickled counts by its class.

The digest is the entry ``code`` of the workload's description (``environment.py``), which is hashed into the
key of every state (``plan/keys.py``). So an edit gives all states other keys: a search without ``store=`` starts a new
plan, and on a store that the call names, the search is refused and the error lists what was edited
(``plan/same_workload.py``). A ``version`` on the trainable stands for its code: keys change with the version only.
Two kinds of edits are refused earlier: after the import of a module that counts as a whole
(``see_as_written`` in ``training/code/source.py``), and on some of the workers only (``cluster/admission.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpstage.plan.same_workload import ATTRIBUTE
from hpstage.training.code.owner import is_users, is_users_code, name_of, of_user
from hpstage.training.code.patches import standing
from hpstage.training.code.source import ABSENT
from hpstage.training.code.string_digest import hashed
from hpstage.training.identity.placing import folder_above, folder_of
from hpstage.training.identity.values import is_function
from hpstage.training.identity.walk import COMPUTED, FIXED, Walk

_PYTHON = "Python"
_MOST = 1000
"""Number of entries of ``loaded`` that are listed one by one."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of the code that trains.

    Attributes:
        described: ``trainable`` (name), ``code``, and if present ``attributes``, ``defaults`` and ``data version``.
        loaded: digests of each function, class and module as loaded here, and versions of packages, by name; used to
            find out what differs between two processes.
        packages: import names of the libraries that the code names.
        nbytes: size of the tensors and arrays in attributes, and in globals and closures of the code.
        paths: possible paths of files that the code reads by names written in it.
        sources: files of modules that count by all of their code, imported or not.
        reads_own_defaults: whether the code seems to read the trainable's ``defaults``, which then belong to the code.
    """

    described: dict[str, str]
    loaded: dict[str, str]
    packages: frozenset[str]
    nbytes: int
    paths: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()
    reads_own_defaults: bool = False


class StandsFor:
    """Base class of objects that wrap a user's object, ``subject``. Their identity is that of ``subject``."""

    subject: object


def identify(obj: object, patched: Iterable[tuple[str, Any]] | None = None) -> Identity:
    """Return the identity of a trainable's code as loaded in this process.

    ``obj`` is the user's object or function, or the result of :func:`~hpstage.training.trainables.as_trainable`. A
    stated ``version`` replaces the code and the attributes without a digest; other attributes always count. ``patched``
    is the result of :func:`~hpstage.training.code.patches.standing`; without it, that function is called, which takes
    tens of milliseconds.

    Raises:
        UsageError: an attribute can be neither digested nor pickled, or a module that counts as a whole was edited
            after it was imported, and no ``version`` is stated.
    """
    if isinstance(obj, StandsFor):
        obj = obj.subject
    version, data_version = getattr(obj, "version", None), getattr(obj, "data_version", None)
    strict = version is None
    is_users.cache_clear()  # files may appear and disappear while a notebook is open
    of_user.cache_clear()
    walk = Walk(obj, check=strict)
    walk.values.folder = folder_of(obj)
    held: list[str] = []
    if is_function(obj):
        described = {"trainable": name_of(obj)}
        root = walk.refer(obj)
    else:
        described = {"trainable": name_of(type(obj))}
        root = walk.refer(type(obj))
        held = walk.values.attributes(obj, strict=strict)
    root = f"{root}\n{walk.patched(standing() if patched is None else patched)}"
    if held:
        # Code held by attributes counts by name here, and by content below.
        described["attributes"] = hashed(walk.named("\n".join(held)))
    own = getattr(obj, "defaults", None)
    reads_own = walk.names_defaults and isinstance(own, Mapping) and bool(own)
    if reads_own and (strict or "defaults" in getattr(obj, "__dict__", {})):
        described["defaults"] = hashed(walk.named(walk.values.content(own)))
    if strict:
        walk.add_effects()
    walk.add_notes()
    if data_version is not None:
        described["data version"] = str(data_version)
    loaded = {f"package {name}": version.partition("+")[0] for name, version in walk.packages.items()}
    loaded[_PYTHON] = f"{sys.version_info.major}.{sys.version_info.minor}"
    loaded |= {ATTRIBUTE + text.partition("=")[0]: hashed(walk.named(text)) for text in held}
    if strict:
        loaded |= _bounded(walk.loaded())
        walk.add_effects(of_script=True)
    walk.look_through_script()
    described["code"] = f"bytecode {walk.digest(root, *held)}" if strict else f"version {version}"
    packages, paths, sources = map(frozenset, (walk.packages, walk.paths, walk.sources))
    return Identity(described, loaded, packages, walk.values.nbytes, paths, sources, reads_own)


def code_identity(obj: object) -> dict[str, str]:
    """Return the part of the identity (see :func:`identify`) that belongs to the workload's key."""
    return identify(obj).described


def packages(obj: object) -> frozenset[str]:
    """Return the import names of the libraries that the code of a trainable or function names."""
    return identify(obj, ()).packages


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Describe what differs between the code loaded in this process and in another.

    Code that this process does not have, or knows only through code it does not have, cannot be compared: workers may
    have packages that the driver's host lacks. Nor can values that a module computes: see :func:`drifts`.
    """
    lacking = ABSENT in here.values()
    names = [
        name
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
        and not name.startswith(ATTRIBUTE)  # these belong to the workload's key
        and here.get(name) != ABSENT
        and not (lacking and name not in here)
        and not (name.endswith((FIXED, COMPUTED)) and not (name in here and name in there))
        and not name.endswith(COMPUTED)
    ]
    if _PYTHON in names:  # then all code differs
        names = [_PYTHON]
    return [
        f"{name} ({here[name]} here, {there.get(name, ABSENT)} there)"
        if name.startswith(("package ", _PYTHON)) and name in here
        else name.removesuffix(f" {FIXED}")
        + (" (not loaded there)" if name not in there else " (not loaded here)" if name not in here else "")
        for name in names
    ]


def by_name(loaded: Mapping[str, str]) -> dict[str, str]:
    """Return a short digest for each name of the loaded code, and each package's version, without values that hosts
    compute."""
    found: dict[str, str] = {}
    for name in sorted(loaded):
        if not name.endswith(COMPUTED):
            plain = name.removesuffix(f" {FIXED}")
            found[plain] = found.get(plain, "") + loaded[name][: None if name.startswith("package ") else 8]
    return found


def drifts(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Return names of values computed by the user's modules that differ between this process and another."""
    both = sorted(name for name in here if name.endswith(COMPUTED) and name in there)
    return [name.removesuffix(f" {COMPUTED}") for name in both if here[name] != there[name]]


def _bounded(loaded: Mapping[str, str]) -> dict[str, str]:
    """Return at most ``_MOST`` entries, and one more for all the others."""
    names = sorted(loaded)
    bounded = {name: loaded[name] for name in names[:_MOST]}
    if len(names) > _MOST:
        bounded["other code"] = hashed("".join(f"{name} {loaded[name]}" for name in names[_MOST:]))[:16]
    return bounded


def origin_of(trainable: object) -> tuple[str, str]:
    """Return the name by which a command line refers to the trainable, or to its class, and the folder to which this
    name is relative.

    Both are empty if there is no such name: it was defined in a notebook or in a function, or its class is a library's.
    """
    if isinstance(trainable, StandsFor):
        trainable = trainable.subject
    target = trainable if is_function(trainable) else type(trainable)
    name = getattr(target, "__qualname__", "<unknown>")
    module = sys.modules.get(getattr(target, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None or "<" in name or not is_users_code(target) or not os.path.isfile(file):
        return "", ""
    dotted = module.__name__ if module.__name__ != "__main__" else getattr(module.__spec__, "name", "")
    is_in_package = "." in dotted or os.path.basename(file) == "__init__.py"
    place = dotted if is_in_package else os.path.basename(file)
    return f"{place}:{name}", folder_above(file, dotted)
