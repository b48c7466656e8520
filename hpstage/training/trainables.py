"""as_trainable: finds the adapter of the object that a user passes. The base class of adapters: ``adapter.py``."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from hpstage.checkpoints.state_tree import clone
from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.store import plugins
from hpstage.trainable import METHODS, Trainable
from hpstage.training.adapter import Adapter, is_subjects, optimizers_in, stateless_of
from hpstage.training.borrowed import Borrowed
from hpstage.training.capture.unwatched import world_of
from hpstage.training.changes import Changes
from hpstage.training.function import FunctionTrainable
from hpstage.training.randomness import Purpose, has_torch, rekey, seed_of


def as_trainable(obj: object) -> Trainable:
    """Return the Trainable that trains ``obj``, with ``obj`` as its ``subject``. An :class:`Adapter` is returned as is.

    ``obj`` is a :class:`~hpstage.torch.TorchTrainable`, a :class:`~hpstage.torch.lightning.LightningTrainable`, an
    object of a class that a plugin adapts (entry points ``hpstage.trainables``), an object with the five methods of
    :class:`Trainable`, or a function of one argument (:mod:`hpstage.training.function`). Raises :class:`UsageError` for
    anything else.
    """
    if isinstance(obj, type):
        raise UsageError(f"{obj.__name__} is a class: pass an instance of it, {obj.__name__}(...)")
    if isinstance(obj, Adapter):
        return obj
    adapt = _adapter_of(type(obj))
    if adapt is not None:
        return adapt(obj)
    _check_settings(obj)
    missing = [name for name in METHODS if not callable(getattr(obj, name, None))]
    if not missing:
        return Keyed(obj)  # type: ignore[arg-type]
    kind = type(obj).__name__
    if len(missing) < len(METHODS):
        raise UsageError(f"this {kind} cannot be trained: it has no {' and no '.join(missing)}")
    if not callable(obj):
        raise UsageError(
            f"{kind} cannot be trained: pass a hpstage.torch.TorchTrainable, a function of one argument (run), or an "
            f"object with {', '.join(METHODS)}"
        )
    if not _takes_one_argument(obj):
        name = getattr(obj, "__qualname__", kind)
        raise UsageError(f"{name}{inspect.signature(obj)} cannot be trained: it must take one argument, the run")
    return FunctionTrainable(obj)


def _adapter_of(kind: type) -> Callable[[object], Adapter] | None:
    """Return the function that adapts objects of a class: that of the first class in its method resolution order which
    has one. So an adapter is loaded only for an object that needs it."""
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _OWN:
            module, _, function = _OWN[name].partition(":")
            return cast("Callable[[object], Adapter]", getattr(importlib.import_module(module), function))
        if name in _registered():
            return plugins.opener("hpstage.trainables", name, Adapter)  # type: ignore[type-abstract]
    return None


_OWN = {
    "hpstage.torch.lightning.trainable.LightningTrainable": "hpstage.torch.lightning.loop:LightningLoop",
    "hpstage.torch.trainable.TorchTrainable": "hpstage.torch.loops:loop_of",
}
"""The adapters of hpstage's own classes, in the form of entry points."""


@functools.cache  # it searches all installed distributions
def _registered() -> frozenset[str]:
    return frozenset(plugins.registered("hpstage.trainables"))


def _check_settings(obj: object) -> None:
    """Refuse settings of a TorchTrainable on any other object, whose own loop would ignore them."""
    numerics, nodes = getattr(obj, "numerics", "eager"), getattr(obj, "virtual_nodes", 1)
    if numerics in ("auto", *set(plugins.names("hpstage.step_backends")) - {"eager"}):
        setting = f"numerics = {numerics!r}"
    elif type(nodes) is int and nodes != 1:
        setting = f"virtual_nodes = {nodes}"
    else:
        return
    raise UsageError(
        f"{type(obj).__name__} has {setting}, which only a hpstage.torch.TorchTrainable can have: other trainables "
        f"compute their steps themselves"
    )


def _takes_one_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True  # written in C, with unknown signature
    return True


class Keyed(Adapter):
    """A user's own Trainable with the global generators keyed before each call that may use them.

    Its state is the result of ``state_dict()``; everything else that training can reach is restored before each setup.
    """

    answers_for_state = True
    """Whether ``state_dict()`` decides which attributes are state: those that it leaves out are not."""

    def __init__(self, subject: Trainable) -> None:
        self.subject: Trainable = subject
        self._user = subject
        self._borrowed = Borrowed(subject, self)
        self._world = world_of(stateless_of(subject), lambda: [("self", subject)])
        self._changes = Changes(self._world)
        self.unverified, self.verified = self._changes.unverified, self._changes.verified
        for name in ("synchronize", "announce", "describe_data", "describe_environment"):
            method = getattr(subject, name, None)
            if callable(method):
                setattr(self, name, self._borrowed.within(method) if name.startswith("describe") else method)

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        before = has_torch()
        self._borrowed.take()
        self._set_up(hp)
        if has_torch() != before:
            # setup() has imported torch, and may have used its generators before they were keyed.
            self._set_up(hp)

    def _set_up(self, hp: Mapping[str, Scalar]) -> None:
        self._world.reset()
        rekey(seed_of(hp), 0, Purpose.SETUP)
        self._user.setup(dict(hp))
        self._changes.begin()

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        rekey(seed_of(hp), step)
        self._user.train(step, dict(hp))
        self._changes.trained()

    def evaluate(self) -> Mapping[str, float]:
        rekey(0, 0, Purpose.EVALUATE)
        with self._world.kept(f"{type(self._user).__name__}.evaluate()"):
            return self._user.evaluate()

    def state_dict(self) -> object:
        return self._user.state_dict()

    def load_state_dict(self, state: object) -> None:
        # A copy: the same state may be loaded again, and in-place training would change it.
        self._user.load_state_dict(clone(state))
        self._changes.loaded()

    def optimizers(self) -> list[Any]:
        return optimizers_in(getattr(self._user, "__dict__", {}).values())

    def hand_over(self) -> dict[str, object]:
        self._world.close(but=is_subjects)
        self._borrowed.hand_over()
        return {"trainable": self._user}

    def portrait(self) -> dict[str, str]:
        """Describe everything training can reach; see :meth:`hpstage.training.capture.world.World.portrait`."""
        return self._world.portrait()

    def close(self) -> None:
        close = getattr(self._user, "close", None)
        if callable(close):
            close()
        self._world.close()
        self._borrowed.give_back()
