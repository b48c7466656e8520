"""Code shared by the trainables of gradient boosting: data, names of parameters, and rounds as steps."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from hpstage.errors import UsageError
from hpstage.errors.text import AT_FIRST
from hpstage.schedule import Scalar

Data: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""Features and labels, or a dict of arguments of the library's data set: ``data``, ``label``, ``weight``, ..."""


class Rounds(ABC):
    """Trains one boosting round per step. There is a subclass for each library."""

    _library: ClassVar[str]
    _dataset: ClassVar[str]
    """The class of the library for data, as errors name it. Users may give its arguments instead of ``(X, y)``."""
    _arguments: ClassVar[frozenset[str]]
    _changing: ClassVar[frozenset[str]]
    """Parameters that may change between rounds: a round depends only on their present values, not on earlier ones."""
    _whole: ClassVar[tuple[str, ...]]
    """Parameters that are integers, although schedules give floats."""
    _exact: ClassVar[Mapping[str, Any]]
    """Default values of parameters, with which training is deterministic."""
    _only: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]]
    """Parameters for which only some values can be forked (a round depends only on the model and the number of the
    round). For each: these values, and why others cannot."""
    _none: ClassVar[Any]
    """The model before the first round."""

    _booster: Any = None

    def __init__(
        self,
        train: Data,
        valid: Data | Mapping[str, Data] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self._module()
        self.train_data = self._given(train)
        # A "data" that is itself a data set is the name of one among several; else it is the argument of the only one.
        several = isinstance(valid, Mapping) and isinstance(valid.get("data", ()), tuple | Mapping)
        parts: Mapping[str, Any] = {} if valid is None else valid if several else {"": valid}  # type: ignore[assignment]
        self.valid_data = {name: self._given(data) for name, data in parts.items()}
        self.params = dict(params or {})
        self._check(self.params)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name[0] != "_"}

    @property
    def _read_by_library(self) -> Iterable[str]:
        return self._names()

    def _unchangeable(self, name: str, hp: Mapping[str, Scalar]) -> str:
        changing = self._may_change(hp)
        if name in changing:
            return ""
        these = f"these can change later: {', '.join(sorted(changing))}" if changing else "none can change later here"
        return f"{AT_FIRST}; {these}"

    def _module(self) -> Any:
        """Return the library's module. Raise :class:`UsageError` if it is not installed."""
        name = self._library.lower()
        try:
            return importlib.import_module(name)
        except ImportError:
            raise UsageError(
                f"hpstage.boosting.{self._library} needs {self._library}: pip install hpstage[{name}]"
            ) from None

    @abstractmethod
    def _names(self) -> Mapping[str, str]:
        """Return a dict from names and aliases of all parameters to names. Parameters for the number of rounds have the
        name ``steps``, those for early stopping ``stopping``."""

    @abstractmethod
    def _begin(self, step: int, params: dict[str, Any]) -> None:
        """Train a round with a new booster, after the rounds of the model that was loaded, if any."""

    @abstractmethod
    def _resume(self, step: int, params: dict[str, Any], changed: dict[str, Any]) -> None:
        """Train a further round. ``changed``: the items of ``params`` that differ from the round before."""

    def _refused(self, params: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return a parameter that cannot be forked in combination with other parameters, and why; ``None`` if there is
        none."""
        return None

    def _at(self, step: int, hp: Mapping[str, Scalar]) -> dict[str, Any]:
        params = {**self._exact, **self.params, **hp}
        params.update({name: int(params[name]) for name in self._whole if name in params})
        return params

    def _may_change(self, hp: Mapping[str, Scalar]) -> frozenset[str]:
        return self._changing

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self._check({**self.params, **hp})
        self._booster = None
        self._model = self._none
        self._set = self._at(0, hp)
        self._fixed: dict[str, Scalar] | None = None

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self._check(hp)
        changing = self._may_change(hp)
        fixed = {name: value for name, value in hp.items() if name not in changing}
        if self._fixed is not None and fixed != self._fixed:
            name = next(name for name in (*fixed, *self._fixed) if fixed.get(name) != self._fixed.get(name))
            these = f"these can: {', '.join(sorted(changing))}" if changing else "with its other parameters, none can"
            raise UsageError(f"{self._library}'s {name!r} cannot follow a schedule; {these}")
        self._fixed = fixed
        params = self._at(step, hp)
        if self._booster is None:
            self._begin(step, params)
        else:
            was = self._set
            # Compare by identity first: arrays in ``params`` are the same objects in each round.
            changed = {n: v for n, v in params.items() if was.get(n) is not v and was.get(n) != v}
            self._resume(step, params, changed)
        self._set = params

    def _some_round(self) -> None:
        if self._booster is None and not self._model:
            raise RuntimeError("no round has been trained")

    def _measured(self, measured: list[tuple[str, str, float]]) -> dict[str, float]:
        """Return metrics by name, given triples of the name of the data, the name of the metric, and its value."""
        return {f"{data}_{name}" if data in self.valid_data and data else name: float(v) for data, name, v in measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model = state["model"]
        self._fixed = state["fixed"]
        self._booster = None

    def _given(self, data: Data) -> dict[str, Any]:
        if isinstance(data, Mapping):
            found = dict(data)
        elif isinstance(data, Sequence) and len(data) == 2:
            found = {"data": data[0], "label": data[1]}
        else:
            kind = type(data).__name__
            raise UsageError(f"data is a {kind}; it must be (X, y) or a dict of arguments of {self._dataset}")
        if unknown := sorted(found.keys() - self._arguments):
            raise UsageError(f"data of boosting cannot have {unknown}. Give only {sorted(self._arguments)}")
        return found

    def _check(self, params: Mapping[str, Any]) -> None:
        library, names = self._library, self._names()
        for name, value in params.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UsageError(f"{library} has no parameter {name!r}{hint}")
            if names[name] == "steps":
                raise UsageError(f"{name!r} is not supported, since a step is a round. Give the number as steps=")
            if names[name] == "stopping":
                raise UsageError(f"{name!r} would end training within {library}. Give an algorithm that prunes trials")
            if names[name] != name:
                raise UsageError(f"{library}'s {name!r} is an alias, which is not supported. Write {names[name]!r}")
            if value is None:
                raise UsageError(f"{library}'s {name!r} is None. Leave it out for the default")
            if callable(value):
                raise UsageError(f"{library}'s {name!r} is a function. Give the name of a built-in one")
            allowed, why = self._only.get(name, ((value,), ""))
            if value not in allowed:
                raise UsageError(f"{library} with {name}={value!r} cannot be forked: {why}. Leave it out")
        if found := self._refused(params):
            raise UsageError(f"{library} with {found[0]}={params[found[0]]!r} cannot be forked: {found[1]}")
