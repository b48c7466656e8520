"""StageTreeSampler: any Optuna sampler, its proposals moved onto beginnings that are trained already."""

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
from hpstage.optuna.companions import Companions, Wish
from hpstage.optuna.influence import Probe, begins, takes
from hpstage.schedule.space import Space, describe

_Numerical = FloatDistribution | IntDistribution

# Up to this trial the radius is as stated. About as many as samplers that learn begin with at random.
_FULL_RADIUS = 10


class StageTreeSampler(BaseSampler):
    """Lets trials of a continuous space share their beginnings, which otherwise happens in finite spaces only.

    Two trials share training up to the first step at which any value differs (arXiv 1911.10504, section 3), and a
    sampler that draws real numbers never draws one twice. This one takes the base sampler's proposal, looks for the
    earlier trial of the study that it can share the most steps with, and gives it that trial's values in the parameters
    that matter first. What matters last is left as proposed, so that no trial repeats another. Categorical parameters
    are never changed. Trials that failed lend nothing; running ones do; pruned ones as far as they were trained.

    From which step on a parameter matters is read from ``space`` and ``steps`` (``hpstage.optimize`` says them), with
    the values proposed: a drop at step 60 matters from 60 on. Where they are not known, parameters are taken to matter
    in the order in which they are asked for, at even distances.

    How far a value may be moved is weighed against what that saves: ``radius`` is for a whole trial, half of it for
    half of the steps. Proposals of a sampler that learns move together as the search goes on, and so the radius
    shrinks, from the tenth trial on as ``sqrt(10 / n)`` at trial ``n``.

    **What it does to a search.** Parameters that matter early take fewer different values, and those that matter late
    more of them per step trained. The base learns from the values that were trained.

    **Where it does not pay.** Where all parameters matter from the first step on there is nothing to share: given
    ``space``, it changes nothing that counts; without, it coarsens the search for nothing. Where little can be saved
    before the parameters that count come in. Over a sampler that does not learn: more trials for the same steps, and no
    better ones. In long searches: what is gained is gained early, and fades as the best values must be found more
    finely. In grids and finite spaces, where equal values are shared anyway: give those their plain sampler.
    ``scripts/bench_sampler.py`` has figures.

    A ``PartialFixedSampler`` belongs around this sampler and not within it, or fixed values are moved as well.

    Args:
        base_sampler: proposes; ``None``: ``optuna.samplers.TPESampler()``.
        radius: how far a value may be moved to save a whole trial, as a share of its parameter's range, on a
            logarithmic scale where the parameter has one. 0: exactly the base sampler.
        space: the function that is given to ``hpstage.optimize``: maps a trial to schedules. Called some ``2 k + 2``
            times a proposal with ``k`` parameters, with stand-ins for a trial.
        steps: steps of a full trial; given together with ``space``.

    Raises:
        UsageError: a radius outside of [0, 1], or ``space`` and ``steps`` given one without the other.
    """

    def __init__(
        self,
        base_sampler: BaseSampler | None = None,
        *,
        radius: float = 0.25,
        space: Space | None = None,
        steps: int | None = None,
    ) -> None:
        if base_sampler is not None and not isinstance(base_sampler, BaseSampler):
            raise UsageError(
                f"base_sampler is {base_sampler!r}; give an instance of one of Optuna's, such as TPESampler()"
            )
        if isinstance(radius, bool) or not isinstance(radius, int | float) or not 0 <= radius <= 1:
            raise UsageError(f"radius is {radius!r}; it is a share of a parameter's range, from 0 to 1")
        if (space is None) != (steps is None):
            raise UsageError("space and steps belong together: give both, or neither")
        self.base_sampler = optuna.samplers.TPESampler() if base_sampler is None else base_sampler
        self.radius = float(radius)
        self._given = space is not None
        self._space = space
        self._steps = 0 if steps is None else steps
        # All that follows can be read again from the study.
        self._studies: weakref.WeakKeyDictionary[optuna.Study, Companions] = weakref.WeakKeyDictionary()
        self._plans: dict[tuple[str, int], Mapping[str, Any]] = {}  # of trials that are being proposed

    def attach(self, space: Space, steps: int) -> None:
        """Say what a search's space is, as ``hpstage.optimize`` does; what the constructor was given stands."""
        if not self._given:
            self._space, self._steps = space, steps

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_studies"]  # holds locks and weak references
        if not self._given:
            state["_space"] = None  # said again by the next search; may be a function within another
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
        """A whole proposal, which begins like the earlier trial that it can share the most steps with."""
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
        describe(space, probe, self._steps)
        params, distributions = dict(probe.params), probe.distributions
        begin = begins(space, self._steps, params, distributions, self.radius)
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
        """Those of the parameters drawn that an earlier trial lends, in the order in which it was asked for them."""
        companions = self._companions(study)
        latest = companions.latest(drawn.keys())
        if latest is None:
            return {}
        radius, last = self._radius_at(trial), _last_number(latest)
        wishes, worth = [], [0.0]
        for asked, name in enumerate(latest.params):
            if name == last:
                break
            if name in drawn:
                number = isinstance(distributions[name], _Numerical)
                wishes.append(Wish(name, distributions[name], drawn[name], radius if number else 0.0))
                worth.append((asked + 1) / len(latest.params))
        found = companions.find(trial.number, wishes, worth, steps=None)
        return {} if found is None else {wish.name: found.trial.params[wish.name] for wish in wishes[: found.depth]}

    def _one(
        self, study: optuna.Study, trial: FrozenTrial, name: str, distribution: BaseDistribution, drawn: Any
    ) -> Any:
        """One parameter's value, of the nearest earlier trial that equals this one in all that was asked before."""
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
    """The numerical parameter that the trial was asked for last."""
    names = [name for name, distribution in trial.distributions.items() if isinstance(distribution, _Numerical)]
    return names[-1] if names else None
