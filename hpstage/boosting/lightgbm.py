"""Trains LightGBM: a step is a boosting round."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hpstage.boosting.rounds import Rounds
from hpstage.schedule import Scalar

if TYPE_CHECKING:
    import lightgbm

_ROWS = "bagging_fraction"
_SAMPLING = _ROWS, "feature_fraction", "feature_fraction_bynode", "extra_trees"
_SEEDS = "bagging_seed", "feature_fraction_seed", "extra_seed"
_CHANGING = frozenset(
    (
        *("learning_rate", "num_leaves", "lambda_l1", "lambda_l2", "min_gain_to_split", "min_sum_hessian_in_leaf"),
        *("max_delta_step", "path_smooth", "feature_fraction", "feature_fraction_bynode"),
    )
)
_INEXACT = {
    "boosting": (("gbdt", "gbrt"), "the weights, sums or counts of dart, rf and goss are not in the model file"),
    "data_sample_strategy": (("bagging",), "goss samples only after a number of rounds since training began"),
    "linear_tree": ((False,), "the rounding of linear models in leaves depends on where training began"),
    "use_quantized_grad": ((False,), "gradients are rounded by a generator that cannot be seeded for a round"),
    "bagging_freq": ((0, 1), "rows that are drawn for several rounds are not in the model file"),
    "bagging_by_query": ((False,), "queries are drawn by a generator that cannot be seeded for a round"),
    "pos_bagging_fraction": ((1.0,), "rows are drawn by a generator that cannot be seeded for a round"),
    "neg_bagging_fraction": ((1.0,), "rows are drawn by a generator that cannot be seeded for a round"),
    "cegb_penalty_feature_lazy": ((), "the features used before are not in the model file"),
    "cegb_penalty_feature_coupled": ((), "the features used before are not in the model file"),
    **dict.fromkeys(_SEEDS, ((), "`seed` and the number of the round decide all random numbers")),
}
_XENDCG = "rank_xendcg", "xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart"
_STOPPING = "early_stopping_round", "early_stopping_min_delta"


class LightGBM(Rounds):
    """Trains ``lightgbm``, one boosting round per step.

    Hyperparameters are LightGBM's parameters, by the names of its documentation rather than their aliases. These may
    follow schedules: ``learning_rate``, ``num_leaves``, ``lambda_l1``, ``lambda_l2``, ``min_gain_to_split``,
    ``min_sum_hessian_in_leaf``, ``max_delta_step``, ``path_smooth``, ``feature_fraction``, ``feature_fraction_bynode``.
    A model is bit for bit that of ``lightgbm.train`` with as many rounds and the same parameters. If rows or features
    are sampled, the seeds of round ``i`` are ``seed + i`` (``seed`` is a hyperparameter, or in ``params``; default 0),
    so that the sample depends only on the round; ``bagging_freq`` is 1 if ``bagging_fraction`` is below 1.

    Metrics are those of ``metric``, by their names, such as ``auc``; with several ``valid``, the name of the data is
    prefixed: ``first_auc``. Defaults: ``deterministic``, one thread, ``force_row_wise``, no output.

    Args:
        train: training data, ``(X, y)`` or a dict of arguments of ``lightgbm.Dataset``: ``data``, ``label``,
            ``weight``, ``group``, ``feature_name``, ``categorical_feature``.
        valid: data on which metrics are measured, or a dict of several by name. By default, the training data.
        params: parameters of LightGBM for all trials; a hyperparameter of the same name replaces one.

    Raises:
        UsageError: LightGBM is not installed, it has no such parameter, or with a parameter, a fork would differ from
            training straight through. Training raises it for hyperparameters, and if one changes that must not.
    """

    _library = "LightGBM"
    _dataset = "lightgbm.Dataset"
    _arguments = frozenset(("data", "label", "weight", "group", "feature_name", "categorical_feature"))
    _changing = _CHANGING
    _whole = ("num_leaves",)
    _exact: ClassVar = {"num_threads": 1, "deterministic": True, "verbosity": -1}
    _only: ClassVar = _INEXACT
    _none = ""
    stateless = ("_bins",)
    _booster: lightgbm.Booster | None
    _bins: tuple[dict[str, Any], lightgbm.Dataset] | None = None

    def _names(self) -> Mapping[str, str]:
        return _names()

    def _refused(self, params: Mapping[str, Any]) -> tuple[str, str] | None:
        if params.get("objective") in _XENDCG:
            return "objective", "it has its own random generator, which is not in the model file"
        return None

    def _at(self, step: int, hp: Mapping[str, Scalar]) -> dict[str, Any]:
        params = super()._at(step, hp)
        if "force_col_wise" not in params:
            params.setdefault("force_row_wise", True)  # otherwise LightGBM measures which is faster, which varies
        seed = params.setdefault("seed", 0)
        if any(name in params for name in _SAMPLING):
            params.update(dict.fromkeys(_SEEDS, (seed + step) % (1 << 31)))
            if params.get(_ROWS, 1.0) < 1.0:
                # LightGBM draws rows again only if this value changes, even if the seed has changed.
                params[_ROWS] = params[_ROWS] * (1 - 1e-12 * (step % 2))
                params.setdefault("bagging_freq", 1)
        return params

    def _begin(self, step: int, params: dict[str, Any]) -> None:
        self._booster = self._trained(params, lambda booster: None)

    def _trained(self, params: dict[str, Any], before: Callable[[lightgbm.Booster], None]) -> lightgbm.Booster:
        """Return a booster that has trained a round, after the rounds of the model that was loaded, if any. ``before``
        is called with the booster before the round."""
        library = self._module()
        binning = {name: value for name, value in params.items() if name not in _CHANGING.union(_SEEDS, (_ROWS,))}
        if self._bins is None or self._bins[0] != binning:
            self._bins = binning, library.Dataset(**self.train_data, params=params, free_raw_data=False).construct()
        whole = self._bins[1]
        train = whole.subset(list(range(whole.num_data())), params=params)  # a data set used with no other model
        valid = {
            name: library.Dataset(**data, reference=train, free_raw_data=False)
            for name, data in self.valid_data.items()
        }

        def call(env: Any) -> None:
            before(env.model)

        call.before_iteration = True  # type: ignore[attr-defined]
        booster: lightgbm.Booster = library.train(
            *(dict(params), train, 1),
            valid_sets=list(valid.values()),
            valid_names=list(valid),
            init_model=library.Booster(model_str=self._model) if self._model else None,
            callbacks=[call],
            keep_training_booster=True,
        )
        return booster

    def _resume(self, step: int, params: dict[str, Any], changed: dict[str, Any]) -> None:
        assert self._booster is not None
        if changed:
            self._booster.reset_parameter(changed)
        self._booster.update()

    def evaluate(self) -> dict[str, float]:
        self._some_round()
        found: list[Any] = []

        def measure(booster: lightgbm.Booster) -> None:
            found.extend(booster.eval_valid() if self.valid_data else booster.eval_train())

        if self._booster is not None:
            measure(self._booster)
        else:  # measure the loaded model before a round, which is then discarded
            self._trained(self._set, measure)
        return self._measured([(data, name, value) for data, name, value, *_ in found])

    def state_dict(self) -> dict[str, Any]:
        """Return the model as LightGBM writes it to a file, and the hyperparameters that must not change."""
        if self._booster is None:
            return {"model": self._model, "fixed": self._fixed}
        model = self._booster.model_to_string(num_iteration=-1)
        # A tree without a split is written in two ways, depending on whether it was trained or loaded.
        same, found = re.subn(r"^leaf_weight=0?$", "leaf_weight=", model, flags=re.MULTILINE)
        model = re.sub(r"^tree_sizes=.*\n", "", same, flags=re.MULTILINE) if found else model
        return {"model": model, "fixed": self._fixed}


@functools.cache
def _names() -> dict[str, str]:
    """Return names and aliases of all parameters of LightGBM, as :meth:`Rounds._names` does."""
    from lightgbm.basic import _ConfigAliases  # there is no public table of parameters; reviewed with 4.7

    meant = {"num_iterations": "steps", **dict.fromkeys(_STOPPING, "stopping")}
    names = _ConfigAliases._get_all_param_aliases()
    return {alias: meant.get(name, name) for name, aliases in names.items() for alias in (name, *aliases)}
