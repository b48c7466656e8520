"""``environment=``: which workers may train a plan if their devices, and thus the bits of their results, differ.

By default all workers must have equal devices. ``"any"`` permits different devices; any other text (``"A100"``) selects
the workers whose device has it in its name. Without ``environment=``, a plan that was trained before selects the
devices that it was trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpstage.errors import ClusterError

ANY = "any"
_DEVICE = "environment:device"
_DEVICES = ("device", "cuda", "isa", "blas", "simd", "mkldnn", "system", "jax device", "jax threads")
"""Entries of an environment's description that concern devices and their libraries."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices on which a plan may be trained: all of one kind (``text`` is empty), any (``"any"``), or those with
    ``text`` in their name.

    Environments are described as by :attr:`hpstage.executor.Environment.described`.
    """

    text: str = ""
    why: str = "given as environment="
    remedy: str = "pass another environment="

    @property
    def is_any(self) -> bool:
        return self.text == ANY

    def seen(self, described: dict[str, str]) -> dict[str, str]:
        """Return the description that is compared and hashed. If any device may train, it does not contain the kind of
        device, but still whether it is a CPU or a GPU."""
        if not self.is_any:
            return described
        found = {name: ANY if name in _DEVICES else text for name, text in described.items()}
        return found | {"device": f"{_device(described).partition(' ')[0]} ({ANY})"}

    def excludes(self, described: Mapping[str, str]) -> str | None:
        """Return why the described device is excluded; ``None`` if it is not."""
        device = _device(described)
        if not self.text or self.is_any or self.text.casefold() in device.casefold():
            return None
        return f"its device is {device!r}, and not {self.text!r} ({self.why})"

    def check(self, environments: Iterable[Mapping[str, str]]) -> None:
        """Raise :class:`ClusterError` if none of the environments has such a device."""
        found = list(environments)
        if found and all(self.excludes(described) for described in found):
            there = ", ".join(sorted({repr(_device(described)) for described in found}))
            raise ClusterError(
                f"no worker has a device whose name contains {self.text!r} ({self.why}); the devices are {there}. "
                f"Start workers with such a device, or {self.remedy}"
            )


def devices_of(given: str | None, workload: Mapping[str, str] | None) -> Devices:
    """Return the devices of a call: those ``given`` as ``environment=``, or else those of the store's workload.

    Args:
        workload: the description of the workload in the store, if there is one.
    """
    if given is not None:
        return Devices(given)
    workload = workload or {}
    text = ANY if are_any(workload) else workload.get(_DEVICE, "")
    return Devices(text, "the states in the store were trained on it", "choose another store or environment=")


def are_any(workload: Mapping[str, str]) -> bool:
    """Return whether the described workload may be trained on any device."""
    return workload.get(_DEVICE, "").endswith(f" ({ANY})")


def _device(described: Mapping[str, str]) -> str:
    return described.get("device", "cpu")
