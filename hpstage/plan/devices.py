"""``environment=``: which workers train a plan where they differ in devices, and thus in bits.

By default all must be equal. ``"any"`` lets them differ in devices; other text (``"A100"``) selects those that have it
in the name of their device. What a plan holds already selects those that can continue it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpstage.errors import ClusterError

ANY = "any"
_DEVICE = "environment:device"
_DEVICES = ("device", "cuda", "isa", "blas", "simd", "mkldnn", "system", "jax device", "jax threads")
"""Names of what describes devices and their libraries in an environment."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices on which a plan is trained: those of one kind (``text`` is empty), any, or those with ``text`` in
    their name.

    Environments are described as by :attr:`hpstage.executor.Environment.described`.
    """

    text: str = ""
    why: str = "environment= names it"

    @property
    def is_any(self) -> bool:
        return self.text == ANY

    def seen(self, described: dict[str, str]) -> dict[str, str]:
        """Return the description that counts: where any device may train, without its kind. CPUs and GPUs remain
        apart."""
        if not self.is_any:
            return described
        found = {name: ANY if name in _DEVICES else text for name, text in described.items()}
        return found | {"device": f"{_device(described).partition(' ')[0]} ({ANY})"}

    def excludes(self, described: Mapping[str, str]) -> str | None:
        """Return why a device is not among them; ``None`` if it is."""
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
                f"no worker has a device named {self.text!r} ({self.why}): there are {there}. Start workers with that "
                f"device, or choose another store or environment="
            )


def devices_of(given: str | None, workload: Mapping[str, str] | None) -> Devices:
    """Return the devices of a call, given what ``environment=`` says, and the description of the workload in the store,
    if there is one."""
    if given is not None:
        return Devices(given)
    workload = workload or {}
    text = ANY if are_any(workload) else workload.get(_DEVICE, "")
    return Devices(text, "what the store holds was trained there")


def are_any(workload: Mapping[str, str]) -> bool:
    """Return whether a workload is trained on any devices, given its description."""
    return workload.get(_DEVICE, "").endswith(f" ({ANY})")


def _device(described: Mapping[str, str]) -> str:
    return described.get("device", "cpu")
