"""The front door, in this process: Optuna on one side, exact values on the other."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algos import (
    ASHA,
    FullTraining,
    Hyperband,
    MedianStopping,
    OptunaPruner,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from hpstage.errors import ScheduleError, UsageError
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone
from tests.unit.searches import schedules

pytestmark = pytest.mark.sampled(16)

optuna.logging.set_verbosity(optuna.logging.ERROR)


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 3), 4: trial.suggest_int("late", 1, 3)}),
        "b": s.linear(trial.suggest_categorical("b", [1.0, 2.0]), total_iters=trial.suggest_int("iters", 2, 6)),
        "mixture": s.piecewise({0: "books", trial.suggest_int("switch", 1, 7): "code"}),
    }


def run(study: optuna.Study, trainable: object = None, **options: object) -> hpstage.Result:
    settings_: dict[str, object] = {"metric": "score", "steps": 8, "n_trials": 12, "executor": hpstage.InlineExecutor()}
    settings_ |= {"store": MemoryJournal(), "space": space} | options
    chosen = settings_.pop("space")
    return hpstage.optimize(study, trainable or Tape(), chosen, **settings_)  # type: ignore[arg-type]


def create(seed: int = 0, **options: object) -> optuna.Study:
    return optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=seed),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.ci
@given(st.lists(st.tuples(schedules(8), schedules(8)), min_size=1, max_size=6), st.data())
@settings(max_examples=15)
def test_every_trial_has_the_same_metrics_as_without_sharing(pairs, data):
    order = data.draw(st.permutations(range(len(pairs))))

    def listed(trial: optuna.Trial) -> dict[str, object]:
        first, second = pairs[order[trial.number]]
        return {"a": first, "b": second}

    result = run(create(), space=listed, n_trials=len(pairs))
    for number, pair in enumerate(order):
        first, second = pairs[pair]
        expected = alone({"a": first, "b": second}, 8)
        planned = result.plan.trials[f"{result.study.study_name}/{number}"]
        state = planned.node_at(8).states[8]
        assert state.metrics == expected.evaluate()
        assert result.study.trials[number].value == expected.score
    assert result.savings.steps_trained == result.savings.steps_unique


def test_successive_halving_prunes_and_completes_the_same_trials_as_a_plain_implementation():
    study = create()
    result = run(study, n_trials=16, algorithm=SuccessiveHalving(2, 2, tree_aware=False))
    scores = {}
    for trial in study.trials:
        line = dict(result.plan.trials[f"{study.study_name}/{trial.number}"].schedules)
        scores[trial.number] = {step: alone(line, step).score for step in (2, 4, 8)}
    field = list(scores)
    expected = {}
    for step, population in ((2, 16), (4, 8), (8, 4)):
        assert len(field) == population
        for number in field:
            expected.setdefault(number, {})[step] = scores[number][step]
        field = sorted(field, key=lambda n: (-scores[n][step], n))[: population // 2]
    assert {t.number: t.intermediate_values for t in study.trials} == expected
    states = [t.state for t in study.trials]
    assert states.count(TrialState.COMPLETE) == 4 and states.count(TrialState.PRUNED) == 12
    assert study.best_value == max(scores[n][8] for n in scores if 8 in expected[n])


SAMPLERS = {
    "grid": lambda: optuna.samplers.GridSampler({"x": [0.5, 1.5], "n": [1, 3], "kind": ["p", "q"]}, seed=1),
    "brute force": lambda: optuna.samplers.BruteForceSampler(seed=1),
    "random": lambda: optuna.samplers.RandomSampler(seed=1),
    "quasi-random": lambda: optuna.samplers.QMCSampler(seed=1),
    "TPE": lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=4),
    "multivariate TPE": lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=4, multivariate=True),
    "CMA-ES": lambda: optuna.samplers.CmaEsSampler(seed=1, n_startup_trials=4),
    "GP": lambda: optuna.samplers.GPSampler(seed=1, n_startup_trials=4, deterministic_objective=True),
    "NSGA-II": lambda: optuna.samplers.NSGAIISampler(seed=1, population_size=4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_study_has_the_same_trials_as_plain_optuna_under_every_sampler(name):
    def tuned(trial: optuna.Trial) -> dict[str, object]:
        x = trial.suggest_float("x", 0.5, 1.5, step=0.25 if name == "brute force" else None)
        late = 2.0 if trial.suggest_categorical("kind", ["p", "q"]) == "p" else x
        return {"a": s.piecewise({0: x, trial.suggest_int("n", 1, 3): late})}

    plain = optuna.create_study(direction="maximize", sampler=SAMPLERS[name]())
    plain.optimize(
        lambda trial: alone({n: s.as_schedule(v).until(4) for n, v in tuned(trial).items()}, 4).score, n_trials=8
    )
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[name]())
    run(study, space=tuned, n_trials=8, steps=4, algorithm=FullTraining(window=1))
    assert [(t.params, t.value) for t in study.trials] == [(t.params, t.value) for t in plain.trials]


def test_a_search_with_tpe_and_a_window_completes_all_trials():
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=4))
    run(study, n_trials=30, algorithm=FullTraining(window=4))
    assert len(study.trials) == 30
    assert all(t.state == TrialState.COMPLETE for t in study.trials)


def test_the_same_seed_gives_the_same_study():
    def once() -> list[tuple[dict[str, object], float | None]]:
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
        run(study, n_trials=25, algorithm=FullTraining(window=5))
        return [(t.params, t.value) for t in study.trials]

    assert once() == once()


def test_callbacks_are_called_and_may_stop_the_study():
    seen = []

    def stop_at_five(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        seen.append(trial.number)
        if len(seen) == 5:
            study.stop()

    study = create()
    run(study, n_trials=None, algorithm=FullTraining(window=1), callbacks=[stop_at_five])
    assert seen == [0, 1, 2, 3, 4]


class Stopper:
    """Stops the study when so many of its trials are complete, like Optuna's MaxTrialsCallback."""

    def __init__(self, complete: int) -> None:
        self.complete = complete

    def __call__(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if len(study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])) >= self.complete:
            study.stop()


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", [FullTraining(), FullTraining(window=8), SuccessiveHalving(2, 2), ASHA(2, 2)])
def test_a_stopped_study_leaves_no_running_trial_and_ends_its_search(algorithm):
    study = create()
    result = run(study, n_trials=24, algorithm=algorithm, callbacks=[Stopper(2)])
    states = Counter(trial.state for trial in study.trials)
    assert TrialState.RUNNING not in states
    if isinstance(algorithm, FullTraining):
        # Those that were being trained, or were trained by then: on a loaded machine, more results arrive together.
        assert 2 <= states[TrialState.COMPLETE] <= 8
    for trial in study.trials:
        if trial.state == TrialState.PRUNED and "hpstage:ended" in trial.user_attrs:
            assert trial.intermediate_values
        if trial.state == TrialState.FAIL:
            assert trial.user_attrs["hpstage:ended"] == "study.stop()" and not trial.intermediate_values
    assert result.plan.searches[study.study_name].ended


def test_a_queued_trial_left_waiting_by_a_stop_completes_later_and_is_not_marked_as_ended():
    study = create()
    for value in (1, 2, 3, 4):
        study.enqueue_trial({"a": value})
    journal = MemoryJournal()
    options = {"space": lambda trial: {"a": trial.suggest_int("a", 1, 4)}, "store": journal, "n_trials": 4}
    run(study, algorithm=FullTraining(window=2), callbacks=[Stopper(1)], **options)
    assert TrialState.WAITING in {trial.state for trial in study.trials}
    run(study, **options)
    for trial in study.trials:
        assert trial.state == TrialState.COMPLETE and "hpstage:ended" not in trial.user_attrs


def test_a_space_that_stops_the_study_while_a_trial_is_forked_ends_the_search():
    study = create()

    def space(trial: optuna.Trial) -> dict[str, object]:
        if trial.number == 6:
            study.stop()
        return {"a": trial.suggest_float("a", 1.0, 9.0)}

    run(study, space=space, n_trials=6, algorithm=PopulationBasedTraining(3))
    assert {trial.state for trial in study.trials} == {TrialState.PRUNED, TrialState.FAIL}


def test_grid_points_left_out_by_a_stop_are_searched_by_the_next_call():
    journal = MemoryJournal()
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"a": [1, 2, 3, 4, 5, 6]}))

    def search(**options):
        return run(study, space=lambda trial: {"a": trial.suggest_int("a", 1, 6)}, store=journal, **options)

    search(n_trials=6, callbacks=[Stopper(2)])
    done = [trial.params["a"] for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert 2 <= len(done) < 6
    search(n_trials=None)
    complete = [trial.params["a"] for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert sorted(complete) == [1, 2, 3, 4, 5, 6]
    assert len(study.trials) == 6


def test_an_equal_search_on_the_same_store_trains_no_step_again():
    journal = MemoryJournal()
    store = {"store": journal}
    first = run(create(), **store)
    assert first.savings.steps_trained > 0
    again = run(create(), **store)
    assert again.savings.steps_trained == 0
    assert [t.value for t in again.study.trials] == [t.value for t in first.study.trials]


def test_the_savings_text_names_what_took_longer_if_sharing_saved_nothing():
    savings = run(create()).savings
    lost = dataclasses.replace(
        savings,
        worker_seconds=savings.worker_seconds_alone + 2.0,
        load_seconds=1.5,
        save_seconds=0.5,
        wasted_seconds=0.0,
    )
    assert "nothing: 2.0 s more; loading states took 1.5 s\n" in str(lost)
    much = dataclasses.replace(lost, worker_seconds=lost.worker_seconds + 1800.0)
    assert "nothing: 30.0 min more; loading states took 1.5 s\n" in str(much)
    assert "nothing" not in str(dataclasses.replace(lost, worker_seconds=savings.worker_seconds_alone))


class Trying(hpstage.InlineExecutor):
    """Counts how often a trainable is tried out."""

    tried = 0

    def try_out(self, initial):
        self.tried += 1
        return super().try_out(initial)


def test_a_trainable_is_not_tried_out_again_on_a_store_unless_another_metric_is_requested():
    store, first, second = MemoryJournal(), Trying(), Trying()
    run(create(0), n_trials=2, store=store, executor=first)
    run(create(1), n_trials=2, store=store, executor=second)
    assert (first.tried, second.tried) == (1, 0)
    with pytest.raises(UsageError, match="'hash', 'score', but metric='accuracy'"):
        run(create(2), n_trials=2, store=store, executor=second, metric="accuracy")
    assert second.tried == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_trials": -1}, "n_trials is -1"),
        ({"n_trials": -3}, "n_trials is -3"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"metric": ""}, "metric"),
        ({"metric": "accuracy"}, "'hash', 'score', but metric='accuracy'"),
        ({"timeout": -1}, "timeout"),
        ({"algorithm": "sha"}, "algorithm"),
        ({"algorithm": SuccessiveHalving(min_steps=9)}, "min_steps is 9, but a trial has 8 steps"),
        ({"algorithm": SuccessiveHalving(reduction_factor=1)}, "reduction_factor is 1"),
        ({"algorithm": SuccessiveHalving(min_steps=0)}, "min_steps is 0"),
        ({"algorithm": SuccessiveHalving(), "n_trials": None}, "give n_trials"),
        ({"algorithm": FullTraining(window=0)}, "window is 0"),
        ({"space": 3}, "space is 3; give a function of an optuna.Trial"),
        ({"space": lambda trial: [1]}, "space\\(\\) returned list"),
        ({"space": lambda trial: {}}, "no hyperparameters"),
        ({"space": lambda trial: {"a": math.nan}}, "'a'"),
        ({"space": lambda trial: {"a": [1, 2]}}, "'a'"),
        ({"space": lambda trial: {"a": s.onecycle(0.1, 5), "steps": 6}}, "'a' ends at step 5, but space.* 6 steps"),
        ({"space": lambda trial: {"a": s.onecycle(1, 9), "b": s.onecycle(1, 10)}}, "end at different steps"),
        ({"executor": 7}, "executor cannot be 7; give hpstage.local_cluster"),
        ({"store": "redis://localhost"}, "give checkpoints=, a location"),
        ({"store": "etcd://localhost"}, "no store of the kind etcd://"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
    ],
)
def test_invalid_arguments_of_optimize_are_named_before_training(options, message):
    class Untouched(Tape):
        def train(self, step, hp):
            raise AssertionError("trained")

    study = create()
    with pytest.raises(UsageError, match=message):
        run(study, Untouched(), **options)
    assert all(t.state == TrialState.FAIL for t in study.trials)


def test_the_number_of_metrics_must_match_the_objectives_of_the_study():
    two = optuna.create_study(directions=["maximize", "minimize"])
    with pytest.raises(UsageError, match=r"2 objectives, but metric names 1"):
        run(two)
    with pytest.raises(UsageError, match=r"1 objective, but metric names 2"):
        run(create(), metric=["score", "hash"])
    with pytest.raises(UsageError, match=r"'nothing' was requested"):
        run(two, metric=["score", "nothing"])


def test_objectives_of_a_study_are_named_after_the_metrics_unless_the_user_named_them():
    two = optuna.create_study(directions=["maximize", "minimize"])
    with pytest.raises(UsageError):
        run(two, metric=["score", "nothing"])
    assert two.metric_names is None
    run(two, metric=["score", "hash"], n_trials=1)
    assert two.metric_names == ["score", "hash"]
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        (own := create()).set_metric_names(["mine"])
    run(own, n_trials=1)
    assert own.metric_names == ["mine"]


@pytest.mark.parametrize(
    "algorithm", [SuccessiveHalving(2, 2), ASHA(2, 2), Hyperband(2, 2), MedianStopping(), OptunaPruner()], ids=repr
)
def test_algorithms_that_compare_values_are_refused_for_several_objectives(algorithm):
    two = optuna.create_study(directions=["maximize", "minimize"])
    with pytest.raises(UsageError, match=r"compares trials by one value, but the study has 2 objectives; use Full"):
        run(two, Tape(), metric=["score", "hash"], algorithm=algorithm)
    assert two.trials == []


def test_schedule_errors_name_the_trial_and_the_hyperparameter():
    with pytest.raises(ScheduleError, match=r"trial 0.*'lr'"):
        run(create(), space=lambda trial: {"lr": float("inf")})


def test_trials_of_a_conditional_space_have_exact_values():
    def conditional(trial: optuna.Trial) -> dict[str, object]:
        if trial.suggest_categorical("kind", ["x", "y"]) == "x":
            return {"a": 1}
        return {"a": 1, "b": trial.suggest_int("b", 1, 2)}

    study = create()
    result = run(study, space=conditional)
    for trial in study.trials:
        line = result.plan.trials[f"{study.study_name}/{trial.number}"].schedules
        assert trial.value == alone(line, 8).score


def test_a_schedule_may_mix_values_of_every_json_type():
    values = ["adam", "sgd", True, False, 1, 2.5, None]
    pieces = s.piecewise(dict(enumerate(values)))
    study = create()
    run(study, space=lambda trial: {"a": 1, "odd": pieces}, n_trials=1, steps=8)
    assert study.trials[0].value == alone({"a": s.constant(1), "odd": pieces}, 8).score


@pytest.mark.ci
def test_a_report_can_be_written_after_each_of_several_calls(tmp_path):
    """The best trial of a later call may stem from an earlier one."""
    study = create()
    store = {"store": tmp_path / "plan"}
    for _ in range(2):
        result = run(study, n_trials=6, algorithm=SuccessiveHalving(min_steps=2, reduction_factor=2), **store)
        assert result.write_report(tmp_path / "report").exists()


@pytest.mark.ci
def test_the_makespan_has_a_lower_bound_unless_the_store_held_earlier_training():
    journal = MemoryJournal()
    first = run(create(), store=journal)
    assert first.savings.lower_bound_seconds is not None
    assert first.savings.makespan >= first.savings.lower_bound_seconds
    assert run(create(), store=journal).savings.lower_bound_seconds is None


@pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", ["grid", "brute force"])
@pytest.mark.parametrize("algorithm", [FullTraining(), ASHA(2, 2)], ids=repr)
@pytest.mark.parametrize("n_trials", [None, 30])
def test_a_finite_space_is_searched_completely_and_no_point_twice(name, algorithm, n_trials):
    def finite(trial: optuna.Trial) -> dict[str, object]:
        x = trial.suggest_float("x", 0.5, 1.5, step=1.0)
        kind = trial.suggest_categorical("kind", ["p", "q"])
        return {"a": s.piecewise({0: x, trial.suggest_int("n", 1, 3, step=2): 2.0 if kind == "p" else x})}

    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[name]())
    run(study, space=finite, n_trials=n_trials, steps=8, algorithm=algorithm)
    assert len(study.trials) == len({tuple(sorted(t.params.items())) for t in study.trials}) == 8
    assert all(trial.state.is_finished() for trial in study.trials)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainable": Tape}, r"Tape is a class: pass an instance of it, Tape\(\.\.\.\)"),
        ({"algorithm": SuccessiveHalving}, r"algorithm is the class SuccessiveHalving; give an instance"),
        ({"executor": hpstage.InlineExecutor}, r"executor is the class InlineExecutor; give an instance"),
    ],
)
def test_a_class_given_instead_of_an_instance_is_named(arguments, message):
    with pytest.raises(UsageError, match=message):
        run(create(), arguments.pop("trainable", Tape()), **arguments)


def test_a_study_with_several_objectives_has_a_report(tmp_path):
    study = optuna.create_study(directions=["maximize", "minimize"])
    page = run(study, metric=["score", "hash"]).write_report(tmp_path).read_text(encoding="utf-8")
    assert "score (maximize), hash (minimize)" in page and "on the Pareto front" in page
