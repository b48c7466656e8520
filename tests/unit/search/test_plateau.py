"""Schedules that a metric decides: one branch until the metric separates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, Hyperband, PopulationBasedTraining, SuccessiveHalving
from hpstage.errors import ScheduleError, UsageError
from hpstage.plan.facts import TrialAdded
from hpstage.schedule import Plateau, Scalar
from hpstage.search.trials import Roster
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone
from tests.bundled import Tapes, Unmeasured
from tests.invariants import validate
from tests.unit.search.test_resume import Fuse

pytestmark = pytest.mark.sampled(10)

STEPS = 16


class Bumpy(Tape):
    """Its metrics go up and down as its history of values, and of nothing else, would have them."""

    version = "bumpy"
    stateless = ("fuse",)
    fuse = Fuse()

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        type(self).fuse.touch()
        super().train(step, hp)

    def evaluate(self) -> Mapping[str, float]:
        return {"score": self.score, "loss": int(self.digest[:4], 16) / 2**16}


def space(trial: optuna.Trial, most: int = 2) -> dict[str, object]:
    plateau = s.plateau(
        0.5,
        factor=0.5,
        patience=trial.suggest_int("patience", 0, 3),
        cooldown=trial.suggest_int("cooldown", 0, 1),
        metric="loss",
        every=trial.suggest_int("every", 1, most),
    )
    return {"lr": s.constant(0.25).until(2).then(plateau), "a": trial.suggest_int("a", 1, 2)}


def search(
    space: Callable[[optuna.Trial], Any] = space, trainable: object = None, n_trials: int = 12, **options: Any
) -> hpstage.Result:
    study = options.pop("study", None) or optuna.create_study(
        study_name="study", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=5)
    )
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "checkpoint_every": 3, "store": MemoryJournal()}
    settings |= {"executor": hpstage.InlineExecutor(), "n_trials": n_trials} | options
    return hpstage.optimize(study, trainable or Bumpy(), space, **settings)


def by_hand(params: Mapping[str, Any], steps: int) -> tuple[list[float], list[float]]:
    """The trial in a plain loop with torch's scheduler: its learning rates and scores, step by step."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=params["patience"], cooldown=params["cooldown"]
    )
    tape, rates, scores = Bumpy(), [], []
    tape.setup({"lr": 0.25, "a": params["a"]})
    for step in range(steps):
        rates.append(0.25 if step < 2 else optimizer.param_groups[0]["lr"])
        Tape.train(tape, step, {"lr": rates[-1], "a": params["a"]})
        scores.append(tape.score)
        looked = step + 1 - 2
        if looked > 0 and looked % params["every"] == 0:
            scheduler.step(tape.evaluate()["loss"])
    return rates, scores


def check(result: hpstage.Result, *, once: bool = True) -> None:
    """Every trial has the schedule and the values of the loop by hand, and no step was trained twice or in vain.

    Unless ``once``: a metric that is requested after others have trained past it costs the steps to it.
    """
    validate(result.plan)
    prefixes: set[tuple[object, ...]] = set()
    for trial in result.study.trials:
        planned = result.trial(trial).planned
        rates, scores = by_hand(trial.params, planned.requested)
        assert list(planned.schedules["lr"].values(planned.requested)) == rates
        assert {step: scores[step - 1] for step in trial.intermediate_values} == trial.intermediate_values
        line = [trial.params["a"], *rates]
        prefixes.update(tuple(line[:stop]) for stop in range(2, len(line) + 1))
    assert result.savings.steps_unique == len(prefixes)
    assert result.savings.steps_trained == len(prefixes) or not once


@pytest.mark.ci
@pytest.mark.parametrize(
    "algorithm",
    [FullTraining(), FullTraining(window=2), SuccessiveHalving(4, 2), ASHA(4, 2), Hyperband(4, 2)],
    ids=repr,
)
def test_plateau_trials_have_the_values_of_reduce_lr_on_plateau_under_every_algorithm(algorithm: Algorithm) -> None:
    check(search(algorithm=algorithm), once=algorithm == FullTraining())
    result = search(partial(space, most=1), algorithm=algorithm)
    check(result)
    assert any(trial.state == TrialState.COMPLETE for trial in result.study.trials)
    assert len({result.trial(number).planned.schedules["lr"] for number in range(12)}) > 4


def test_plateau_trials_share_steps_until_the_metric_separates_them() -> None:
    """Three patiences are one line until the first of them is at its end."""

    class Flat(Tape):
        version = "flat"

        def evaluate(self) -> Mapping[str, float]:
            return {"score": 1.0}

    result = search(
        lambda trial: {"lr": s.plateau(0.1, patience=[1, 3, 5][trial.number])}, Flat(), n_trials=3, steps=10
    )
    lengths = [
        result.plan.trials[f"study/{number}"].schedules["lr"].pieces()[0][1]  # type: ignore[index]
        for number in range(3)
    ]
    assert lengths == [3, 5, 7]  # the first look sets the best, and as many bad ones are borne
    assert result.savings.steps_unique == 10 + (10 - 3) + (10 - 5) == result.savings.steps_trained
    assert [trial.value for trial in result.study.trials] == [1.0] * 3


def test_a_plateau_uses_the_metric_and_direction_of_the_study_by_default() -> None:
    for direction, expected in (("maximize", [0.1] * 6), ("minimize", [0.1] * 2 + [0.05] * 2 + [0.025] * 2)):
        study = optuna.create_study(study_name="study", direction=direction)
        space = lambda trial: {"lr": s.plateau(0.1, patience=0, factor=0.5, cooldown=1), "a": 1}  # noqa: E731
        result = search(space, Rising(), study=study, n_trials=1, steps=6)
        assert list(result.schedules(0)["lr"].values(6)) == expected


class Rising(Tape):
    version = "rising"

    def evaluate(self) -> Mapping[str, float]:
        return {"score": float(len(self.digest) and self.score)}


@pytest.mark.ci
@pytest.mark.one_in(3)
@pytest.mark.parametrize("at", range(1, 36, 5))
@pytest.mark.parametrize("where", ["training", "deciding"])
def test_an_interrupted_search_makes_the_same_plateau_decisions_when_it_resumes(
    where: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between a metric and what it decides: then the decision was not written."""
    storage = f"sqlite:///{tmp_path}/study.db"
    options: dict[str, Any] = {"store": tmp_path / "store", "n_trials": 4, "algorithm": FullTraining(window=3)}

    def once() -> hpstage.Result:
        study = optuna.create_study(
            study_name="study",
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=5),
            storage=storage,
            load_if_exists=True,
        )
        return search(study=study, **options)

    if where == "training":
        monkeypatch.setattr(Bumpy, "fuse", Fuse(at))
    else:
        fuse, plan = Fuse(1 + at // 5), Roster.plan

        def interrupted(roster: Roster, added: TrialAdded, *along: Any) -> None:
            if not along:  # it is added again, with what was decided
                fuse.touch()
            plan(roster, added, *along)

        monkeypatch.setattr(Roster, "plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        once()
    result = once()
    undisturbed = search(**(options | {"store": MemoryJournal()}))
    for one, other in zip(result.study.trials, undisturbed.study.trials, strict=True):
        assert (one.value, one.params) == (other.value, other.params)
        assert one.intermediate_values == other.intermediate_values
        assert result.schedules(one.number) == undisturbed.schedules(other.number)
    validate(result.plan)


def test_an_extended_search_with_plateaus_equals_a_search_as_long_from_the_start(tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": tmp_path / "store", "n_trials": 6}
    short = search(**options, steps=7)
    longer = search(**options, study=short.study, extend=True)
    at_once = search(n_trials=6)
    last = {tuple(trial.params.items()): trial for trial in longer.study.trials}  # a longer one follows its shorter
    for trial in at_once.study.trials:
        again = last[tuple(trial.params.items())]
        assert again.value == trial.value
        assert longer.schedules(again.number) == at_once.schedules(trial.number)
    assert longer.plan.totals.steps_trained == at_once.savings.steps_trained


def _hasty(**changes: Any) -> Plateau:
    return s.plateau(1.0, factor=0.5, **({"patience": 1, "metric": "loss"} | changes))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_hasty().until(6), _hasty().until(14)),
        (_hasty().until(6), _hasty()),
        (1.0, s.constant(1.0).until(6).then(_hasty())),
        (1.0, s.constant(1.0).until(7).then(_hasty(patience=0))),
        (_hasty(patience=9), s.multistep(1.0, milestones=[8], gamma=0.5)),
    ],
    ids=["bounded", "no longer bounded", "from its end on", "later", "fixed"],
)
def test_an_extension_follows_the_changed_plateau_of_the_space_after_trained_steps(
    before: object, after: object, tmp_path: Path
) -> None:
    short = search(lambda trial: {"lr": before}, n_trials=1, steps=6, store=tmp_path)
    longer = search(lambda trial: {"lr": after}, n_trials=1, steps=14, store=tmp_path, study=short.study, extend=True)
    at_once = search(lambda trial: {"lr": after}, n_trials=1, steps=14)
    assert longer.schedules(1) == at_once.schedules(0)
    assert longer.study.trials[1].value == at_once.study.best_value
    assert len(set(at_once.schedules(0)["lr"].values(14))) > 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_hasty(patience=9), _hasty(patience=0)),
        (_hasty(patience=9), _hasty(patience=9, metric="score")),
        (1.0, _hasty(patience=0)),
    ],
    ids=["patience", "metric", "constant"],
)
def test_an_extension_that_would_change_decisions_about_trained_steps_is_refused(
    before: object, after: object, tmp_path: Path
) -> None:
    short = search(lambda trial: {"lr": before}, n_trials=1, steps=6, store=tmp_path)
    with pytest.raises(UsageError, match="trial 0 had another schedule of 'lr' in its first 6 steps"):
        search(lambda trial: {"lr": after}, n_trials=1, steps=14, store=tmp_path, study=short.study, extend=True)


def test_plateau_trials_have_the_same_values_without_sharing() -> None:
    shared, separate = search(n_trials=5), search(n_trials=5, sharing=False)
    assert [trial.value for trial in shared.study.trials] == [trial.value for trial in separate.study.trials]
    assert separate.savings.steps_trained == 5 * STEPS


def test_a_fixed_schedule_with_the_values_of_a_plateau_trial_trains_no_step_again() -> None:
    """What was decided can be requested by hand: nothing is trained for it."""
    store = MemoryJournal()
    result = search(store=store, n_trials=1)
    schedules = result.schedules(0)
    study = optuna.create_study(study_name="again", direction="maximize")
    again = search(lambda trial: schedules, study=study, store=store, n_trials=1)
    assert again.savings.steps_trained == 0
    assert again.study.best_value == result.study.best_value == alone(schedules, STEPS).score


def test_a_failed_evaluation_for_a_plateau_fails_the_trial() -> None:
    class Fails(Bumpy):
        version = "fails"

        def evaluate(self) -> Mapping[str, float]:
            if self.score > 1.5:
                raise ValueError("no metric here")
            return super().evaluate()

    result = search(lambda trial: {"lr": s.plateau(1.0, metric="loss", every=4)}, Fails(), n_trials=1)
    assert [trial.state for trial in result.study.trials] == [TrialState.FAIL]
    assert "no metric here" in result.study.trials[0].user_attrs["hpstage:failure"]
    assert result.savings.steps_trained < STEPS


def test_plateau_trials_that_stop_themselves_end_with_the_value_of_a_plain_loop() -> None:
    class Ends(Bumpy):
        version = "ends"

        def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
            super().train(step, hp)
            if step == 8:
                raise hpstage.StopTraining("enough")

    result = search(trainable=Ends(), n_trials=4)
    for trial in result.study.trials:
        assert trial.state == TrialState.COMPLETE
        assert trial.user_attrs["hpstage:steps"] == 9
        assert trial.value == by_hand(trial.params, 9)[1][-1]


def test_plateau_trials_are_exact_with_evaluate_every() -> None:
    check(search(evaluate_every=3, n_trials=5))


@pytest.mark.parametrize(
    ("plateau", "options", "message"),
    [
        (s.plateau(0.1, metric="los"), {}, r"'los'"),
        (s.plateau(0.1, metric="hpstage:seconds"), {}, r"trial 0, hyperparameter 'lr'.*measures the machine"),
        (s.plateau(0.1), {"algorithm": PopulationBasedTraining(interval=4)}, r"'lr'.*cannot be forked"),
    ],
)
def test_a_plateau_that_the_search_cannot_follow_is_refused_before_training(
    plateau: Plateau, options: dict[str, Any], message: str
) -> None:
    study = optuna.create_study(study_name="study", direction="maximize")
    with pytest.raises(UsageError, match=message):
        search(lambda trial: {"lr": plateau}, study=study, **options)
    assert not any(trial.state == TrialState.COMPLETE for trial in study.trials)


def test_a_plateau_on_a_noisy_metric_is_refused() -> None:
    class Noisy(Bumpy):
        version = "noisy"
        noisy = ("loss",)

    with pytest.raises(UsageError, match="measures the machine as well"):
        search(trainable=Noisy())


@pytest.mark.ci
def test_preflight_estimates_a_search_with_plateaus_by_rehearsals() -> None:
    estimate = hpstage.preflight(space, steps=STEPS, n_trials=8, workers=(2,), rehearsals=3)
    assert not estimate.exact
    assert estimate.rehearsals == 3
    assert estimate.trials.median == 8


def test_a_plateau_of_a_multi_objective_study_uses_the_direction_of_its_objective() -> None:
    def two(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": s.plateau(0.5, metric="score", patience=0, factor=0.5, every=2), "a": 1}

    study = optuna.create_study(study_name="study", directions=["minimize", "maximize"])
    result = search(two, Rise(), study=study, metric=["loss", "score"], n_trials=1, steps=8)
    assert list(result.schedules(0)["lr"].values(8)) == [0.5] * 8


class Rise(Tape):
    version = "rise"

    def evaluate(self) -> Mapping[str, float]:
        self.looked = getattr(self, "looked", 0)
        return {"loss": 1.0, "score": self.score + len(self.digest)}


def test_a_stopped_study_keeps_the_metrics_that_its_plateaus_evaluated() -> None:
    """Three trials are trained side by side; the shortest ends the study when the others have been looked at."""

    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        study.stop()

    result = search(
        lambda trial: {"lr": s.plateau(0.5), "a": trial.number, "steps": 9 if trial.number else 3},
        Tapes(Tape()),
        callbacks=[stop],
        n_trials=3,
        executor=Unmeasured(),
    )
    assert [trial.state for trial in result.study.trials] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]
    for trial in result.study.trials:
        looked = [state.step for state in result.trial(trial).planned.states() if state.metrics is not None]
        assert sorted(trial.intermediate_values) == looked != []


@pytest.mark.parametrize("wrong", [lambda: s.piecewise({0: 1, 5: s.plateau(0.1)}), lambda: s.plateau(0.1).since(3)])  # type: ignore[dict-item]
def test_piecewise_and_since_refuse_a_plateau(wrong: Callable[[], object]) -> None:
    with pytest.raises(ScheduleError, match=r"s\.plateau\(\.\.\.\).*\.until\(step\)"):
        wrong()
