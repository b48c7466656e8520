"""Trains XGBoost: a step is a boosting round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hpstage.boosting.rounds import Rounds
from hpstage.schedule import Scalar

_DRAWN = "subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode"
_WHOLE = "max_depth", "max_leaves", "max_bin", "max_cat_to_onehot", "max_cat_threshold"
_CHANGING = (
    *("eta", "gamma", "min_child_weight", "max_delta_step", "lambda", "alpha", "scale_pos_weight"),
    *("rate_drop", "skip_drop"),
)
_NAMES = (
    *("booster", "device", "verbosity", "validate_parameters", "nthread", "disable_default_eval_metric", "seed"),
    *("seed_per_iteration", "sampling_method", "tree_method", "updater", "refresh_leaf", "process_type", "grow_policy"),
    *("num_parallel_tree", "monotone_constraints", "interaction_constraints", "multi_strategy", "sparse_threshold"),
    *("max_cached_hist_node", "extmem_single_page", "sample_type", "normalize_type", "one_drop", "feature_selector"),
    *("top_k", "tolerance", "objective", "base_score", "eval_metric", "num_class", "tweedie_variance_power"),
    *("huber_slope", "quantile_alpha", "expectile_alpha", "aft_loss_distribution", "aft_loss_distribution_scale"),
    *("lambdarank_pair_method", "lambdarank_num_pair_per_sample", "lambdarank_normalization", "lambdarank_unbiased"),
    *("lambdarank_score_normalization", "lambdarank_bias_norm", "ndcg_exp_gain"),
)
_ALIASES = {
    "learning_rate": "eta",
    "min_split_loss": "gamma",
    "reg_lambda": "lambda",
    "reg_alpha": "alpha",
    "n_jobs": "nthread",
    "random_state": "seed",
    **dict.fromkeys(("num_boost_round", "num_round", "n_estimators"), "steps"),
    "early_stopping_rounds": "stopping",
}


class XGBoost(Rounds):
    """Trains ``xgboost``, one boosting round per step.

    Hyperparameters are XGBoost's parameters, by the names of its documentation rather than their aliases. These may
    follow schedules: ``eta``, ``gamma``, ``max_depth``, ``max_leaves``, ``min_child_weight``, ``max_delta_step``,
    ``lambda``, ``alpha``, ``scale_pos_weight``, ``max_bin``, ``subsample``, ``colsample_bytree``,
    ``colsample_bylevel``, ``colsample_bynode``, ``rate_drop``, ``skip_drop``, ``max_cat_to_onehot``,
    ``max_cat_threshold``; none with ``booster="gblinear"``. A model is bit for bit that of ``xgboost.train`` with as
    many rounds and the same parameters, among them ``seed_per_iteration``. If rows or columns are sampled, each round
    has a new tree updater with a new random generator, so that the sample depends only on the round.

    Metrics are those of ``eval_metric``, by their names, such as ``auc``; with several ``valid``, the name of the data
    is prefixed: ``first_auc``. Defaults: ``seed_per_iteration``, one thread, no output.

    Args:
        train: training data, ``(X, y)`` or a dict of arguments of ``xgboost.DMatrix``: ``data``, ``label``,
            ``weight``, ``base_margin``, ``missing``, ``feature_names``, ``feature_types``, ``feature_weights``,
            ``group``, ``qid``, ``label_lower_bound``, ``label_upper_bound``, ``enable_categorical``.
        valid: data on which metrics are measured, or a dict of several by name. By default, the training data.
        params: parameters of XGBoost for all trials; a hyperparameter of the same name replaces one.

    Raises:
        UsageError: XGBoost is not installed, it has no such parameter, or with a parameter, a fork would differ from
            training straight through. Training raises it for hyperparameters, and if one changes that must not.
    """

    _library = "XGBoost"
    _dataset = "xgboost.DMatrix"
    _arguments = frozenset(
        (
            *("data", "label", "weight", "base_margin", "missing", "feature_names", "feature_types", "group", "qid"),
            *("label_lower_bound", "label_upper_bound", "feature_weights", "enable_categorical"),
        )
    )
    _changing = frozenset((*_CHANGING, *_DRAWN, *_WHOLE))
    _whole = _WHOLE
    _exact: ClassVar = {"nthread": 1, "seed_per_iteration": True, "verbosity": 0}
    _only: ClassVar = {
        "seed_per_iteration": ((True,), "random samples would depend on where training began"),
        "device": (("cpu",), "only on a CPU are rounds known to depend only on the model and the round"),
        "lambdarank_unbiased": ((False,), "XGBoost does not continue estimates of position bias"),
        "process_type": (("default",), "updating trees is not a round"),
        "updater": (("coord_descent", "shotgun"), "`tree_method` decides how trees are grown"),
        "feature_selector": (
            ("cyclic", "random", "greedy", "thrifty"),
            "the order of features is not in the model file",
        ),
        "tolerance": ((0,), "the weights of the round before are not in the model file"),
    }
    _none = b""
    stateless = ("_matrices",)
    _matrices: tuple[Any, dict[str, Any]] | None = None

    def _names(self) -> Mapping[str, str]:
        return {**{name: name for name in (*self._changing, *_NAMES)}, **_ALIASES}

    def _refused(self, params: Mapping[str, Any]) -> tuple[str, str] | None:
        linear, threads = params.get("booster") == "gblinear", params.get("nthread", 1)
        if linear and threads != 1 and params.get("updater", "shotgun") == "shotgun":
            return "nthread", "several threads of the updater 'shotgun' race; give updater='coord_descent'"
        return None

    def _may_change(self, hp: Mapping[str, Scalar]) -> frozenset[str]:
        # A linear model applies changed penalties differently from initial ones.
        return frozenset() if {**self.params, **hp}.get("booster") == "gblinear" else self._changing

    def _data(self) -> tuple[Any, dict[str, Any]]:
        """Return the training data, and the data on which metrics are measured, by name."""
        if self._matrices is None:
            matrix = self._module().DMatrix
            valid = {name: matrix(**data) for name, data in self.valid_data.items()}
            self._matrices = matrix(**self.train_data), valid
        return self._matrices

    def _begun(self, params: dict[str, Any]) -> Any:
        """Return a booster with the model that was loaded, if any."""
        train, valid = self._data()
        return self._module().Booster(params, [train, *valid.values()], bytearray(self._model) if self._model else None)

    def _begin(self, step: int, params: dict[str, Any]) -> None:
        self._booster = self._begun(params)
        self._booster.update(self._data()[0], step)

    def _resume(self, step: int, params: dict[str, Any], changed: dict[str, Any]) -> None:
        if any(params.get(name, 1) != 1 for name in _DRAWN):
            # The tree updater keeps its random generator from tree to tree. Force a new updater, with a new generator.
            method = params.get("tree_method", "auto")
            self._booster.set_param("tree_method", "hist" if method == "exact" else "exact")
            self._booster.num_boosted_rounds()  # makes the booster apply its parameters
            changed = {**changed, "tree_method": method}
        if changed:
            self._booster.set_param(changed)
        self._booster.update(self._data()[0], step)

    def evaluate(self) -> dict[str, float]:
        self._some_round()
        booster = self._begun(self._set) if self._booster is None else self._booster
        train, valid = self._data()
        names, sets = [*valid] or [""], [*valid.values()] or [train]
        written = booster.eval_set([(data, str(at)) for at, data in enumerate(sets)])
        parts = [part.rpartition(":") for part in written.split("\t")[1:]]  # [0]  0-auc:0.9  0-error:0.1  1-auc:0.8
        found = [(*name.partition("-")[::2], float(value)) for name, _, value in parts]
        return self._measured([(names[int(at)], name, value) for at, name, value in found])

    def state_dict(self) -> dict[str, Any]:
        """Return the model as XGBoost writes it to a file, and the hyperparameters that must not change."""
        trained = self._booster is not None
        return {"model": bytes(self._booster.save_raw()) if trained else self._model, "fixed": self._fixed}
