"""Warm-up, stable, decay: the schedule, and sweeps of many decays from one trunk.

MiniCPM (Hu et al., arXiv 2404.06395); Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
Durations" (arXiv 2405.18392), which calls the decay a cooldown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from hpstage.errors import ScheduleError
from hpstage.errors.arguments import instance, one_of, optional, text
from hpstage.schedule.scalars import Scalar, canonical, count, real, same
from hpstage.schedule.segments import Schedule, Segment, as_schedule
from hpstage.schedule.shapes import DecayForm, warmup_stable_decay

if TYPE_CHECKING:
    from optuna.trial import Trial

_FORMS: tuple[str, ...] = get_args(DecayForm)
# Names of the Optuna parameters that a sweep varies besides the hyperparameters that it is given.
_OWN = ("peak", "horizon", "decay_fraction", "decay_form")


def wsd(
    value: float,
    steps: int,
    *,
    warmup: int,
    decay: int,
    final: float = 0.0,
    decay_form: DecayForm = "linear",
) -> Schedule:
    """Warm-up, stable, decay (arXiv 2404.06395; the 1-sqrt form: arXiv 2405.18392). Ends at ``steps``.

    Warm-up: its step t has ``value * (t + 1) / warmup``, so that no step is spent at 0 and the last has ``value``.
    Decay: its step t is ``t / decay`` of the way to ``final`` (for the exponential form, on a logarithmic scale, so
    that ``final`` must be above 0). The first still has ``value`` (and is shared with schedules that decay later), and
    ``final`` is the value that step ``steps`` would have.
    """
    top, end = real("value", value), real("final", final)
    total, rise, fall = count("steps", steps), count("warmup", warmup), count("decay", decay)
    if rise > total - fall:
        raise ScheduleError(f"warmup ({rise}) and decay ({fall}) are longer than steps ({total}); shorten one")
    one_of(*_FORMS).of("decay_form", decay_form, ScheduleError)
    shape = warmup_stable_decay(top, total, rise, fall, end, decay_form)
    return Schedule(tuple([Segment(form, length) for form, length in shape]))


@dataclass(frozen=True, slots=True)
class WSDSweep:
    """A space of warm-up-stable-decay schedules that lists its trials; made by :func:`wsd_sweep`.

    :func:`hpstage.optimize` needs no ``steps`` and no ``n_trials`` with it, and proposes exactly the trials of
    ``points`` that the study does not have on the plan yet, whatever its sampler.
    """

    points: tuple[dict[str, Any], ...]
    """The parameters of each trial, as they appear in the study."""
    steps: int
    """The longest horizon."""
    warmup: int
    final: float
    keep_every: int | None
    name: str
    hp: dict[str, Schedule]
    """Hyperparameters that are the same in all trials."""
    after: tuple[str, ...]
    """Hyperparameters that change with the decay, to the parameter ``decay_<name>``."""

    def __call__(self, trial: Trial) -> dict[str, Any]:
        """Return the schedules of an Optuna trial."""
        point = {name: self._suggest(trial, name) for name in self.points[0]}
        horizon, joint = point["horizon"], _joint(point)
        schedules: dict[str, Schedule] = {
            self.name: wsd(
                point["peak"],
                horizon,
                warmup=self.warmup,
                decay=horizon - joint,
                final=self.final,
                decay_form=point["decay_form"],
            )
        }
        schedules |= {name: schedule.until(horizon) for name, schedule in self.hp.items()}
        for name in point:
            if name not in _OWN and name.removeprefix("decay_") not in self.after:
                schedules[name] = as_schedule(point[name]).until(horizon)
        for name in self.after:
            trunk = self.hp[name] if name in self.hp else as_schedule(point[name])
            schedules[name] = trunk.until(joint).then(as_schedule(point[f"decay_{name}"]).until(horizon - joint))
        return {**schedules, "keep_at": self._keep_at(horizon, joint, schedules)}

    def __repr__(self) -> str:
        """Return the call of :func:`wsd_sweep` that makes the sweep."""
        values = {name: list(dict.fromkeys(point[name] for point in self.points)) for name in self.points[0]}
        peak, horizons, fraction, form = [found if len(found) > 1 else found[0] for found in map(values.pop, _OWN)]
        after = {name: values.pop(f"decay_{name}") for name in self.after}
        fixed = {
            name: trunk if trunk != as_schedule(trunk.value(0)) else trunk.value(0) for name, trunk in self.hp.items()
        }
        given = {
            "decay_fraction": (fraction, 0.2),
            "decay_form": (form, "linear"),
            "final": (self.final, 0.0),
            "hp": (fixed | values, {}),
            "decay_hp": (after, {}),
            "keep_every": (self.keep_every, None),
            "name": (self.name, "lr"),
        }
        words = [f", {name}={value!r}" for name, (value, default) in given.items() if value != default]
        return f"wsd_sweep({peak!r}, horizons={horizons!r}, warmup={self.warmup!r}{''.join(words)})"

    def _suggest(self, trial: Trial, name: str) -> Any:
        """Suggest a parameter, with a distribution that a later sweep of the same study may change if possible."""
        values: list[Any] = list(dict.fromkeys(point[name] for point in self.points))
        if name == "decay_form":
            return trial.suggest_categorical(name, _FORMS)
        if all(type(value) is int for value in values) and name not in ("peak", "decay_fraction"):
            return trial.suggest_int(name, min(values), max(values))
        if all(type(value) in (int, float) for value in values):
            return trial.suggest_float(name, min(values), max(values))
        return trial.suggest_categorical(name, values)

    def _keep_at(self, horizon: int, joint: int, schedules: Mapping[str, Schedule]) -> tuple[int, ...]:
        """Return the steps on the trial's trunk at which others branch from it, or may do so later."""
        joints = {_joint(point) for point in self.points if _joint(point) < point["horizon"]}
        # The first step of a decay still has the full rate; other hyperparameters change at once.
        marks = {at + 1 for at in joints} | (joints if self.after else set())
        at_once = 0 < joint < horizon and any(
            not same(schedules[name].value(joint), schedules[name].value(joint - 1)) for name in self.after
        )
        end = min(horizon, joint if at_once else joint + 1)
        if self.keep_every is not None:
            marks.update(range(self.keep_every, end + 1, self.keep_every))
        return tuple(sorted(mark for mark in marks if 0 < mark <= end))


def wsd_sweep(
    peak: float | Sequence[float],
    *,
    horizons: int | Sequence[int],
    warmup: int,
    decay_fraction: float | Sequence[float] = 0.2,
    decay_form: DecayForm | Sequence[DecayForm] = "linear",
    final: float = 0.0,
    hp: Mapping[str, Schedule | Scalar | Sequence[Scalar]] | None = None,
    decay_hp: Mapping[str, Scalar | Sequence[Scalar]] | None = None,
    keep_every: int | None = None,
    name: str = "lr",
) -> WSDSweep:
    """Return a space with a trial for every combination of these values. All decays branch off common trunks.

    A trunk (one peak, one seed, ...) is trained once, as far as the longest horizon needs it, and each decay once. With
    S the sum of the horizons of all trials of a trunk, T the longest horizon and f the decay fraction, their merge rate
    is ``S / ((1 - f) T + f S)``. The states at which decays begin are kept permanently: a decay of another form, or
    under other data, that is added to the same store later costs only its own steps.

    Args:
        peak: the value after the warm-up. Like all arguments that may be sequences, one value or several.
        horizons: lengths of trials, in steps.
        warmup: steps of the warm-up.
        decay_fraction: share of a trial's steps in which it decays, from 0 (never) to 1; rounded to whole steps.
        decay_form: form of the decay, as for :func:`wsd`.
        final: value that decays lead to.
        hp: the other hyperparameters: schedules or plain values, and sequences of values to be tried: ``{"seed": [0,
            1], "batch_size": 64}``. Each value of a sequence has trunks of its own.
        decay_hp: values that some of these have during the decay: ``{"mixture": ["web", "web+code"]}``. They are
            parameters of the study under names such as ``decay_mixture``.
        keep_every: also keep the states of trunks at all multiples of this many steps, for later horizons.
        name: the hyperparameter that warms up and decays.

    Raises:
        ScheduleError: an argument is invalid; the message names it.
    """
    text("the name of a hyperparameter").of("name", name, ScheduleError)
    mapping = optional(instance(Mapping, "a dict of values by the names of hyperparameters"))
    hp, decay_hp = mapping.of("hp", hp, ScheduleError), mapping.of("decay_hp", decay_hp, ScheduleError)
    others, after = dict(hp or {}), dict(decay_hp or {})
    for other in others:
        if other in (*_OWN, name):
            raise ScheduleError(f"hp has {other!r}, which the sweep sets itself; give the hyperparameter another name")
    for other in after:
        if other not in others:
            raise ScheduleError(f"decay_hp has {other!r}, but hp does not; give hp its value before the decay")
    choices: dict[str, list[Any]] = {
        "peak": [real("peak", value) for value in _several(peak)],
        "horizon": [count("horizons", value, least=1) for value in _several(horizons)],
        "decay_fraction": [real("decay_fraction", value) for value in _several(decay_fraction)],
        "decay_form": [one_of(*_FORMS).of("decay_form", form, ScheduleError) for form in _several(decay_form)],
    }
    choices |= {other: _several(value) for other, value in others.items() if _is_several(value)}
    for other, value in after.items():
        if f"decay_{other}" in choices:
            raise ScheduleError(f"hp has 'decay_{other}', which is the parameter of decay_hp for {other!r}; rename one")
        choices[f"decay_{other}"] = _several(value)
    for parameter, values in choices.items():
        if not values:
            called = "horizons" if parameter == "horizon" else parameter
            raise ScheduleError(f"{called} is empty; give at least one value")
        choices[parameter] = list(dict.fromkeys(map(canonical, values)))
    points = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    for fraction in choices["decay_fraction"]:
        if not 0 <= fraction <= 1:
            raise ScheduleError(f"decay_fraction is {fraction!r}; it must be from 0 to 1")
    steps = max(choices["horizon"])
    for point in points:
        decay = point["horizon"] - _joint(point)
        wsd(point["peak"], point["horizon"], warmup=warmup, decay=decay, final=final, decay_form=point["decay_form"])
    return WSDSweep(
        # Without a decay, its form makes no difference.
        points=tuple(p for p in points if p["decay_fraction"] or p["decay_form"] == choices["decay_form"][0]),
        steps=steps,
        warmup=warmup,
        final=final,
        keep_every=None if keep_every is None else count("keep_every", keep_every, least=1),
        name=name,
        hp={other: _held(other, value, steps) for other, value in others.items() if not _is_several(value)},
        after=tuple(after),
    )


def _joint(point: Mapping[str, Any]) -> int:
    """Return the first step of a trial's decay."""
    horizon: int = point["horizon"]
    decay: int = round(point["decay_fraction"] * horizon)
    return horizon - decay


def _held(name: str, value: Any, steps: int) -> Schedule:
    schedule = as_schedule(value)
    if schedule.length is not None and schedule.length < steps:
        raise ScheduleError(
            f"the schedule of {name!r} ends at step {schedule.length}, before the longest horizon, {steps}; add "
            f".then(...)"
        )
    return schedule


def _is_several(value: object) -> bool:
    is_array_of_one = getattr(value, "shape", None) == ()
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and not is_array_of_one


def _several(value: Any) -> list[Any]:
    if isinstance(value, set | frozenset):
        return sorted(value)  # in the same order in every process
    return list(value) if _is_several(value) else [value]
