"""The description of a workload, from which its key is hashed: its identity (``code_identity.py``), and the environment
that trains it (``environment.py``). :func:`hpstage.plan.keys.workload_key` hashes it."""

from __future__ import annotations

from collections.abc import Mapping

from hpstage.executor import Environment
from hpstage.plan.same_workload import NUMERICS

AUTO = "auto"
_CHOICE = f"environment:{AUTO} "


def described_by(environment: Environment, identity: Mapping[str, str], *, sharing: bool) -> dict[str, str]:
    """Return the description of a workload.

    Args:
        identity: of the trainable's code and attributes.
        sharing: whether trials share equal beginnings.
    """
    described = {**identity, "sharing": "on" if sharing else "off"}
    return described | {f"environment:{name}": text for name, text in environment.described.items()}


def is_open(described: Mapping[str, str]) -> bool:
    """Return whether a workload's description leaves the choice of a step backend to the search."""
    return described.get(NUMERICS) == AUTO


def candidates(described: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return a workload's description under each step backend that the workers have, by the backend's name. The given
    description leaves that choice open (:func:`is_open`)."""
    common = {name: text for name, text in described.items() if not name.startswith(_CHOICE)}
    found: dict[str, dict[str, str]] = {}
    for name, text in described.items():
        if name.startswith(_CHOICE):
            backend, _, key = name.removeprefix(_CHOICE).partition(" ")
            found.setdefault(backend, dict(common))[f"environment:{key}"] = text
    return found
