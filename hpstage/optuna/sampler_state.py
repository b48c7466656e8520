"""Saving and restoring what a sampler proposes by, so that a resumed search proposes what it would have proposed.

Optuna's samplers hold NumPy ``RandomState`` objects, wrapped in ``LazyRandomState``, and so do the samplers and
strategies they consist of. Everything else that determines a proposal is in the study's storage. Samplers of others
hold any random generator, counters, and samplers, also in lists and dicts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import pickle
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna

from hpstage.errors import StoreError
from hpstage.plan.facts import RandomState

logger = logging.getLogger("hpstage")

_GENERATORS = (np.random.RandomState, np.random.Generator, random.Random)
_SCALARS = (bool, int, float, str, type(None))
# After so many proposals it is known which attributes change.
_LOOKS = 20
# What a list or dict of a sampler may have at most, to be looked through at each proposal: a grid's points are more.
_ITEMS = 64


@dataclass(slots=True)
class _Parts:
    """What a sampler consists of, by paths such as ``base_sampler._rng``."""

    generators: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # what holds each, and its name there
    others: dict[str, object] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def add(self, path: str, holder: Any, name: Any, value: object, *, own: bool) -> None:
        """``own``: the attribute of a sampler that is none of Optuna's or hpstage's."""
        if type(value).__name__ == "LazyRandomState":
            value = value.rng  # type: ignore[attr-defined]
        if own and isinstance(value, _SCALARS):
            if not isinstance(holder, tuple):
                self.scalars[path] = holder, name
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, _GENERATORS):
            self.generators[path] = value
        elif isinstance(value, list | tuple | dict) and len(value) <= _ITEMS:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self.add(f"{path}[{key!r}]", value, key, item, own=own)
        elif _is_sampler(value):
            self.add_all(value, f"{path}.")
        elif own and not callable(value):
            self.others[path] = value

    def add_all(self, owner: object, path: str = "") -> None:
        self._seen.add(id(owner))
        own = not _home(owner).startswith(("optuna.", "hpstage."))
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            self.add(f"{path}{name}", owner, name, value, own=own)


def _is_sampler(value: object) -> bool:
    return _home(value).startswith("optuna.samplers") or isinstance(value, optuna.samplers.BaseSampler)


def _home(value: object) -> str:
    return type(value).__module__


def _parts_of(sampler: optuna.samplers.BaseSampler) -> _Parts:
    parts = _Parts()
    parts.add_all(sampler)
    return parts


class SamplerState:
    """The state of one sampler. Remembers the last recorded states, to omit unchanged keys."""

    def __init__(self, sampler: optuna.samplers.BaseSampler) -> None:
        self._sampler = sampler
        self._last: dict[str, str] = {}
        self._looks = 0
        self._began = _digests(_parts_of(sampler).others)

    def take(self) -> dict[str, RandomState | str]:
        """Return the current state: of each of Optuna's generators about 70 bytes, plus 3.4 kB whenever it has turned
        over; of other generators and scalars, JSON. Warn once of what changes and cannot be kept."""
        states: dict[str, RandomState | str] = {}
        parts = _parts_of(self._sampler)
        for path, rng in parts.generators.items():
            if not isinstance(rng, np.random.RandomState):
                states[path] = _written(rng)
                continue
            state = rng.get_state(legacy=False)
            assert isinstance(state, dict)
            key = base64.b64encode(np.asarray(state["state"]["key"], "<u4").tobytes()).decode()
            known = self._last.get(path) == key
            self._last[path] = key
            states[path] = RandomState(
                pos=int(state["state"]["pos"]),
                has_gauss=int(state["has_gauss"]),
                gauss=float(state["gauss"]),
                key=None if known else key,
            )
        for path, place in parts.scalars.items():
            written = json.dumps(_get(*place))
            if self._last.get(path) != written:
                self._last[path] = states[path] = written
        self._look(parts)
        return states

    def _look(self, parts: _Parts) -> None:
        self._looks += 1
        if not self._began or self._looks > _LOOKS:
            return
        now = _digests(parts.others)
        changed = sorted(path for path, digest in self._began.items() if now.get(path) != digest)
        if changed:
            self._began = {}
            logger.warning(
                "%s changes %s, which the plan does not keep: if this search is interrupted, a new process goes on "
                "with other proposals. Random generators, numbers and strings are kept, and so are samplers",
                type(self._sampler).__name__,
                ", ".join(changed),
            )

    def put(self, recorded: Iterable[dict[str, RandomState | str]]) -> None:
        """Restore the last of the recorded states. All of them are needed, since unchanged keys are omitted."""
        latest: dict[str, RandomState | str] = {}
        for states in recorded:
            for path, state in states.items():
                latest[path] = state
                if not isinstance(state, RandomState):
                    self._last[path] = state
                elif state.key is not None:
                    self._last[path] = state.key
        parts = _parts_of(self._sampler)
        for path, state in latest.items():
            try:
                if path in parts.scalars and isinstance(state, str):
                    _set(*parts.scalars[path], json.loads(state))
                elif path in parts.generators:
                    self._restore(path, parts.generators[path], state)
            except (ValueError, TypeError, KeyError) as error:
                raise StoreError(
                    f"the recorded state of the sampler's {path} is damaged; choose another store"
                ) from error

    def _restore(self, path: str, rng: Any, state: RandomState | str) -> None:
        if isinstance(state, str):
            _read(rng, state)
            return
        key = np.frombuffer(base64.b64decode(self._last[path]), "<u4")
        if len(key) != 624 or not isinstance(rng, np.random.RandomState):
            raise ValueError(path)
        inner = {"key": key, "pos": state.pos}
        rng.set_state({"bit_generator": "MT19937", "state": inner, "has_gauss": state.has_gauss, "gauss": state.gauss})


def _digests(others: dict[str, object]) -> dict[str, str]:
    """Return a digest of each value, as far as they can be pickled."""
    found = {}
    for path, value in others.items():
        try:
            found[path] = hashlib.sha256(pickle.dumps(value)).hexdigest()
        except Exception:  # whatever the user's own sampler holds
            logger.debug("%s of the sampler cannot be looked at", path, exc_info=True)
    return found


def _get(holder: Any, name: Any) -> Any:
    return holder[name] if isinstance(holder, list | dict) else getattr(holder, name)


def _set(holder: Any, name: Any, value: object) -> None:
    if isinstance(holder, list | dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _written(rng: np.random.Generator | random.Random) -> str:
    state = rng.getstate() if isinstance(rng, random.Random) else rng.bit_generator.state
    return json.dumps(state, default=lambda array: {"array": array.tolist(), "of": str(array.dtype)})


def _read(rng: Any, state: str) -> None:
    content = json.loads(state, object_hook=_array)
    if isinstance(rng, random.Random):
        version, inner, gauss = content
        rng.setstate((version, tuple(inner), gauss))
    else:
        rng.bit_generator.state = content


def _array(content: dict[str, Any]) -> Any:
    return np.array(content["array"], content["of"]) if content.keys() == {"array", "of"} else content
