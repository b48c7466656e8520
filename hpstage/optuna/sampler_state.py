"""Saving and restoring the state of a sampler, so that a resumed search proposes what it would have proposed without an
interruption.

Optuna's samplers hold NumPy ``RandomState`` objects, wrapped in ``LazyRandomState``, and so do the samplers and
strategies they consist of; ``GPSampler`` also holds the kernels that it fitted last. Everything else that decides a
proposal is in the study's storage. For samplers that are not Optuna's, random generators of any kind, numbers that
change and samplers are saved, also in lists and dicts. Strings are never written: they may be secret. If anything else
changes, a warning names it once.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import msgspec
import numpy as np
import optuna
from optuna.samplers import BaseSampler

from hpstage.errors import StoreError
from hpstage.optuna import private
from hpstage.plan.facts import RandomState

logger = logging.getLogger("hpstage")

_NUMBERS = (bool, int, float)
# Maximum number of a sampler's attributes that are inspected at each proposal, and of levels of nesting.
_MOST, _DEEPEST = 256, 8
_SMALL = 1 << 16
_STATELESS = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)


@dataclass(slots=True)
class _Parts:
    """The parts of a sampler, by paths such as ``base_sampler._rng``."""

    generators: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, tuple[Any, Any, bool | int | float]] = field(default_factory=dict)
    """For each number: its holder, its name there, and its value."""
    kernels: dict[str, BaseSampler] = field(default_factory=dict)
    """Samplers that fit kernels."""
    others: dict[str, object] = field(default_factory=dict)
    """Fingerprints of attributes that cannot be saved, to notice their changes as far as that is cheap."""
    large: set[int] = field(default_factory=set)
    """Ids of objects whose content is not inspected, since it is too large or cannot be pickled."""
    _seen: set[int] = field(default_factory=set)

    def add(self, path: str, holder: Any, name: Any, value: object, own: bool, depth: int) -> None:
        """Add an attribute or item of a sampler. ``own``: whether the sampler is neither Optuna's nor hpstage's."""
        if type(value).__name__ == "LazyRandomState":
            value = value.rng  # type: ignore[attr-defined]
        if own and type(value) in _NUMBERS and not isinstance(holder, tuple):
            self.numbers[path] = holder, name, value  # type: ignore[assignment]
        elif isinstance(value, np.random.Generator) or type(value) in (np.random.RandomState, random.Random):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.generators[path] = value
        elif _is_sampler(value):
            self.add_all(value, f"{path}.", depth + 1)
        elif isinstance(value, list | tuple | dict | deque):
            self._add_items(path, value, own, depth)
        elif own and not (isinstance(value, _STATELESS) or _home(value).startswith("optuna.")):
            self.others[path] = self._glance(value)

    def add_all(self, owner: object, path: str = "", depth: int = 0) -> None:
        if id(owner) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(owner))
        own = not _home(owner).startswith(("optuna.", "hpstage."))
        if isinstance(owner, optuna.samplers.GPSampler):
            self.kernels[f"{path}kernels"] = owner
        for name, value in sorted(_fields(owner).items()):
            self.add(f"{path}{name}", owner, name, value, own, depth)

    def _add_items(self, path: str, value: Any, own: bool, depth: int) -> None:
        if own:
            self.others[path] = len(value) if not isinstance(value, tuple) else self._glance(value)
        if id(value) in self._seen or depth >= _DEEPEST or len(self._seen) + len(value) > _MOST:
            return
        self._seen.add(id(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            self.add(f"{path}[{key!r}]", value, key, item, own, depth + 1)

    def _glance(self, value: object) -> object:
        """Return a fingerprint that changes if the value is replaced or grows, or if the value is small and its content
        changes."""
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, Iterator):
            return object()  # it changes whenever it is used
        if isinstance(value, tuple):
            return value if all(type(item) in _NUMBERS for item in value) else (id(value), len(value))
        if isinstance(value, np.ndarray) and value.nbytes <= _SMALL:
            return value.tobytes()
        if id(value) not in self.large:
            content = _Content()
            try:
                _Pickler(content).dump(value)
                return content.written
            except Exception:  # pickling a user's object may raise anything
                self.large.add(id(value))
        return id(value), len(value) if isinstance(value, Sized) else 0


class _Content:
    """A file in memory that raises ``ValueError`` rather than become large."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, more: Any) -> None:
        if len(self.written) + len(more) > _SMALL:
            raise ValueError("too large")
        self.written += more


class _Pickler(pickle.Pickler):
    """A pickler that omits the content of Optuna's own objects, such as a study and its trials, except samplers."""

    def persistent_id(self, value: object) -> int | None:
        return id(value) if _home(value).startswith("optuna.") and not _is_sampler(value) else None


def _fields(owner: object) -> dict[str, Any]:
    """Return the attributes of an object, those in slots as well."""
    slots = [
        name for kind in type(owner).__mro__ for name, of in vars(kind).items() if type(of) is MemberDescriptorType
    ]
    return {name: getattr(owner, name) for name in slots if hasattr(owner, name)} | getattr(owner, "__dict__", {})


def _is_sampler(value: object) -> bool:
    return _home(value).startswith("optuna.samplers") or isinstance(value, BaseSampler)


def _home(value: object) -> str:
    return type(value).__module__


def _parts_of(sampler: BaseSampler, large: set[int]) -> _Parts:
    parts = _Parts(large=large)
    parts.add_all(sampler)
    return parts


class SamplerState:
    """The state of one sampler. Remembers the last recorded states, to record only changes.

    The state is recorded after a proposal, and after the end of a trial. If a process is killed after a trial has ended
    in the study and before this is recorded, changes of the sampler at that end are lost.
    """

    def __init__(self, sampler: BaseSampler) -> None:
        self._sampler = sampler
        self._large: set[int] = set()
        self._unchanged: dict[str, RandomState] = {}
        parts = _parts_of(sampler, self._large)
        # Numbers that never change are settings, which the resuming process sets itself.
        self._last = {path: json.dumps(number) for path, (_, _, number) in parts.numbers.items()}
        self._last |= dict.fromkeys(parts.kernels, "{}")
        self._others: dict[str, object] | None = parts.others
        self._kept = parts.numbers.keys() | parts.generators.keys()

    @property
    def may_change_between(self) -> bool:
        """Whether the state may change other than by proposals. This is false only for an Optuna sampler that does
        nothing at the end of a trial; callbacks may change samplers that are not Optuna's."""
        at_end = getattr(self._sampler.after_trial, "__func__", None)
        return at_end is not BaseSampler.after_trial or not _home(self._sampler).startswith("optuna.")

    def take(self) -> dict[str, RandomState | str]:
        """Return the changes of the state since the last call. Each NumPy ``RandomState`` takes about 70 bytes, plus
        3.4 kB whenever its key has changed; other generators and numbers are JSON. Warn once about attributes that
        change and are not saved."""
        states: dict[str, RandomState | str] = {}
        parts = _parts_of(self._sampler, self._large)
        for path, rng in parts.generators.items():
            state = _state_of(rng)
            if isinstance(state, str):
                if self._last.get(path) != state:
                    self._last[path] = states[path] = state
                continue
            key = base64.b64encode(np.asarray(state["state"]["key"], "<u4").tobytes()).decode()
            known = self._last.get(path) == key
            self._last[path] = key
            now = RandomState(
                pos=int(state["state"]["pos"]),
                has_gauss=int(state["has_gauss"]),
                gauss=float(state["gauss"]),
                key=None if known else key,
            )
            if self._unchanged.get(path) != now:
                states[path] = now
            self._unchanged[path] = msgspec.structs.replace(now, key=None)
        written_out = {path: json.dumps(number) for path, (_, _, number) in parts.numbers.items()}
        written_out |= {path: json.dumps(private.kernels_of(sampler)) for path, sampler in parts.kernels.items()}
        for path, written in written_out.items():
            if self._last.get(path) != written:
                self._last[path] = states[path] = written
        self._look(parts)
        return states

    def _look(self, parts: _Parts) -> None:
        if self._others is None:
            return
        changed = {path for path in self._others if parts.others.get(path) != self._others[path]}
        changed |= parts.others.keys() - self._others.keys()
        changed |= self._kept ^ (parts.numbers.keys() | parts.generators.keys())
        if changed:
            self._others = None
            logger.warning(
                "%s changes %s, which the plan does not keep: if this search is interrupted, a new process may make "
                "other proposals. Random generators, numbers and samplers are kept, also in lists and dicts of "
                "constant length",
                type(self._sampler).__name__,
                ", ".join(sorted(changed)),
            )

    def put(self, recorded: Iterable[dict[str, RandomState | str]]) -> None:
        """Restore the last of the recorded states. All of them are needed, since what is unchanged is omitted."""
        latest: dict[str, RandomState | str] = {}
        for states in recorded:
            for path, state in states.items():
                latest[path] = state
                if not isinstance(state, RandomState):
                    self._last[path] = state
                elif state.key is not None:
                    self._last[path] = state.key
        parts = _parts_of(self._sampler, self._large)
        for path, state in latest.items():
            try:
                if path in parts.numbers and isinstance(state, str):
                    _set(*parts.numbers[path], json.loads(state))
                elif path in parts.kernels and isinstance(state, str):
                    private.set_kernels(parts.kernels[path], json.loads(state))
                elif path in parts.generators:
                    self._restore(path, parts.generators[path], state)
            except (ValueError, TypeError, KeyError) as error:
                raise StoreError(
                    f"the recorded state of the sampler's {path} is damaged; choose another store"
                ) from error

    def _restore(self, path: str, rng: Any, state: RandomState | str) -> None:
        if isinstance(state, str):
            content = json.loads(state, object_hook=_array)
            if isinstance(rng, random.Random):
                version, inner, gauss = content
                rng.setstate((version, tuple(inner), gauss))
            elif isinstance(rng, np.random.RandomState):
                rng.set_state(content)
            else:
                rng.bit_generator.state = content
            return
        key = np.frombuffer(base64.b64decode(self._last[path]), "<u4")
        if len(key) != 624 or not isinstance(rng, np.random.RandomState):
            raise ValueError(path)
        inner = {"key": key, "pos": state.pos}
        rng.set_state({"bit_generator": "MT19937", "state": inner, "has_gauss": state.has_gauss, "gauss": state.gauss})


def _state_of(rng: Any) -> dict[str, Any] | str:
    """Return the state of a ``RandomState`` on MT19937 as a dict, and that of any other generator as JSON."""
    state: Any
    if isinstance(rng, random.Random):
        state = rng.getstate()
    elif isinstance(rng, np.random.RandomState):
        state = rng.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            return state  # type: ignore[no-any-return]
    else:
        state = rng.bit_generator.state
    return json.dumps(state, default=lambda array: {"array": array.tolist(), "of": str(array.dtype)})


def _array(content: dict[str, Any]) -> Any:
    return np.array(content["array"], content["of"]) if content.keys() == {"array", "of"} else content


def _set(holder: Any, name: Any, now: object, value: object) -> None:
    if value == now:
        return
    if isinstance(holder, list | dict | deque):
        holder[name] = value
    elif name in vars(holder):
        vars(holder)[name] = value  # a property of that name may be read-only
    else:
        setattr(holder, name, value)  # in a slot
