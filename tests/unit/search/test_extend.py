"""A search that is extended, to more steps or a larger population, ends as one that was as large from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, Hyperband, MedianStopping, PopulationBasedTraining, SuccessiveHalving
from hpstage.errors import UsageError
from hpstage.plan.facts import SearchEnded
from hpstage.plan.log import read_facts
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone
from tests.invariants import validate
from tests.records import separated
from tests.unit.search.test_resume import Fuse, Fused

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.sampled(5),
    pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning"),
]

ALGORITHMS = [
    FullTraining(),
    SuccessiveHalving(2, 2),
    SuccessiveHalving(2, 2, tree_aware=False),
    Hyperband(2, 2),
    PopulationBasedTraining(2),
]


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 3), 5: trial.suggest_int("late", 1, 3)}),
        "b": trial.suggest_float("b", 0.5, 2.0, step=0.5),
    }


def create(storage: Any = None) -> optuna.Study:
    sampler = optuna.samplers.RandomSampler(seed=3)
    return optuna.create_study(
        study_name="x", direction="maximize", sampler=sampler, storage=storage, load_if_exists=True
    )


def run(study: optuna.Study, store: Any, trainable: object = None, **options: Any) -> hpstage.Result:
    settings: dict[str, Any] = {"metric": "score", "steps": 8, "n_trials": 10, "checkpoint_every": 1, "space": space}
    settings |= {"executor": hpstage.InlineExecutor(), "store": store} | options
    return hpstage.optimize(study, trainable or Tape(), settings.pop("space"), **settings)


def lines(study: optuna.Study) -> list[FrozenTrial]:
    """The latest trial of each line: those that were carried on stand where the first of their line stood."""
    place: dict[int, int] = {}
    latest: list[FrozenTrial] = []
    for trial in study.trials:
        before = trial.user_attrs.get("hpstage:extends")
        if before is None:
            place[trial.number] = len(latest)
            latest.append(trial)
        else:
            place[trial.number] = place[before]
            latest[place[trial.number]] = trial
    return latest


def outcome(study: optuna.Study) -> list[tuple[object, ...]]:
    found = [(t.params, t.value, t.intermediate_values, t.state) for t in lines(study)]
    # Forks come when their rounds end, before or after trials that were added later.
    return sorted(found, key=repr)


def assert_values_are_exact(result: hpstage.Result) -> None:
    for trial in result.study.trials:
        line = result.schedules(trial)
        for step, value in trial.intermediate_values.items():
            assert value == alone(line, step).score
        assert trial.state.is_finished()


@pytest.mark.ci
def test_extending_to_more_steps_trains_only_new_steps_and_gives_the_values_of_a_longer_search(tmp_path: Path) -> None:
    study = create()
    first = run(study, tmp_path)
    longer = run(study, tmp_path, steps=12, extend=True)
    fresh = run(create(), MemoryJournal(), steps=12)
    assert [(t.params, t.value, t.last_step) for t in lines(study)] == [
        (t.params, t.value, 12) for t in fresh.study.trials
    ]
    assert_values_are_exact(longer)
    assert first.savings.steps_trained + longer.savings.steps_trained == fresh.savings.steps_trained
    assert longer.savings.steps_asked == fresh.savings.steps_asked
    assert longer.savings.steps_unique == fresh.savings.steps_unique


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("change", [{"n_trials": 17}, {"steps": 16}, {"steps": 16, "n_trials": 17}, {}], ids=str)
@pytest.mark.one_in(3)
@pytest.mark.ci
def test_an_extended_search_completes_the_trials_of_a_search_as_large_from_the_start(
    algorithm: Algorithm, change: dict[str, int]
) -> None:
    study, journal = create(), MemoryJournal()
    run(study, journal, algorithm=algorithm)
    extended = run(study, journal, algorithm=algorithm, extend=True, **change)
    fresh = run(create(), MemoryJournal(), algorithm=algorithm, **change)
    assert_values_are_exact(extended)
    # Lines that the smaller search had taken further than the larger one would are there as well.
    found = {repr((t.params, t.state, t.last_step, t.value)) for t in lines(study)}
    for trial in fresh.study.trials:
        if trial.state == TrialState.COMPLETE:
            assert repr((trial.params, trial.state, trial.last_step, trial.value)) in found
    assert extended.study.best_value >= fresh.study.best_value
    validate(extended.plan)


@pytest.mark.parametrize("algorithm", [ASHA(2, 2, window=3), MedianStopping(2, 2, 2, window=3)], ids=repr)
def test_extended_asynchronous_searches_have_exact_values(algorithm: Algorithm) -> None:
    study, journal = create(), MemoryJournal()
    run(study, journal, algorithm=algorithm)
    extended = run(study, journal, algorithm=algorithm, extend=True, steps=12, n_trials=14)
    assert_values_are_exact(extended)
    assert len(lines(study)) == 14
    assert any(trial.last_step == 12 and trial.state == TrialState.COMPLETE for trial in study.trials)


def test_extending_a_finished_trial_adds_a_new_trial_that_names_the_finished_trial() -> None:
    study, journal = create(), MemoryJournal()
    run(study, journal, n_trials=3)
    before = study.trials
    run(study, journal, n_trials=3, steps=12, extend=True)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 6
    assert study.trials[:3] == before
    for old, new in zip(before, study.trials[3:], strict=True):
        assert new.user_attrs["hpstage:extends"] == old.number
        assert new.params == old.params and new.distributions == old.distributions
        assert new.intermediate_values[8] == old.value and new.value == new.intermediate_values[12]
        assert new.user_attrs["hpstage:steps"] == 12


def test_extending_to_the_same_number_of_steps_changes_no_trial() -> None:
    study, journal = create(), MemoryJournal()
    run(study, journal, algorithm=SuccessiveHalving(2, 2))
    before = study.trials
    again = run(study, journal, algorithm=SuccessiveHalving(2, 2), extend=True)
    assert study.trials == before and again.savings.steps_trained == 0


@pytest.mark.ci
def test_an_extended_search_may_be_extended_again_with_another_algorithm(tmp_path: Path) -> None:
    study, journal = create(), tmp_path
    run(study, journal, n_trials=6, steps=4, algorithm=SuccessiveHalving(1, 2))
    run(study, journal, n_trials=6, steps=8, algorithm=SuccessiveHalving(1, 2), extend=True)
    result = run(study, journal, n_trials=6, steps=12, extend=True)
    assert [trial.last_step for trial in lines(study)] == [12] * 6
    assert_values_are_exact(result)
    assert result.plan.totals.steps_trained == merged(result.plan).steps_unique


def stored(folder: Path) -> optuna.Study:
    return create(JournalStorage(JournalFileBackend(str(folder / "optuna.log"))))


@pytest.mark.parametrize("every", [27, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", [SuccessiveHalving(2, 2), PopulationBasedTraining(2)], ids=repr)
@pytest.mark.ci
def test_an_extension_interrupted_at_any_step_ends_as_an_uninterrupted_extension(
    tmp_path: Path, algorithm: Algorithm, every: int
) -> None:
    def both(folder: Path, at: int) -> Fuse:
        folder.mkdir()
        Fused.fuse = Fuse()
        run(stored(folder), folder, Fused(), algorithm=algorithm, n_trials=6)
        Fused.fuse = fuse = Fuse(at)
        longer: dict[str, Any] = {"algorithm": algorithm, "n_trials": 9, "steps": 12, "extend": True}
        try:
            run(stored(folder), folder, Fused(), callbacks=[lambda study, trial: fuse.touch()], **longer)
        except KeyboardInterrupt:
            Fused.fuse = Fuse()
            run(stored(folder), folder, Fused(), **longer)
        return fuse

    both(tmp_path / "undisturbed", 0)
    expected = outcome(stored(tmp_path / "undisturbed"))
    for at in range(7, 1000, every):
        fuse = both(tmp_path / str(at), at)
        if fuse.touched < at:
            break
        assert outcome(stored(tmp_path / str(at))) == expected
    assert at > 12


def test_running_trials_keep_their_numbers_when_their_interrupted_search_is_extended(tmp_path: Path) -> None:
    Fused.fuse = Fuse(12)
    with pytest.raises(KeyboardInterrupt):
        run(stored(tmp_path), tmp_path, Fused(), n_trials=4)
    running = [trial.number for trial in stored(tmp_path).trials if trial.state == TrialState.RUNNING]
    assert running
    Fused.fuse = Fuse()
    result = run(stored(tmp_path), tmp_path, Fused(), n_trials=4, steps=12, extend=True)
    trials = result.study.trials
    assert all(trials[number].state == TrialState.COMPLETE and trials[number].last_step == 12 for number in running)
    assert [trial.last_step for trial in lines(result.study)] == [12] * 4


def test_a_search_with_other_steps_warns_of_an_interrupted_search_and_suggests_extend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Fused.fuse = Fuse(12)
    with pytest.raises(KeyboardInterrupt):
        run(stored(tmp_path), tmp_path, Fused(), n_trials=4)
    Fused.fuse = Fuse()
    run(stored(tmp_path), tmp_path, Fused(), n_trials=4, steps=12)
    assert "interrupted search" in caplog.text and "extend=True" in caplog.text


def test_more_steps_without_extend_propose_new_trials_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    study, journal = create(), MemoryJournal()
    run(study, journal, n_trials=2)
    assert "extend" not in caplog.text
    run(study, journal, n_trials=2, steps=12)
    assert [trial.last_step for trial in study.trials] == [8, 8, 12, 12]
    assert "extend=True" in caplog.text


def searched(journal: MemoryJournal) -> int:
    """Facts of the journal, but for those of drivers that come and go."""
    return sum(b'"Driver' not in record for record in separated(journal).read())


def test_an_invalid_extension_is_refused_and_writes_nothing_to_the_journal() -> None:
    study, journal = create(), MemoryJournal()
    with pytest.raises(UsageError, match=r"this store knows no search of study"):
        run(study, journal, extend=True)
    run(study, journal, n_trials=2)
    before = searched(journal)
    with pytest.raises(UsageError, match="have 8 steps already"):
        run(study, journal, n_trials=2, steps=6, extend=True)
    with pytest.raises(UsageError, match="for metric score"):
        run(study, journal, n_trials=2, metric="hash", extend=True)
    with pytest.raises(UsageError, match=r"this store knows no search of study"):
        run(create(), journal, n_trials=2, extend=True)
    assert searched(journal) == before


def test_a_study_whose_trials_have_values_of_another_metric_is_refused_and_gets_no_trial() -> None:
    study, journal = create(), MemoryJournal()
    with pytest.raises(UsageError, match="metric='misspelt' was requested"):
        run(study, journal, n_trials=2, metric="misspelt")
    run(study, journal, n_trials=2)
    before = len(study.trials)
    with pytest.raises(UsageError, match=r"was for metric score, and this one is for hash.* Use another study"):
        run(study, journal, n_trials=2, metric="hash")
    assert len(study.trials) == before
    run(create(), journal, n_trials=2, metric="hash")


@pytest.mark.ci
def test_a_search_cannot_be_extended_if_its_space_changes_schedules_of_trained_steps() -> None:
    def stretched(steps: int) -> Any:
        return lambda trial: {"a": s.linear(trial.suggest_float("a", 1, 2), total_iters=steps)}

    study, journal = create(), MemoryJournal()
    run(study, journal, n_trials=2, space=stretched(8))
    before = searched(journal)
    with pytest.raises(UsageError, match=r"trial 0 had another schedule of 'a' in its first 8 steps"):
        run(study, journal, n_trials=2, steps=12, space=stretched(12), extend=True)
    assert searched(journal) == before
    run(study, journal, n_trials=2, steps=12, space=stretched(8), extend=True)
    assert [trial.last_step for trial in lines(study)] == [12, 12]


def test_extending_with_another_algorithm_prunes_running_forks(tmp_path: Path) -> None:
    Fused.fuse = Fuse(30)
    with pytest.raises(KeyboardInterrupt):
        run(stored(tmp_path), tmp_path, Fused(), algorithm=PopulationBasedTraining(2), n_trials=6)
    running = [trial for trial in stored(tmp_path).trials if trial.state == TrialState.RUNNING]
    assert any("hpstage:donor" in trial.user_attrs for trial in running)
    Fused.fuse = Fuse()
    result = run(stored(tmp_path), tmp_path, Fused(), algorithm=FullTraining(), n_trials=6, extend=True)
    assert_values_are_exact(result)
    forks = [trial for trial in result.study.trials if "hpstage:donor" in trial.user_attrs]
    assert forks and all(trial.state == TrialState.PRUNED for trial in forks)


@pytest.mark.parametrize("n_trials", [5, 8])
def test_an_interrupted_search_continues_with_another_number_of_trials(
    n_trials: int, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 2:
            raise KeyboardInterrupt

    def search(study: optuna.Study, journal: MemoryJournal, **options: Any) -> None:
        hpstage.optimize(
            study,
            Tape(),
            lambda trial: {"a": trial.suggest_int("a", 1, 100)},
            metric="score",
            steps=4,
            executor=hpstage.InlineExecutor(),
            store=journal,
            algorithm=FullTraining(window=1),
            **options,
        )

    def fresh() -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler(seed=2)

    whole = optuna.create_study(sampler=fresh())
    search(whole, MemoryJournal(), n_trials=n_trials)
    study, journal = optuna.create_study(sampler=fresh()), MemoryJournal()
    with pytest.raises(KeyboardInterrupt):
        search(study, journal, n_trials=5, callbacks=[stop])
    study.sampler = fresh()
    search(study, journal, n_trials=n_trials)
    assert [trial.params for trial in study.trials] == [trial.params for trial in whole.trials]
    assert ("continues with n_trials" in caplog.text) == (n_trials != 5)
    assert sum(isinstance(fact, SearchEnded) for fact in read_facts(journal)) == 1


def test_resuming_with_another_number_of_trials_extends_no_finished_trial() -> None:
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(trial.state.is_finished() for trial in study.trials) == 9:
            raise KeyboardInterrupt

    study, journal = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=2)), MemoryJournal()
    options: dict[str, Any] = {"metric": "score", "executor": hpstage.InlineExecutor(), "store": journal, "steps": 8}
    options |= {"algorithm": ASHA(2, 2), "space": lambda trial: {"a": trial.suggest_int("a", 1, 100)}}
    with pytest.raises(KeyboardInterrupt):
        hpstage.optimize(study, Tape(), n_trials=12, callbacks=[stop], **options)
    hpstage.optimize(study, Tape(), n_trials=13, **options)
    assert len(study.trials) == 13
    assert not any("hpstage:extends" in trial.user_attrs for trial in study.trials)


def test_the_warning_of_an_interrupted_search_names_the_argument_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        raise KeyboardInterrupt

    study, journal = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=2)), MemoryJournal()
    options: dict[str, Any] = {"metric": "score", "executor": hpstage.InlineExecutor(), "store": journal}
    with pytest.raises(KeyboardInterrupt):
        hpstage.optimize(study, Tape(), lambda trial: {"a": 1}, steps=4, n_trials=3, callbacks=[stop], **options)
    hpstage.optimize(study, Tape(), lambda trial: {"a": 1}, steps=5, n_trials=3, **options)
    assert "has an interrupted search with steps=4 (now steps=5)" in caplog.text


def test_queued_trials_left_waiting_by_a_stop_are_trained_by_an_extension() -> None:
    study, store = create(), MemoryJournal()
    for a in (1, 2, 3):
        study.enqueue_trial({"a": a, "late": a, "b": 1.0})
    options = {"n_trials": 3, "algorithm": FullTraining(window=3)}
    run(study, store, callbacks=[lambda study, trial: study.stop()], **options)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, *[TrialState.WAITING] * 2]
    run(study, store, extend=True, **options)
    assert [trial.params["a"] for trial in study.trials] == [1, 2, 3]
    assert all(trial.state == TrialState.COMPLETE for trial in study.trials)
