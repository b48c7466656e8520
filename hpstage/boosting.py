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
_SAMPLING = _ROWS, "feature_fraction", "feature_fraction_bynode", "extra_trees", "data_sample_strategy"
_SEEDS = "bagging_seed", "feature_fraction_seed", "extra_seed"
_INEXACT = {
    "boosting": (("gbdt",), "dart scales earlier trees by weights, and rf keeps sums, that no model file has"),
    "linear_tree": ((False,), "the rounding of linear models in leaves depends on where training began"),
    "use_quantized_grad": ((False,), "gradients are rounded by a generator that cannot be seeded for a round"),
    "bagging_freq": ((0, 1), "rows that are kept for several rounds are in no model file"),
    "pos_bagging_fraction": ((1.0,), "rows are drawn by a generator that cannot be seeded for a round"),
    "neg_bagging_fraction": ((1.0,), "rows are drawn by a generator that cannot be seeded for a round"),
}
"""Parameters with the values under which a round depends on the model and its number alone, and why."""
_BINNING = (
    *("max_bin", "max_bin_by_feature", "min_data_in_bin", "bin_construct_sample_cnt", "data_random_seed"),
    *("is_enable_sparse", "enable_bundle", "use_missing", "zero_as_missing", "feature_pre_filter"),
    *("categorical_feature", "min_data_in_leaf"),
)
"""Parameters on which the bins of features depend."""
_NAMES = {
    **dict.fromkeys(("boosting_type", "boost"), "boosting"),
    **dict.fromkeys(("subsample", "sub_row", "bagging"), _ROWS),
    **dict.fromkeys(("colsample_bytree", "sub_feature"), "feature_fraction"),
    **dict.fromkeys(("colsample_bynode", "sub_feature_bynode"), "feature_fraction_bynode"),
    **dict.fromkeys(("pos_sub_row", "pos_subsample", "pos_bagging"), "pos_bagging_fraction"),
    **dict.fromkeys(("neg_sub_row", "neg_subsample", "neg_bagging"), "neg_bagging_fraction"),
    **dict.fromkeys(("random_seed", "random_state"), "seed"),
    **dict.fromkeys(("num_thread", "nthread", "nthreads", "n_jobs"), "num_threads"),
    **dict.fromkeys(("eta", "shrinkage_rate"), "learning_rate"),
    "subsample_freq": "bagging_freq",
    "linear_trees": "linear_tree",
    "extra_tree": "extra_trees",
}
"""Aliases of the parameters above, and the names of its documentation."""
_ROUNDS = (
    *("num_iterations", "num_iteration", "n_iter", "num_tree", "num_trees", "num_round", "num_rounds", "nrounds"),
    *("num_boost_round", "n_estimators", "max_iter"),
)
_STOPPING = "early_stopping_round", "early_stopping_rounds", "early_stopping", "n_iter_no_change"


class LightGBM:
    """Trains ``lightgbm`` one round a step.

    Hyperparameters are LightGBM's parameters, by the names of its documentation rather than their aliases. Those that
    it can change between rounds (``learning_rate``, ``lambda_l2``, ``num_leaves``, ...) may follow schedules. A model
    is bit for bit that of ``lightgbm.train`` with as many rounds and the same parameters. Where rows or features are
    sampled, the seeds of round ``i`` are ``seed + i`` (a hyperparameter, or in ``params``; 0 by default), so that what
    is drawn depends on the round alone.

    Metrics are those of ``metric``, by their names, such as ``auc``; with several ``valid``, the name of the data is in
    front, ``first_auc``. Defaults: ``deterministic``, one thread, ``force_row_wise``, no output.

    Args:
        train: training data, ``(X, y)`` or a dict of arguments of ``lightgbm.Dataset``.
        valid: data on which metrics are measured; a dict of names and data for several. Without, training data are.
        params: parameters of LightGBM that no hyperparameter replaces.

    Raises:
        UsageError: LightGBM is not installed, or a parameter is given under which a fork would differ from training
            straight through; training raises it, too, for hyperparameters.
    """

    stateless = ("_bins",)

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
        self._bins: tuple[dict[str, Any], lightgbm.Dataset] | None = None

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        _check(hp)
        self._booster: lightgbm.Booster | None = None
        self._model = ""
        self._set: dict[str, Any] = {}

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        params = self._at(step, hp)
        if self._booster is None:
            self._booster = self._begun(params)
        else:
            changed = {name: value for name, value in params.items() if self._set.get(name) != value}
            if changed:
                _check(changed)
                self._booster.reset_parameter(changed)
            self._booster.update()
        self._set = params

    def _at(self, step: int, hp: Mapping[str, Scalar]) -> dict[str, Any]:
        """Return the parameters of a round."""
        params = {**_EXACT, **self.params, **hp}
        if "force_col_wise" not in params:
            params.setdefault("force_row_wise", True)  # otherwise the faster is taken, which differs
        seed = params.setdefault("seed", 0)
        if any(name in params for name in _SAMPLING):
            params.update(dict.fromkeys(_SEEDS, (seed + step) % (1 << 31)))
            if params.get(_ROWS, 1.0) < 1.0:
                # Rows are drawn anew where this changes, whatever the seed.
                params[_ROWS] = params[_ROWS] * (1 - 1e-12 * (step % 2))
                params.setdefault("bagging_freq", 1)
        return params

    def _begun(self, params: dict[str, Any]) -> lightgbm.Booster:
        """Return a booster that has trained a round, from the model that was loaded, if any."""
        library = _lightgbm()
        binning = {name: params[name] for name in _BINNING if name in params}
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

    def state_dict(self) -> dict[str, str]:
        """Return the model as LightGBM writes it to a file."""
        if self._booster is None:
            return {"model": self._model}
        model = self._booster.model_to_string(num_iteration=-1)
        # A tree without a split is written in two ways, depending on where it comes from.
        same, found = re.subn(r"^leaf_weight=0?$", "leaf_weight=", model, flags=re.MULTILINE)
        return {"model": re.sub(r"^tree_sizes=.*\n", "", same, flags=re.MULTILINE) if found else model}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self._model = state["model"]
        self._booster = None


def _lightgbm() -> Any:
    try:
        import lightgbm
    except ImportError:
        raise UsageError("hpstage.boosting.LightGBM needs LightGBM: pip install hpstage[lightgbm]") from None
    return lightgbm


def _arguments(data: Data) -> dict[str, Any]:
    if isinstance(data, Mapping):
        return dict(data)
    if len(data) != 2:
        raise UsageError(f"data are (X, y) or a dict of arguments of lightgbm.Dataset, and not {len(data)} parts")
    return {"data": data[0], "label": data[1]}


def _check(params: Mapping[str, Any]) -> None:
    for name in params:
        if name in _NAMES:
            raise UsageError(f"LightGBM's {name!r} is an alias here: write {_NAMES[name]!r}")
        if name in _ROUNDS:
            raise UsageError(f"a step is a round: give the number of rounds as steps=, in place of {name!r}")
        if name in _STOPPING:
            raise UsageError(f"{name!r} would end training within LightGBM: give an algorithm that prunes trials")
    for name, (allowed, why) in _INEXACT.items():
        if name in params and params[name] not in allowed:
            raise UsageError(f"LightGBM with {name}={params[name]!r} cannot be forked: {why}; leave it out")
