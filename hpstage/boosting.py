"""Gradient boosting as a trainable, with LightGBM: a step is a round, and trials that differ in rounds share trees.

::

    trainable = hpstage.boosting.LightGBM((X, y), (X_valid, y_valid), {"objective": "binary", "metric": "auc"})

    def space(trial):
        rate = s.multistep(0.1, [trial.suggest_int("at", 100, 300, step=50)], gamma=0.1)
        return {"num_leaves": trial.suggest_int("num_leaves", 7, 63, log=True), "learning_rate": rate}

    hpstage.optimize(study, trainable, space, metric="auc", steps=400)

Needs ``pip install hpstage[lightgbm]``.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from hpstage.errors import UsageError
from hpstage.schedule import Scalar

if TYPE_CHECKING:
    import lightgbm

Data: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""Features and labels, or arguments of ``lightgbm.Dataset``: ``data``, ``label``, ``weight``, ``group``, ..."""

__all__ = ["LightGBM"]

_EXACT: dict[str, Any] = {"num_threads": 1, "deterministic": True, "verbosity": -1}
_ROWS = "bagging_fraction"
_SAMPLING = _ROWS, "feature_fraction", "feature_fraction_bynode", "extra_trees"
_SEEDS = "bagging_seed", "feature_fraction_seed", "extra_seed"
_CHANGING = frozenset(
    (
        *("learning_rate", "num_leaves", "lambda_l1", "lambda_l2", "min_gain_to_split", "min_sum_hessian_in_leaf"),
        *("max_delta_step", "path_smooth", "feature_fraction", "feature_fraction_bynode"),
    )
)
"""Parameters that LightGBM takes over between rounds as if they had been so from the beginning."""
_INEXACT = {
    "boosting": (("gbdt", "gbrt"), "dart, rf and goss keep weights, sums or a count of rounds in no model file"),
    "data_sample_strategy": (("bagging",), "goss samples only after a number of rounds since training began"),
    "linear_tree": ((False,), "the rounding of linear models in leaves depends on where training began"),
    "use_quantized_grad": ((False,), "gradients are rounded by a generator that cannot be seeded for a round"),
    "bagging_freq": ((0, 1), "rows that are kept for several rounds are in no model file"),
    "bagging_by_query": ((False,), "queries are drawn by a generator that cannot be seeded for a round"),
    "pos_bagging_fraction": ((1.0,), "rows are drawn by a generator that cannot be seeded for a round"),
    "neg_bagging_fraction": ((1.0,), "rows are drawn by a generator that cannot be seeded for a round"),
    "cegb_penalty_feature_lazy": ((), "which features were used before is in no model file"),
    "cegb_penalty_feature_coupled": ((), "which features were used before is in no model file"),
    **dict.fromkeys(_SEEDS, ((), "`seed` and the number of the round seed what is drawn")),
}
"""Parameters with the values under which a round depends on the model and its number alone, and why."""
_XENDCG = "rank_xendcg", "xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart"
_STOPPING = "early_stopping_round", "early_stopping_min_delta"
_DATA = frozenset(("data", "label", "weight", "group", "feature_name", "categorical_feature"))


class LightGBM:
    """Trains ``lightgbm`` one round a step.

    Hyperparameters are LightGBM's parameters, by the names of its documentation rather than their aliases. These may
    follow schedules: ``learning_rate``, ``num_leaves``, ``lambda_l1``, ``lambda_l2``, ``min_gain_to_split``,
    ``min_sum_hessian_in_leaf``, ``max_delta_step``, ``path_smooth``, ``feature_fraction``, ``feature_fraction_bynode``.
    A model is bit for bit that of ``lightgbm.train`` with as many rounds and the same parameters. Where rows or
    features are sampled, the seeds of round ``i`` are ``seed + i`` (a hyperparameter, or in ``params``; 0 by default),
    so that what is drawn depends on the round alone; ``bagging_freq`` is 1 where
    ``bagging_fraction`` is below 1.

    Metrics are those of ``metric``, by their names, such as ``auc``; with several ``valid``, the name of the data is in
    front, ``first_auc``. Defaults: ``deterministic``, one thread, ``force_row_wise``, no output.

    Args:
        train: training data, ``(X, y)`` or a dict of arguments of ``lightgbm.Dataset``: ``data``, ``label``,
            ``weight``, ``group``, ``feature_name``, ``categorical_feature``.
        valid: data on which metrics are measured; a dict of names and data for several. Without, training data are.
        params: parameters of LightGBM that no hyperparameter replaces.

    Raises:
        UsageError: LightGBM is not installed, it has no such parameter, or a fork would differ from training straight
            through under it; training raises it, too, for hyperparameters, and for a schedule of another one.
    """

    stateless = ("_bins",)
    _booster: lightgbm.Booster | None = None
    _bins: tuple[dict[str, Any], lightgbm.Dataset] | None = None

    def __init__(
        self,
        train: Data,
        valid: Data | Mapping[str, Data] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        _lightgbm()
        self.train_data = _arguments(train)
        several = isinstance(valid, Mapping) and "data" not in valid
        parts: Mapping[str, Any] = {} if valid is None else valid if several else {"": valid}  # type: ignore[assignment]
        self.valid_data = {name: _arguments(data) for name, data in parts.items()}
        self.params = dict(params or {})
        _check(self.params)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_bins", "_booster")}

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        _check(hp)
        self._booster = None
        self._model = ""
        self._set: dict[str, Any] = {}
        self._fixed: dict[str, Scalar] | None = None

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        fixed = {name: value for name, value in hp.items() if name not in _CHANGING}
        if self._fixed is not None and fixed != self._fixed:
            name = next(name for name in (*fixed, *self._fixed) if fixed.get(name) != self._fixed.get(name))
            raise UsageError(f"LightGBM's {name!r} cannot follow a schedule; these can: {', '.join(sorted(_CHANGING))}")
        self._fixed = fixed
        params = self._at(step, hp)
        if self._booster is None:
            self._booster = self._begun(params)
        else:
            changed = {name: value for name, value in params.items() if self._set.get(name) != value}
            if changed:
                self._booster.reset_parameter(changed)
            self._booster.update()
        self._set = params

    def _at(self, step: int, hp: Mapping[str, Scalar]) -> dict[str, Any]:
        """Return the parameters of a round."""
        params = {**_EXACT, **self.params, **hp}
        if "num_leaves" in params:
            params["num_leaves"] = int(params["num_leaves"])  # schedules give floats
        if "force_col_wise" not in params:
            params.setdefault("force_row_wise", True)  # otherwise the faster is taken, which differs
        seed = params.setdefault("seed", 0)
        if any(name in params for name in _SAMPLING):
            params.update(dict.fromkeys(_SEEDS, (seed + step) % (1 << 31)))
            if params.get(_ROWS, 1.0) < 1.0:
                # Rows are drawn again where this changes, whatever the seed.
                params[_ROWS] = params[_ROWS] * (1 - 1e-12 * (step % 2))
                params.setdefault("bagging_freq", 1)
        return params

    def _begun(self, params: dict[str, Any]) -> lightgbm.Booster:
        """Return a booster that has trained a round, from the model that was loaded, if any."""
        library = _lightgbm()
        binning = {name: value for name, value in params.items() if name not in _CHANGING.union(_SEEDS, (_ROWS,))}
        if self._bins is None or self._bins[0] != binning:
            self._bins = binning, library.Dataset(**self.train_data, params=params, free_raw_data=False).construct()
        whole = self._bins[1]
        train = whole.subset(list(range(whole.num_data())), params=params)  # one that has seen no other model
        valid = {
            name: library.Dataset(**data, reference=train, free_raw_data=False)
            for name, data in self.valid_data.items()
        }
        booster: lightgbm.Booster = library.train(
            *(dict(params), train, 1),
            valid_sets=list(valid.values()),
            valid_names=list(valid),
            init_model=library.Booster(model_str=self._model) if self._model else None,
            keep_training_booster=True,
        )
        return booster

    def evaluate(self) -> dict[str, float]:
        assert self._booster is not None, "no round has been trained"
        measured = self._booster.eval_valid() if self.valid_data else self._booster.eval_train()
        named = [name for name in self.valid_data if name]
        return {f"{data}_{name}" if data in named else name: float(value) for data, name, value, *_ in measured}

    def state_dict(self) -> dict[str, Any]:
        """Return the model as LightGBM writes it to a file, and the hyperparameters that stay as they are."""
        if self._booster is None:
            return {"model": self._model, "fixed": self._fixed}
        model = self._booster.model_to_string(num_iteration=-1)
        # A tree without a split is written in two ways, depending on where it comes from.
        same, found = re.subn(r"^leaf_weight=0?$", "leaf_weight=", model, flags=re.MULTILINE)
        model = re.sub(r"^tree_sizes=.*\n", "", same, flags=re.MULTILINE) if found else model
        return {"model": model, "fixed": self._fixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model = state["model"]
        self._fixed = state["fixed"]
        self._booster = None


def _lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError:
        raise UsageError("hpstage.boosting.LightGBM needs LightGBM: pip install hpstage[lightgbm]") from None
    return lightgbm


@functools.cache
def _names() -> dict[str, str]:
    """Return the names of all parameters of LightGBM, and those that are aliases, with the name each stands for."""
    from lightgbm.basic import _ConfigAliases  # there is no public table of them; reviewed with 4.7

    names = _ConfigAliases._get_all_param_aliases()
    return {alias: name for name, aliases in names.items() for alias in (name, *aliases)}


def _arguments(data: Data) -> dict[str, Any]:
    if isinstance(data, Mapping):
        found = dict(data)
    elif isinstance(data, Sequence) and len(data) == 2:
        found = {"data": data[0], "label": data[1]}
    else:
        raise UsageError(f"data are (X, y) or a dict of arguments of lightgbm.Dataset, not a {type(data).__name__}")
    if unknown := sorted(found.keys() - _DATA):
        raise UsageError(f"data of boosting cannot have {unknown}: give only {sorted(_DATA)}")
    return found


def _check(params: Mapping[str, Any]) -> None:
    names = _names()
    for name, value in params.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise UsageError(f"LightGBM has no parameter {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if names[name] == "num_iterations":
            raise UsageError(f"a step is a round: give the number of rounds as steps=, in place of {name!r}")
        if names[name] in _STOPPING:
            raise UsageError(f"{name!r} would end training within LightGBM: give an algorithm that prunes trials")
        if names[name] != name:
            raise UsageError(f"LightGBM's {name!r} is an alias here: write {names[name]!r}")
        if callable(value):
            raise UsageError(f"LightGBM's {name!r} is a function: only what it has itself can be continued")
        if name == "objective" and value in _XENDCG:
            raise UsageError(f"LightGBM with {name}={value!r} cannot be forked: it draws by a generator of its own")
        allowed, why = _INEXACT.get(name, ((value,), ""))
        if value not in allowed:
            raise UsageError(f"LightGBM with {name}={value!r} cannot be forked: {why}; leave it out")
