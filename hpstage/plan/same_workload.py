"""Checking that a store belongs to the workload to be trained, and finding the differences if not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from hpstage.errors import StoreError
from hpstage.plan.checks import FORMAT, in_other_format
from hpstage.plan.facts import StateKey

NUMERICS = "environment:numerics"
"""Name of the numerics class in a workload's description."""
ATTRIBUTE = "attribute "
"""Beginning of the names of digests of the trainable's attributes."""
_FILES = "environment:files"
_BYTECODE = "code: 'bytecode "
_SHOWN = 5


class _Header(msgspec.Struct, tag="PlanCreated"):
    format: int
    workload: str = ""
    described: dict[str, str] = {}
    loaded: dict[str, str] = {}


_decode_header = msgspec.json.Decoder(_Header).decode


def format_of(record: bytes) -> int:
    """Return the format of a journal, given its first record. Raise ``msgspec.MsgspecError`` if it is none."""
    return _decode_header(record).format


def check_workload(
    record: bytes,
    workload: StateKey,
    described: Mapping[str, str],
    loaded: Mapping[str, str],
    is_trained: Callable[[], bool],
) -> None:
    """Check that a journal belongs to a workload.

    Args:
        record: its first record.
        described: the description that the workload's key was hashed from.
        loaded: digests of the workload's code by name.
        is_trained: returns whether anything was trained on it.

    Raises:
        StoreError: it belongs to another workload (naming the differences), or is no journal of a search plan.
    """
    try:
        header = _decode_header(record)
    except msgspec.MsgspecError as error:
        raise StoreError(f"this is not the journal of a search plan ({error}); choose another store") from error
    if header.format != FORMAT:
        raise in_other_format(header.format)
    if header.workload != workload:
        changes = differing(header.described, header.loaded, described, loaded)
        code = header.described.get("code", ""), described.get("code", "")
        unused = not is_trained()
        advice = " or remove this one, since nothing was trained on it" if unused else _or(*code)
        made_with, given = (of.get(NUMERICS, "").partition("-v")[0] for of in (header.described, described))
        if not unused and made_with and made_with != given:  # classes of the same name differ in the version only
            advice = f", or set the numerics that this one was created with: numerics = {made_with!r}"
        if header.described.get(_FILES) != described.get(_FILES):
            advice += (
                ". A file that an attribute of the trainable names has changed: if training writes it, name the "
                "attribute in `stateless`"
            )
        raise StoreError(f"this store belongs to another workload ({'; '.join(changes)}); choose another store{advice}")


def differing(
    there: Mapping[str, str], loaded_there: Mapping[str, str], here: Mapping[str, str], loaded_here: Mapping[str, str]
) -> list[str]:
    """List the differences between the description of a plan's workload and another: edited code first, then packages.

    Args:
        loaded_there, loaded_here: digests of the code by name.
    """
    changed = sorted(name for name in {*loaded_there, *loaded_here} if loaded_there.get(name) != loaded_here.get(name))
    attributes = [name for name in changed if name.startswith(ATTRIBUTE)]
    edited = [name for name in changed if name not in attributes]
    changes = _values({*there, *here}, there, here)
    if attributes and any(name.startswith(ATTRIBUTE) for name in loaded_there):  # older plans have none
        changes = [*attributes, *(change for change in changes if not change.startswith(("attributes: ", _BYTECODE)))]
    if any(of.get("code", "").startswith("version ") for of in (there, here)):
        return changes  # code with a stated version is neither digested nor compared
    # Names that only one of the two has (values of code that was sent by value) matter only if nothing else differs.
    edited = [name for name in edited if name in loaded_there and name in loaded_here] or edited
    if not (edited and loaded_there and loaded_here):
        return changes
    packages = [name for name in edited if name.startswith("package ")]
    edited = [name for name in edited if name not in packages]
    return [
        *([f"edited since: {', '.join(edited[:_SHOWN])}{', ...' if len(edited) > _SHOWN else ''}"] if edited else []),
        *_values(packages, loaded_there, loaded_here),
        *(change for change in changes if not change.startswith("code: ")),  # its digests
    ]


def _values(names: Iterable[str], there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {there.get(name, 'absent')!r} there, {here.get(name, 'absent')!r} here"
        for name in sorted(names)
        if there.get(name) != here.get(name)
    ]


def _or(there: str, here: str) -> str:
    """Return the advice to add to the error where the code differs."""
    if there == here:
        return ""
    if there.startswith("version ") or here.startswith("version "):
        return ": a stated `version` is part of the workload, so a store continues only with the same one"
    return (
        ", or undo the edit (if nothing was edited: random numbers that a script draws on import need a seed); a store "
        "that was begun with a `version` stated on the trainable can be continued after edits that do not alter "
        "training"
    )
