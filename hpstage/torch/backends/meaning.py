"""Comparison of a numerics class with eager training: the first steps are trained both ways.

Two numerics classes round differently and agree otherwise. How large a difference rounding may cause is measured: the
eager step is repeated with other last bits (:mod:`hpstage.torch.backends.rounding`). A larger difference means that
recorded code does something else: a hook is not called, a number is changed in place, or a recorded constant is not
constant.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hpstage.errors import StateError
from hpstage.errors.text import count_of
from hpstage.schedule import Scalar
from hpstage.torch.backends.backend import NotDeparting, StepBackend
from hpstage.torch.backends.rounding import OtherwiseRounded, full_precision
from hpstage.torch.backends.stacked.signature import shape_key
from hpstage.training.identity import accelerators
from hpstage.training.randomness import generators_restored
from hpstage.training.step_log import recording

logger = logging.getLogger("hpstage")

Reached = dict[str, Any]
"""Everything that training can reach after a step, by path: tensors, and descriptions of all other objects."""

STEPS = 2
"""Number of steps compared for each kind of step. Steps that hardly change any weight do not count."""
_TRIES = 16
_IN_A_ROW = 2
"""Number of times that a comparison trains on a batch, since side effects of the first may show in the second."""
_LEAST, _MOST = 1, 16
"""Minimum and maximum number of times that the eager step is repeated with other last bits. A step is refused only
after the maximum."""
_FACTOR = 16.0
"""Allowed difference of a step, as a multiple of the difference that other last bits cause in eager steps."""
_ULPS = 8.0
"""Difference that is always allowed, in units in the last place of the tensor's largest element."""
_SMALL = 100_000
"""Tensors with at most this many elements are compared even if they are not known to have changed."""
_SHARE = 1e-3
"""Maximum share of a step's change that is attributed to rounding hyperparameters to float32, as tensors hold them."""


class Compared(Protocol):
    """The training that is compared, in its state at the beginning of a batch."""

    def snapshot(self) -> object: ...
    def put_back(self, snapshot: Any) -> None: ...
    def contents(self) -> Reached:
        """Return everything that training can reach, with the tensors themselves instead of copies."""

    def update(self, batch: Any, hp: Mapping[str, Scalar] | None = None) -> Any:
        """Train on a batch eagerly, with the hyperparameters ``hp`` or, by default, the present ones."""


class Meaning:
    """Compares steps of one trainable in one process, and remembers which were compared.

    Args:
        who: the trainable's class, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._left: dict[object, tuple[int, int]] = {}  # steps and tries left, by the kind of step
        self._refused = False
        self.compared = 0
        """Number of steps compared."""
        self.closeness = 0.0
        """The largest difference so far, relative to the allowed one."""

    def is_due(self, hp: Mapping[str, Scalar], batch: Any) -> bool:
        """Return whether to compare this step: it is one of the first with these shapes of batches and these values of
        hyperparameters other than floats."""
        return all(self._left.get(_kind(hp, batch), (STEPS, _TRIES)))

    def summary(self, numerics: str, *, departs: bool) -> str:
        if not departs:
            return f"{numerics}: this code cannot be recorded, and is trained by update() itself."
        if self._refused:
            return ""
        if not self.compared:
            return f"{numerics}: no step could be compared with an eager one."
        return (
            f"{numerics}: {count_of(self.compared, 'step')} compared with eager ones; the largest difference is "
            f"{self.closeness:.1%} of what is allowed for rounding."
        )

    def compare(
        self,
        of: Compared,
        backend: StepBackend,
        hp: Mapping[str, Scalar],
        batch: Any,
        train: Callable[[Any], Any],
        numerics: str,
    ) -> None:
        """Train on a batch by ``train`` and eagerly, compare the results, and undo both.

        Raises:
            StateError: the results differ by more than rounding explains.
        """
        kind, known, steps = _kind(hp, batch), backend.state(), _UndoneSteps(of, hp, batch)
        left, tries = self._left.get(kind, (STEPS, _TRIES))
        self._left[kind] = left, tries - 1
        try:
            backend.comparing = True
            with _unlogged():
                apart = _how_far_apart(steps, backend, train)
        except (MemoryError, torch.OutOfMemoryError):
            logger.warning("There is no memory to compare a step of %s with an eager one.", self._who)
            return
        finally:
            backend.comparing = backend.as_recorded = False
            steps.undo()
            backend.load(known)
        if apart is None or not apart.rounded:
            return  # the code fails: at once, or whenever a value has another last bit
        if apart.differs:
            self._refused = True
            raise StateError(self._message(apart, numerics))
        self.compared += 1
        self.closeness = max(self.closeness, apart.closeness)
        if apart.moved:
            self._left[kind] = left - 1, tries

    def _message(self, apart: _Apart, numerics: str) -> str:
        path, found, expected, allowed = apart.worst()
        return (
            f"numerics = {numerics!r} does not train {self._who} as its code says: after {_IN_A_ROW} steps from the "
            f"same state {path} is {found}, and {expected} by update() itself{allowed}. Some code has a different "
            f"effect, or none, in a recorded step: a hook of torch's, a change to a Python object, a number changed in "
            f"place, or a value read in Python. Give numerics = 'eager', or write that code as operations on tensors"
        )


class _UndoneSteps:
    """Takes steps on one batch from the present state of training, and undoes each of them."""

    def __init__(self, of: Compared, hp: Mapping[str, Scalar], batch: Any) -> None:
        self._of = of
        self._hp = hp
        self._batch = batch
        self._begin = of.snapshot()
        self.eager = of.update

    def undo(self) -> None:
        self._of.put_back(self._begin)

    def after(self, step: Callable[[Any], Any]) -> tuple[Reached, bool]:
        """Return what a step changes, and whether it draws random numbers."""
        try:
            with generators_restored():
                marks, stream = {path: _mark(value) for path, value in self._of.contents().items()}, _stream()
                for _ in range(_IN_A_ROW):
                    loss = step(pytree.tree_map_only(Tensor, torch.clone, self._batch))
                now = self._of.contents()
                changed = {path: _kept(value) for path, value in now.items() if marks.get(path) != _mark(value)}
                changed |= dict.fromkeys(marks.keys() - now.keys())
                if isinstance(loss, Tensor | float):
                    changed["the loss"] = torch.as_tensor(loss).detach().sum()
                return changed, not all(map(torch.equal, stream, _stream()))
        finally:
            self.undo()

    def apart(self, expected: Reached, found: Reached) -> _Apart:
        """Compare the changes made by an eager step and by another step, relative to those of eager steps with other
        last bits."""
        apart = _Apart(self._of.contents(), expected, found)
        for seed in range(_LEAST):
            self._allow(apart, OtherwiseRounded(seed))
        if apart.differs:
            rounded = {name: float(np.float32(value)) for name, value in self._hp.items() if type(value) is float}
            self._allow(apart, hp={**self._hp, **rounded}, most=_SHARE)
        if apart.differs:
            with full_precision():
                self._allow(apart)
        for seed in range(_LEAST, _MOST):
            if apart.differs:
                self._allow(apart, OtherwiseRounded(seed))
        return apart

    def _allow(
        self,
        apart: _Apart,
        other: AbstractContextManager[object] | None = None,
        *,
        hp: Mapping[str, Scalar] | None = None,
        most: float = math.inf,
    ) -> None:
        """Train an eager step with other last bits, and allow for its difference. It may fail, if code depends on such
        bits."""

        def step(batch: Any) -> Any:
            with other or nullcontext():
                return self._of.update(batch, self._hp if hp is None else hp)

        with contextlib.suppress(Exception):
            apart.allow(self.after(step)[0], most)


def _how_far_apart(steps: _UndoneSteps, backend: StepBackend, train: Callable[[Any], Any]) -> _Apart | None:
    """Return the comparison of a step by ``train`` with an eager step; ``None`` if ``train`` fails, or if the eager
    loss is not finite."""
    try:
        found, _ = steps.after(train)
    except (Exception, NotDeparting):
        return None  # the step is trained as it is, or fails again in training
    expected, draws = steps.after(steps.eager)
    if draws and backend.draws_otherwise:
        backend.as_recorded = True
        found, _ = steps.after(train)
    loss = expected.get("the loss")
    return steps.apart(expected, found) if loss is None or bool(torch.isfinite(loss).all()) else None


class _Apart:
    """Compares the results of two ways of training, and decides how far apart they may be.

    Args:
        start: contents before the step.
        expected, found: the changes made by the eager step, and by the other one.
    """

    def __init__(self, start: Reached, expected: Reached, found: Reached) -> None:
        self._start, self._expected, self._found = start, expected, found
        self._spread: dict[str, float] = {}
        self.rounded = 0
        """Number of eager steps with other last bits recorded by :meth:`allow`."""
        self._scales: dict[str, float] = {}
        for path, value in expected.items():
            name = path.partition(" of ")[0]
            self._scales[name] = max(self._scales.get(name, 0.0), _scale(value))
        self._distances = {path: self._distance(path, found) for path in expected.keys() | found.keys()}

    def _distance(self, path: str, other: Reached) -> float:
        """Return the maximum difference of a value from the expected one; for objects other than tensors, 0 or
        infinity."""
        one, two = (of[path] if path in of else self._start.get(path) for of in (self._expected, other))
        if path.endswith(".grad") and (one is None or two is None):
            return 0.0  # a numerics class may leave gradients behind or not
        if path.startswith(_OF_OPTIMIZER):  # an entry that does not exist yet is zero
            one, two = (other if value is None else value for value, other in ((one, _zeros(two)), (two, _zeros(one))))
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            return _distance(one, two)
        return 0.0 if one == two else math.inf

    def allow(self, rounded: Reached, most: float) -> None:
        """Record an eager step with other last bits.

        Args:
            most: maximum share of the step's change that is allowed for.
        """
        self.rounded += 1
        for path in self._distances:
            spread = self._distance(path, rounded)
            if most < math.inf:
                change = self._distance(path, self._start)
                spread = min(spread, most * (change if change < math.inf else _scale(self._expected.get(path))))
            self._spread[path] = max(self._spread.get(path, 0.0), spread)

    def _allowed(self, path: str) -> float:
        value = self._expected.get(path)
        floor = 0.0
        if isinstance(value, Tensor) and value.is_floating_point():
            floor = _ULPS * torch.finfo(value.dtype).eps * self._scales[path.partition(" of ")[0]]
        return floor + _FACTOR * self._spread.get(path, 0.0)

    @property
    def differs(self) -> bool:
        return any(not distance <= self._allowed(path) for path, distance in self._distances.items())

    @property
    def moved(self) -> bool:
        """Whether the eager step has changed the model by more than rounding does."""
        return any(
            path.startswith("model") and self._distance(path, self._start) > self._allowed(path)
            for path in self._expected
        )

    @property
    def closeness(self) -> float:
        return max(
            (
                d / self._allowed(path)
                for path, d in self._distances.items()
                if 0 < d < math.inf and self._allowed(path)
            ),
            default=0.0,
        )

    def worst(self) -> tuple[str, str, str, str]:
        """Return the path of the largest difference, both values, and the permitted difference."""
        wrong = [path for path, distance in self._distances.items() if not distance <= self._allowed(path)]
        path = max(wrong, key=lambda path: (self._distances[path] / max(self._allowed(path), 1e-300), path))
        one, two = (of[path] if path in of else self._start.get(path) for of in (self._expected, self._found))
        allowed = ""
        if isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape == two.shape:
            at = int((one.double() - two.double()).abs().nan_to_num(math.inf).argmax()) if one.numel() else 0
            where = "" if one.numel() == 1 else f"[{', '.join(map(str, np.unravel_index(at, one.shape)))}]"
            allowed = f" ({self._distances[path]:.3g} apart; rounding accounts for {self._allowed(path):.2g})"
            here, there = (f"{float(value.reshape(-1)[at]):.6g}" for value in (two, one))
            return path + where, here, there, allowed
        return path, _shown(two), _shown(one), allowed


_OF_OPTIMIZER = "optimizer's "


def _kind(hp: Mapping[str, Scalar], batch: Any) -> object:
    return tuple((name, value) for name, value in hp.items() if type(value) is not float), shape_key(batch)


def _mark(value: Any) -> object:
    """Return a mark that changes with the value. (Batch normalisation changes buffers without counting up their
    versions.)"""
    if isinstance(value, Tensor):
        return object() if value.numel() <= _SMALL else (id(value), value._version)
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _kept(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value.copy()) if value.dtype.kind in "fiub" else repr(value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else None


def _distance(one: Tensor, two: Tensor) -> float:
    if one.shape != two.shape or one.dtype != two.dtype:
        return math.inf
    if one.is_complex():
        one, two = torch.view_as_real(one), torch.view_as_real(two)
    if one.layout is not torch.strided:
        one, two = one.to_dense(), two.to_dense()
    one, two = one.detach().double(), two.detach().double()
    same = (one == two) | (one.isnan() & two.isnan())
    apart = torch.where(same, 0.0, (one - two).abs())
    return float(apart.nan_to_num(math.inf).max()) if apart.numel() else 0.0


def _scale(value: Any) -> float:
    if (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or not value.numel()
        or value.layout is not torch.strided
    ):
        return 0.0
    return float(value.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return "absent" if value is None else str(value)


def _stream() -> list[Tensor]:
    return [torch.get_rng_state(), *chain.from_iterable(accelerators.states().values())]


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Suppress logs and outputs, since the steps trained here belong to no trial."""
    with (
        recording(None),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
