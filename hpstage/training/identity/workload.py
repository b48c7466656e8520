"""Code identity: which code trains, as a digest that changes when the code does and not when a comment does.

What counts is what the training code reaches, as it is loaded in this process, whatever its files say by now: the
methods of a class and of its user-defined bases, and the functions, classes and constants that they name, transitively
through the user's own modules. A module that is used as a whole (``getattr(nets, name)``) counts with all that it
holds; so does the module of code that looks names up by texts (``globals()``, ``eval``, ``__subclasses__``), and its
package where it imports modules by such names. The rest of a script (the search space, the study) does not count; of
a script that counts as a whole, its code does, and not what a run has made. Of libraries the name and version of the
package count. An object in a global name that can be neither digested nor pickled counts by its class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from hpstage.training.identity.hashing import hashed
from hpstage.training.identity.source import ABSENT, is_users
from hpstage.training.identity.values import is_function
from hpstage.training.identity.walk import COMPUTED, FIXED, Walk

_PYTHON = "Python"
_MOST = 1000
"""Entries of ``loaded`` that are told one by one."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What trains.

    Attributes:
        described: ``trainable`` (name), ``code``, and where there are any ``attributes`` and ``data version``.
        loaded: what each function, class and module is, as loaded here, and the versions of packages, by name; to find
            out what differs between two processes.
        packages: the names, as imported, of the libraries that the code names.
        nbytes: of the tensors and arrays in attributes, and in globals and closures of the code.
        paths: of files, perhaps, that the code reads by names written in it.
    """

    described: dict[str, str]
    loaded: dict[str, str]
    packages: frozenset[str]
    nbytes: int
    paths: frozenset[str] = frozenset()


class StandsFor:
    """Base of what stands for something of the user's: ``subject``, whose identity counts."""

    subject: object


def identify(obj: object) -> Identity:
    """The identity of a trainable's code, as it is loaded in this process.

    ``obj`` is the user's object or function, or what :func:`~hpstage.training.trainables.as_trainable` made of it. A
    stated ``version`` stands for the code and for attributes that have no digest; other attributes always count.

    Raises:
        UsageError: an attribute can be neither digested nor pickled, or a module that counts as a whole was edited
            after it was imported, and no ``version`` is stated.
    """
    if isinstance(obj, StandsFor):
        obj = obj.subject
    version, data_version = getattr(obj, "version", None), getattr(obj, "data_version", None)
    strict = version is None
    is_users.cache_clear()  # files come and go while a notebook is open
    walk = Walk(check=strict)
    held: list[str] = []
    if is_function(obj):
        described = {"trainable": getattr(obj, "__qualname__", type(obj).__name__)}
        root = walk.refer(obj)
    else:
        described = {"trainable": type(obj).__qualname__}
        root = walk.refer(type(obj))
        held = walk.values.attributes(obj, strict=strict)
    if held:
        # Code that attributes hold counts here by its names, and below as it is.
        described["attributes"] = hashed(walk.named("\n".join(held)))
    if data_version is not None:
        described["data version"] = str(data_version)
    loaded = {f"package {name}": version.partition("+")[0] for name, version in walk.packages.items()}
    loaded[_PYTHON] = f"{sys.version_info.major}.{sys.version_info.minor}"
    if strict:
        loaded |= _bounded(walk.loaded())
    walk.look_through_script()
    described["code"] = f"bytecode {walk.digest(root, *held)}" if strict else f"version {version}"
    return Identity(described, loaded, frozenset(walk.packages), walk.values.nbytes, frozenset(walk.paths))


def code_identity(obj: object) -> dict[str, str]:
    """The part of the identity (see :func:`identify`) that goes into the workload's key."""
    return identify(obj).described


def packages(obj: object) -> frozenset[str]:
    """The names, as imported, of the libraries that the code of a trainable or function names."""
    return identify(obj).packages


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """What differs between the code that is loaded in this process and in another, in words.

    What this process does not have, or knows of only through what it does not have, cannot be compared: workers may
    have packages that the driver's host has not. Nor can values that a module computes: see :func:`drifts`.
    """
    lacking = ABSENT in here.values()
    names = [
        name
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
        and here.get(name) != ABSENT
        and not (lacking and name not in here)
        and not (name.endswith((FIXED, COMPUTED)) and not (name in here and name in there))
        and not name.endswith(COMPUTED)
    ]
    if _PYTHON in names:  # all code differs then
        names = [_PYTHON]
    return [
        f"{name} ({here[name]} here, {there.get(name, ABSENT)} there)"
        if name.startswith(("package ", _PYTHON)) and name in here
        else name.removesuffix(f" {FIXED}")
        + (" (not loaded there)" if name not in there else " (not loaded here)" if name not in here else "")
        for name in names
    ]


def by_name(loaded: Mapping[str, str]) -> dict[str, str]:
    """Of what is loaded, a short digest for each name of the code; without what hosts compute."""
    found: dict[str, str] = {}
    for name in sorted(loaded):
        if not name.endswith(COMPUTED):
            plain = name.removesuffix(f" {FIXED}")
            found[plain] = found.get(plain, "") + loaded[name][:8]
    return found


def drifts(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Names of values that the user's modules have computed, and that differ between this process and another."""
    both = sorted(name for name in here if name.endswith(COMPUTED) and name in there)
    return [name.removesuffix(f" {COMPUTED}") for name in both if here[name] != there[name]]


def _bounded(loaded: Mapping[str, str]) -> dict[str, str]:
    """At most so many entries; what is beyond stands together."""
    names = sorted(loaded)
    bounded = {name: loaded[name] for name in names[:_MOST]}
    if len(names) > _MOST:
        bounded["other code"] = hashed("".join(f"{name} {loaded[name]}" for name in names[_MOST:]))[:16]
    return bounded
