"""Describes everything in this process that decides bits, and the trainable. Both make up the description of a
workload, whose hash is the workload's key (:func:`hpstage.plan.keys.workload_key`)."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
from collections.abc import Mapping
from typing import Any

from hpstage.errors.text import size
from hpstage.executor import Environment
from hpstage.plan.same_workload import NUMERICS
from hpstage.trainable import Trainable
from hpstage.training.code.owner import is_users_code
from hpstage.training.code.patches import standing
from hpstage.training.identity import settings, threads
from hpstage.training.identity.code_identity import Identity, identify
from hpstage.training.identity.files import DataFiles
from hpstage.training.identity.inputs import Inputs, inputs_of
from hpstage.training.identity.values import NOT_STATE
from hpstage.training.identity.watching import Watch

AUTO = "auto"
_CHOICE = f"environment:{AUTO} "


def describe(trainable: Trainable) -> Environment:
    """Describe the environment of the process that will train, and pin its numerical libraries to one thread.

    A trainable adds entries by ``describe_environment()`` (a dict of short strings) and ``describe_data()``.
    """
    settings.refuse_modes()
    inputs, watch = inputs_of(trainable), Watch()
    with watch:
        return _describe(trainable, inputs, watch)


def _describe(trainable: Trainable, inputs: Inputs, watch: Watch) -> Environment:
    see_data = getattr(trainable, "see_data", None)
    # Libraries are searched for patches once, after the data were created: it takes a tenth of a second.
    patched = [] if see_data is not None else [*standing()]
    before = identify(trainable, patched)
    described = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
    }
    threads.pin(before.packages)
    # Even if NumPy is not imported yet: workers with different pasts must agree.
    described["numpy"] = importlib.metadata.version("numpy")
    described |= threads.describe(before.packages)
    described |= settings.described(())
    if "torch" in sys.modules:
        from hpstage.torch.environment import pin

        pin()
    if hasattr(trainable, "describe_environment"):
        described |= trainable.describe_environment()
    if hasattr(trainable, "describe_data"):
        described["data"] = trainable.describe_data()
    # Identify again: creating the data set may have set globals and patched libraries. In a process that has trained
    # before, this happened earlier.
    after = identify(trainable, patched := [*standing()]) if see_data is not None else before
    if more := after.packages - before.packages:  # packages that only patches name
        threads.pin(more)
        described |= threads.describe(after.packages)
    if (take_patches := getattr(trainable, "take_patches", None)) is not None:
        take_patches(patched)
    contents = None
    if see_data is not None and "data version" not in after.described:
        contents = see_data()
    # Files that were read to create data count by the digest of the data, if the data are digested as a whole.
    inputs.take(watch, reads=contents is not None and not contents.whole)
    inputs.keyed |= before.sources | after.sources
    remarks: list[str] = []
    warnings: list[str] = []
    if "data version" not in after.described:
        files = files_of(getattr(trainable, "subject", trainable))
        files.look_at(after.paths)
        if files.names:
            described["files"] = f"{len(files.names)} x {files.digest()}"
        inputs.keyed |= files.places | (contents.files if contents is not None else frozenset())
        remarks, warnings = _remarks(contents, after, files)
    return Environment(
        {name: str(text) for name, text in described.items()},
        identity=after.described,
        # Values from before the data were created, since that may set others in each process; patches from after it.
        loaded=after.loaded | before.loaded,
        remarks=remarks,
        warnings=warnings,
    )


def files_of(subject: object) -> DataFiles:
    """Return the files named by attributes of the object and of its user-defined classes, without those that are
    ``stateless``, and by the arguments of a ``functools.partial``."""
    files = DataFiles()
    while isinstance(subject, functools.partial):
        files.look_at((subject.args, subject.keywords))
        subject = subject.func
    ignored = {*NOT_STATE, *getattr(subject, "stateless", ())}
    for holder in (subject, *(cls for cls in type(subject).__mro__ if is_users_code(cls))):
        for name, value in sorted(getattr(holder, "__dict__", {}).items()):
            if not name.startswith("__") and name not in ignored:
                files.look_at(value)
    return files


def _remarks(contents: Any, identity: Identity, files: DataFiles) -> tuple[list[str], list[str]]:
    """Return remarks on what identifies the data, and warnings if that is too little."""
    parts = [contents.remark] if contents is not None else []
    if identity.nbytes:
        parts.append(f"{size(identity.nbytes)} in attributes and globals")
    if files.names:
        parts.append(f"files of attributes: {', '.join(files.names[:5])}" + (" ..." if len(files.names) > 5 else ""))
    remark = f"data that distinguish runs: {'; '.join(parts) or 'none, only the code that loads them'}"
    return [remark], [contents.warning] if contents is not None and contents.warning else []


def described_by(environment: Environment, identity: Mapping[str, str], *, sharing: bool) -> dict[str, str]:
    """Return the description of a workload.

    Args:
        identity: the identity of the trainable's code and attributes.
        sharing: whether trials share equal beginnings.
    """
    described = {**identity, "sharing": "on" if sharing else "off"}
    return described | {f"environment:{name}": text for name, text in environment.described.items()}


def is_open(described: Mapping[str, str]) -> bool:
    """Return whether a workload's description leaves the choice of a step backend to the search."""
    return described.get(NUMERICS) == AUTO


def candidates(described: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return a workload's description with each step backend that the workers have, by the backend's name.
    ``described`` leaves that choice open (:func:`is_open`)."""
    common = {name: text for name, text in described.items() if not name.startswith(_CHOICE)}
    found: dict[str, dict[str, str]] = {}
    for name, text in described.items():
        if name.startswith(_CHOICE):
            backend, _, key = name.removeprefix(_CHOICE).partition(" ")
            found.setdefault(backend, dict(common))[f"environment:{key}"] = text
    return found
