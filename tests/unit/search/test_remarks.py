"""What users probably did not mean is said before anything is trained."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, OptunaPruner, SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.rehearsal.preflight import preflight
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing, Tape
from hpstage.training.code.unread import unread
from hpstage.training.warned import warn_once

pytestmark = pytest.mark.sampled(4)


class Reading(Tape):
    version = "reading"

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self.momentum = hp["momentum"], hp.get("lr")
        super().train(step, hp)


@dataclasses.dataclass
class Config:
    width: int
    depth: int = 2


class ByConfig(Reading):
    config = Config


class Spreading(Reading):
    def setup(self, hp: Mapping[str, Scalar]) -> None:
        super().setup(dict(**hp))


def function(run: hpstage.Run) -> None:
    momentum = run.hp["momentum"]
    for _ in run.steps():
        run.report(score=momentum)


@pytest.mark.parametrize(
    ("subject", "found"),
    [
        (Reading(), {"momentun": "momentum"}),
        (ByConfig(), {"momentun": "momentum"}),
        (Spreading(), {}),
        (function, {"momentun": "momentum"}),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_unread_finds_a_hyperparameter_that_training_code_spells_differently(
    subject: object, found: dict[str, str | None]
) -> None:
    names = ["momentum", "momentun", "zz", "seed", "batch_size", "width"]
    assert unread(subject, names) == found


def numbered(run: hpstage.Run) -> None:
    widths = [run.hp[f"width{index}"] for index in range(2)] + [run.hp["encoder." + name] for name in ("lr", "depth")]
    for _ in run.steps():
        run.report(score=widths[0])


def from_table(run: hpstage.Run) -> None:
    BUILDERS[0](run.hp)


def build(values: Mapping[str, Scalar]) -> object:
    return values["width0"], values["width1"], values["encoder.lr"]


BUILDERS = [build]


class Handing(Tape):
    version = "handing"

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        super().setup(hp)
        self.made = made({name: value for name, value in hp.items() if name != "seed"})


def made(values: dict[str, Scalar]) -> object:
    return dict(width0=1, **values)


@pytest.mark.parametrize("subject", [numbered, from_table, Handing()])
def test_unread_finds_nothing_if_training_code_builds_names_or_passes_all_values_on(subject: object) -> None:
    assert unread(subject, ["width0", "width1", "encoder.lr"]) == {}


def search(caplog: pytest.LogCaptureFixture, space: Callable[[optuna.Trial], Any], **options: Any) -> str:
    study = options.pop("study", None) or optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    with caplog.at_level(logging.WARNING, "hpstage"):
        hpstage.optimize(
            study,
            options.pop("trainable", None) or Tape(),
            space,
            metric="score",
            steps=4,
            n_trials=options.pop("n_trials", 3),
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
            **options,
        )
    return caplog.text


def test_a_search_warns_once_of_a_misspelled_hyperparameter(caplog: pytest.LogCaptureFixture) -> None:
    text = search(caplog, lambda trial: {"momentun": trial.suggest_float("m", 0.1, 0.9)}, trainable=Reading())
    assert text.count("mentions the hyperparameter 'momentun'; did you mean 'momentum'?") == 1


@pytest.mark.parametrize(
    ("pruner", "algorithm", "said"),
    [
        (None, FullTraining(), False),  # Optuna's default, which nobody chose
        (optuna.pruners.NopPruner(), FullTraining(), False),
        (optuna.pruners.HyperbandPruner(), SuccessiveHalving(2, 2), True),
        (optuna.pruners.MedianPruner(n_warmup_steps=3), FullTraining(), True),
        (optuna.pruners.MedianPruner(n_warmup_steps=3), OptunaPruner(2), False),
    ],
)
def test_a_search_warns_of_a_pruner_that_its_algorithm_never_calls(
    pruner: optuna.pruners.BasePruner | None, algorithm: Algorithm, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=0))
    text = search(caplog, lambda trial: {"a": trial.suggest_int("a", 1, 3)}, study=study, algorithm=algorithm)
    assert ("does not use the study's" in text) == said


@pytest.mark.parametrize(
    ("algorithm", "n_trials", "said"),
    [(FullTraining(), 12, True), (FullTraining(), 5, False), (FullTraining(), 17, False), (FullTraining(4), 12, False)],
)
def test_a_search_warns_of_a_sampler_that_cannot_learn_from_its_trials(
    algorithm: Algorithm, n_trials: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))  # its first ten are random in any case
    text = search(
        caplog,
        lambda trial: {"a": trial.suggest_float("a", 0.0, 1.0)},
        study=study,
        algorithm=algorithm,
        n_trials=n_trials,
    )
    assert ("TPESampler learns from none" in text) == said


def test_a_search_does_not_warn_of_a_sampler_that_learns_from_trials_of_an_earlier_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    space = lambda trial: {"a": trial.suggest_float("a", 0.0, 1.0)}  # noqa: E731
    assert "learns from none" in search(caplog, space, study=study, n_trials=12)
    caplog.clear()
    assert "learns from none" not in search(caplog, space, study=study, n_trials=12)


def test_values_that_a_space_reports_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def reporting(trial: optuna.Trial) -> dict[str, object]:
        trial.report(100.0, step=1)
        assert not trial.should_prune()
        return {"a": trial.suggest_int("a", 1, 3)}

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    assert (
        search(caplog, reporting, study=study).count("trial.report() and trial.should_prune() in the space do nothing")
        == 1
    )
    assert all(trial.intermediate_values.keys() == {4} for trial in study.trials)


def test_no_hyperparameter_name_is_suggested_if_no_name_is_similar(caplog: pytest.LogCaptureFixture) -> None:
    text = search(caplog, lambda trial: {"momentum": 0.5, "unused": trial.number}, trainable=Reading())
    assert "did you mean" not in text


@pytest.mark.parametrize(("workers", "window", "said"), [(4, 1, True), (4, 4, False), (1, 1, False)])
def test_a_search_warns_of_a_window_that_leaves_workers_idle(
    workers: int, window: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(), sampler=optuna.samplers.RandomSampler(seed=0))
    with caplog.at_level(logging.WARNING, "hpstage"):
        hpstage.optimize(
            study,
            Tape(),
            lambda trial: {"a": trial.suggest_int("a", 1, 3)},
            metric="value",
            steps=4,
            n_trials=3,
            algorithm=OptunaPruner(window=window),
            executor=SimulatedExecutor(workers),
            store=MemoryJournal(),
        )
    assert ("has fewer trials open at a time" in caplog.text) == said


@pytest.mark.parametrize("fails", [False, True])
def test_a_search_reports_that_nothing_was_trained_if_its_study_has_the_whole_grid(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def grid() -> optuna.samplers.BaseSampler:
        return optuna.samplers.GridSampler({"a": [5, 6, 7]}, seed=0)

    study = optuna.create_study(sampler=grid())
    space, trainable = (lambda trial: {"a": trial.suggest_int("a", 5, 7)}), Failing() if fails else Tape()
    search(caplog, space, study=study, trainable=trainable, n_trials=None)
    assert "Nothing was trained" not in caplog.text
    study.sampler = grid()
    search(caplog, space, study=study, trainable=trainable, n_trials=None)
    failed = sum(trial.state == optuna.trial.TrialState.FAIL for trial in study.trials)
    assert f"sampler's space ({3 - failed} complete, {failed} failed)" in caplog.text and bool(failed) == fails
    assert len(study.trials) == 3


def test_a_search_warns_of_a_timeout_that_leaves_no_time_to_train(caplog: pytest.LogCaptureFixture) -> None:
    space = lambda trial: {"a": trial.suggest_int("a", 5, 7)}  # noqa: E731
    search(caplog, space, timeout=1e-9)
    assert caplog.text.count("Nothing was trained before timeout=1e-09 seconds were over; the same call continues") == 1


@pytest.mark.parametrize(
    ("schedule", "step"),
    [
        (s.multistep(0.1, [2, 9]), 9),
        (s.piecewise({0: 0.1, 5: 0.2, 7: 0.3}), 5),
        (s.linear(0.1, total_iters=6), 6),
        (s.multistep(0.1, [3, 4]), None),  # at the last step: where a change is put that shall not happen
        (s.multistep(0.1, [9]).until(12), None),  # its end says that it is cut
        (s.sampled([0.1] * 9 + [0.2]), None),
        (s.step(0.1, 9), None),
        (s.cosine(0.1, 9), None),
        (s.constant(0.1).until(2).then(s.plateau(0.1, factor=0.5, patience=9)), None),
    ],
)
def test_a_search_warns_once_of_a_schedule_change_that_no_trial_reaches(
    schedule: Any, step: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    text = search(caplog, lambda trial: {"a": schedule, "b": trial.suggest_int("b", 1, 3)})
    assert text.count("changes at step") == (step is not None)
    if step is not None:
        assert f"The schedule of 'a' changes at step {step}, which no trial reaches: they have at most 4 steps" in text


def test_a_search_does_not_warn_of_a_schedule_change_that_only_few_trials_reach(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    space = lambda trial: {"a": s.multistep(0.1, [3]), "b": trial.suggest_int("b", 1, 3)}  # noqa: E731
    assert "changes at step" not in search(caplog, space, algorithm=SuccessiveHalving(1, 2))


def test_an_extension_does_not_warn_of_a_schedule_change_that_no_trial_reaches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    study, journal = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)), MemoryJournal()
    for steps in (4, 6):
        with caplog.at_level(logging.WARNING, "hpstage"):
            hpstage.optimize(
                study,
                Tape(),
                lambda trial: {"a": s.multistep(0.1, [9])},
                metric="score",
                steps=steps,
                n_trials=1,
                extend=steps == 6,
                executor=hpstage.InlineExecutor(),
                store=journal,
            )
    assert caplog.text.count("changes at step 9, which no trial reaches: they have at most 4 steps") == 1
    assert caplog.text.count("changes at step") == 1


def test_preflight_warns_once_of_a_schedule_change_that_no_trial_reaches(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "hpstage"):
        preflight(lambda trial: {"a": s.multistep(0.1, [9])}, steps=4, n_trials=2, workers=(1, 2))
    assert caplog.text.count("The schedule of 'a' changes at step 9") == 1


def test_train_warns_once_of_a_schedule_change_that_no_run_reaches(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "hpstage"):
        hpstage.train(
            Tape(),
            [{"a": s.multistep(0.1, [9]), "b": seed} for seed in (1, 2)],
            steps=4,
            metric="score",
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
        )
    assert caplog.text.count("The schedule of 'a' changes at step 9, which no trial reaches") == 1
