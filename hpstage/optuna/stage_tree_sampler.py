"""StageTreeSampler: wraps any Optuna sampler, and moves its proposals so that they share earlier training."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from hpstage.errors import UsageError
from hpstage.errors.arguments import SPACE, checked, instance, number, optional, whole
from hpstage.optuna.companions import Companions, Wish
from hpstage.optuna.influence import Probe, begins, takes
from hpstage.schedule import Scalar
from hpstage.schedule.space import Space, describe

_Numerical = FloatDistribution | IntDistribution

_NONE: Mapping[str, Scalar] = {}

# The radius is not reduced before this trial. Learning samplers draw about as many trials at random first.
_FULL_RADIUS = 10


class StageTreeSampler(BaseSampler):
    """A sampler with which trials of a continuous space share early training, as otherwise only in finite spaces.

    Two trials share training up to the first step at which any value differs (arXiv 1911.10504, section 3), and a
    sampler that draws real numbers never draws the same one twice. This sampler takes the base sampler's proposal,
    looks for the earlier trial of the study with which it can share the most steps, and copies that trial's values of
    the parameters that matter first. The parameter that matters last is left as proposed, so that no trial repeats
    another. Categorical parameters are never changed. Values are taken from complete and running trials, from pruned
    ones up to the step to which they were trained, and never from failed ones.

    The step from which a parameter matters is determined from ``space`` and ``steps`` (passed by ``hpstage.optimize``)
    at the proposed values: a drop at step 60 matters from 60 on. If they are unknown, parameters are assumed to matter
    in the order in which they are suggested, at equal distances.

    How far a value may be moved depends on the steps saved: ``radius`` for a whole trial, half of it for half of the
    steps. Since proposals of a sampler that learns converge during the search, the radius shrinks from the tenth trial
    on, as ``sqrt(10 / n)`` at trial ``n``.

    **Effect on a search.** Parameters that matter early take fewer different values, and those that matter late take
    more per step trained. The base sampler learns from the values that were trained.

    **When not to use it.** If all parameters matter from the first step on, there is nothing to share: with ``space``,
    the sampler changes nothing that matters; without it, the search becomes coarser for no benefit. The gain is also
    small if the important parameters matter after few steps; with a base sampler that does not learn (more trials for
    the same steps, but no better ones); and late in long searches, where the best values must be found more finely. In
    grids and finite spaces equal values are shared anyway: use the plain sampler there. ``scripts/bench_sampler.py``
    has figures.

    Wrap a ``PartialFixedSampler`` around this sampler, not the other way round, since otherwise fixed values are moved.

    Args:
        base_sampler: the sampler that proposes; ``None``: ``optuna.samplers.TPESampler()``.
        radius: how far a value may be moved to save a whole trial, as a share of its parameter's range, on a
            logarithmic scale where the parameter has one. 0: exactly the base sampler.
        space: the function passed to ``hpstage.optimize``, which maps a trial to schedules. Called about ``2 k + 2``
            times per proposal with ``k`` parameters, with stand-ins for a trial.
        steps: number of steps of a full trial; must be given together with ``space``.

    Raises:
        UsageError: the radius is not in [0, 1], or only one of ``space`` and ``steps`` is given.
    """

    @checked(
        base_sampler=optional(instance(BaseSampler, "an instance of one of Optuna's, such as TPESampler()")),
        radius=number(least=0, most=1),
        space=optional(SPACE),
        steps=optional(whole()),
    )
    def __init__(
        self,
        base_sampler: BaseSampler | None = None,
        *,
        radius: float = 0.25,
        space: Space | None = None,
        steps: int | None = None,
    ) -> None:
        if (space is None) != (steps is None):
            raise UsageError("space and steps belong together: give both, or neither")
        self.base_sampler = optuna.samplers.TPESampler() if base_sampler is None else base_sampler
        self.radius = float(radius)
        self._given = space is not None
        self._space = space
        self._steps = 0 if steps is None else steps
        self._defaults = _NONE  # of hyperparameters that the space may leave out
        # Everything below can be restored from the study.
        self._studies: weakref.WeakKeyDictionary[optuna.Study, Companions] = weakref.WeakKeyDictionary()
        self._plans: dict[tuple[str, int], Mapping[str, Any]] = {}  # the moved parameters of trials being proposed

    def attach(self, space: Space, steps: int, defaults: Mapping[str, Scalar] = _NONE) -> None:
        """Set the space of a search, as ``hpstage.optimize`` does; arguments of the constructor take precedence.

        Args:
            defaults: the trainable's values of hyperparameters that the space may leave out.
        """
        self._defaults = dict(defaults)
        if not self._given:
            self._space, self._steps = space, steps

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_studies"]  # holds locks and weak references
        if not self._given:
            state["_space"] = None  # set again by the next search; may be a nested function
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._studies = weakref.WeakKeyDictionary()

    # --- Optuna's sampler -------------------------------------------------------------------------------------

    def reseed_rng(self) -> None:
        self.base_sampler.reseed_rng()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self.base_sampler.before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._plans.pop((study.study_name, trial.number), None)
        self.base_sampler.after_trial(study, trial, state, values)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.base_sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        drawn = self.base_sampler.sample_relative(study, trial, search_space)
        if self.radius == 0:
            return drawn
        if self._space is None:
            return {**drawn, **self._in_order(study, trial, drawn, search_space)}
        plan = self._in_steps(self._space, study, trial, drawn)
        self._plans[study.study_name, trial.number] = plan
        return {name: plan.get(name, value) for name, value in drawn.items()}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        plan = self._plans.get((study.study_name, trial.number), {})
        if param_name in plan and takes(param_distribution, plan[param_name]):
            return plan[param_name]
        drawn = self.base_sampler.sample_independent(study, trial, param_name, param_distribution)
        if self.radius == 0 or self._space is not None or not isinstance(param_distribution, _Numerical):
            return drawn
        return self._one(study, trial, param_name, param_distribution, drawn)

    # --- sharing ----------------------------------------------------------------------------------------------

    def _in_steps(
        self, space: Space, study: optuna.Study, trial: FrozenTrial, drawn: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return a whole proposal that starts like the earlier trial with which it can share the most steps."""
        known = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        so_far = copy.copy(trial)
        so_far.params, so_far.distributions = dict(trial.params), dict(trial.distributions)

        def draw(name: str, distribution: BaseDistribution) -> Any:
            if name in known:
                return known[name]
            if distribution.single():
                value = distribution.low if isinstance(distribution, _Numerical) else distribution.choices[0]  # type: ignore[attr-defined]
            elif name in drawn and takes(distribution, drawn[name]):
                value = drawn[name]
            else:
                value = self.base_sampler.sample_independent(study, so_far, name, distribution)
            so_far.params[name], so_far.distributions[name] = value, distribution
            return value

        probe = Probe(draw, trial.number, study)
        try:
            describe(space, probe, self._steps)
        except Exception:  # the space will also raise with the trial itself
            return dict(probe.params)
        params, distributions = dict(probe.params), probe.distributions
        begin = begins(space, self._steps, params, distributions, self.radius, self._defaults)
        numbers = [name for name in params if isinstance(distributions[name], _Numerical) and name not in known]
        last = max((begin[name] for name in numbers if begin[name] < self._steps), default=0)
        order = sorted((name for name in params if begin[name] < last), key=lambda name: begin[name])
        if not order:
            return params
        radius = self._radius_at(trial)
        wishes = [Wish(name, distributions[name], params[name], radius if name in numbers else 0.0) for name in order]
        worth = [step / self._steps for step in (*(begin[name] for name in order), last)]
        found = self._companions(study).find(trial.number, wishes, worth, steps=self._steps)
        if found is None:
            return params
        shared = [name for name, start in zip(order[: found.depth], worth, strict=False) if start < found.gain]
        return {**params, **{name: found.trial.params[name] for name in shared}}

    def _in_order(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        drawn: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
    ) -> Mapping[str, Any]:
        """Return the drawn parameters to take from an earlier trial, in the order in which they are suggested."""
        companions = self._companions(study)
        latest = companions.latest(drawn.keys())
        if latest is None:
            return {}
        radius, last = self._radius_at(trial), _last_number(latest)
        wishes, worth = [], [0.0]
        for position, name in enumerate(latest.params):
            if name == last:
                break
            if name in drawn:
                number = isinstance(distributions[name], _Numerical)
                wishes.append(Wish(name, distributions[name], drawn[name], radius if number else 0.0))
                worth.append((position + 1) / len(latest.params))
        found = companions.find(trial.number, wishes, worth, steps=None)
        return {} if found is None else {wish.name: found.trial.params[wish.name] for wish in wishes[: found.depth]}

    def _one(
        self, study: optuna.Study, trial: FrozenTrial, name: str, distribution: BaseDistribution, drawn: Any
    ) -> Any:
        """Return a parameter's value from the nearest earlier trial that equals this one in all previous parameters."""
        companions = self._companions(study)
        latest = companions.latest({name})
        if latest is None:
            return drawn
        wishes = [Wish(known, trial.distributions[known], value, 0.0) for known, value in trial.params.items()]
        wishes.append(Wish(name, distribution, drawn, self._radius_at(trial)))
        only_all = [0.0] * len(wishes) + [min(1.0, len(wishes) / len(latest.params))]
        found = companions.find(trial.number, wishes, only_all, steps=None)
        if found is None or _last_number(found.trial) == name:
            return drawn
        return found.trial.params[name]

    def _radius_at(self, trial: FrozenTrial) -> float:
        return self.radius * math.sqrt(_FULL_RADIUS / max(trial.number, _FULL_RADIUS))

    def _companions(self, study: optuna.Study) -> Companions:
        companions = self._studies.setdefault(study, Companions())
        companions.refresh(study)
        return companions


def _last_number(trial: FrozenTrial) -> str | None:
    """Return the last numerical parameter that was suggested to the trial."""
    names = [name for name, distribution in trial.distributions.items() if isinstance(distribution, _Numerical)]
    return names[-1] if names else None
