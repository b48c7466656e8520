"""A search that is interrupted at any point and called again ends as the search that was left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algorithm import Algorithm, Ask, Finish, Setting, Trials
from hpstage.algorithm import Search as AlgorithmSearch
from hpstage.algos import FullTraining, SuccessiveHalving
from hpstage.errors import UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate, validate_scheduler
from tests.unit.searches import Search, trial

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.sampled(16),
    pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning"),
]

EVERY = 2
GRID = {"a": [1, 2], "late": [1, 2], "b": [1.0, 2.0]}
SEARCHES = {
    "random-halving": (lambda: optuna.samplers.RandomSampler(seed=1), SuccessiveHalving(2, 2)),
    "grid-halving": (lambda: optuna.samplers.GridSampler(GRID, seed=1), SuccessiveHalving(2, 2)),
    "tpe-full": (lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=3), FullTraining(window=2)),
    "grid-full": (lambda: optuna.samplers.GridSampler(GRID, seed=1), FullTraining()),
}


class Fuse:
    """Interrupts at its ``at``-th touch, once; counts them all."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.touched = 0

    def touch(self) -> None:
        self.touched += 1
        if self.touched == self.at:
            raise KeyboardInterrupt


class Fused(Tape):
    """A Tape whose training touches a fuse, which is no part of what it is."""

    stateless = ("fuse",)
    fuse = Fuse()

    def train(self, step, hp):
        type(self).fuse.touch()
        super().train(step, hp)


class FusedStorage(JournalStorage):
    """Interrupts a trial's end before or after it is written."""

    def __init__(self, path: Path, fuse: Fuse, after: bool) -> None:
        super().__init__(JournalFileBackend(str(path)))
        self._fuse, self._after = fuse, after

    def set_trial_state_values(self, trial_id, state, values=None):
        if not state.is_finished():
            return super().set_trial_state_values(trial_id, state, values)
        if not self._after:
            self._fuse.touch()
        done = super().set_trial_state_values(trial_id, state, values)
        if self._after:
            self._fuse.touch()
        return done


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 3: trial.suggest_int("late", 1, 2)}),
        "b": trial.suggest_categorical("b", [1.0, 2.0]),
    }


def call(folder: Path, kind: str, place: str = "", fuse: Fuse | None = None, **options: Any) -> hpstage.Result:
    """The same command in a new process, as far as one process can be one: every object is created again."""
    fuse = fuse or Fuse()
    folder.mkdir(exist_ok=True)
    make_sampler, algorithm = SEARCHES[kind]
    if place in ("end before", "end after"):
        storage: JournalStorage = FusedStorage(folder / "optuna.log", fuse, place == "end after")
    else:
        storage = JournalStorage(JournalFileBackend(str(folder / "optuna.log")))
    study = optuna.create_study(
        study_name="x", storage=storage, sampler=make_sampler(), direction="maximize", load_if_exists=True
    )

    def fused_space(trial: optuna.Trial) -> dict[str, object]:
        if place == "space before":
            fuse.touch()
        described = space(trial)
        if place == "space after":
            fuse.touch()
        return described

    Fused.fuse = fuse if place == "train" else Fuse()
    settings: dict[str, Any] = {"metric": "score", "steps": 6, "n_trials": 8, "algorithm": algorithm}
    settings |= {"callbacks": [lambda study, trial: fuse.touch()]} if place == "callback" else {}
    settings |= {"executor": hpstage.InlineExecutor(), "store": folder / "plan", "checkpoint_every": EVERY} | options
    return hpstage.optimize(study, Fused(), fused_space, **settings)


def outcome(study: optuna.Study) -> list[tuple[object, ...]]:
    return [(trial.params, trial.state, trial.value, trial.intermediate_values) for trial in study.trials]


@pytest.mark.ci
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_interrupted_anywhere_resumes_to_the_same_study(kind, every, tmp_path):
    undisturbed = call(tmp_path / "undisturbed", kind)
    expected = outcome(undisturbed.study)
    assert len(expected) == 8
    first = 1 if every == 1 else 1 + 2 * list(SEARCHES).index(kind)  # elsewhere in each search
    for place in ("train", "space before", "space after", "callback", "end before", "end after"):
        stride = every * (1 if kind.endswith("halving") or place != "train" else 5)
        for at in range(first, 100, stride):
            folder = tmp_path / f"{place} {at}"
            fuse = Fuse(at)
            try:
                call(folder, kind, place, fuse)
            except KeyboardInterrupt:
                pass
            else:
                assert at > fuse.touched > 0
                break
            again = call(folder, kind, place="train")
            assert outcome(again.study) == expected, (place, at)
            assert all(trial.user_attrs["hpstage:steps"] == trial.last_step for trial in again.study.trials)
            # Another order of the same work may keep another state; what was reported is never trained again, and one
            # chain's last steps were not reported.
            assert again.plan.totals.steps_trained <= undisturbed.plan.totals.steps_trained + EVERY
            validate(again.plan)


def test_a_search_interrupted_every_few_steps_still_finishes_with_the_same_study(tmp_path):
    expected = outcome(call(tmp_path / "undisturbed", "random-halving").study)
    for _ in range(100):
        try:
            result = call(tmp_path / "disturbed", "random-halving", "train", Fuse(EVERY + 1), verify="off")
            break
        except KeyboardInterrupt:
            continue
    assert outcome(result.study) == expected
    assert result.plan.totals.steps_trained == merged(result.plan).steps_unique


def test_a_search_that_timed_out_is_finished_by_the_next_call(tmp_path):
    expected = outcome(call(tmp_path / "undisturbed", "random-halving").study)
    first = call(tmp_path / "timed", "random-halving", timeout=1e-9)
    assert first.plan.totals.steps_trained == 0
    second = call(tmp_path / "timed", "random-halving")
    assert outcome(second.study) == expected


def test_a_running_chain_is_not_extended_while_the_scheduler_is_draining():
    search = Search(SimulatedExecutor(1))
    search.driver.add([trial(0, {"a": s.constant(1)}, 8)])
    search.driver.ask("study/0", 4)
    search.driver.wait()
    assert search.scheduler.running
    search.scheduler.draining = True
    search.driver.ask("study/0", 8)  # as an algorithm does that promotes the trial at that time
    while search.scheduler.running:
        search.driver.wait()
        validate_scheduler(search.scheduler)
    assert search.plan.totals.steps_trained == 4


def test_the_same_call_after_a_finished_search_adds_as_many_trials_and_trains_no_step(tmp_path):
    first = outcome(call(tmp_path, "random-halving").study)
    second = call(tmp_path, "random-halving")
    assert len(second.study.trials) == 16
    assert all(trial.state.is_finished() for trial in second.study.trials)
    # A fresh sampler of the same seed proposes the same.
    assert outcome(second.study) == [*first, *first]
    assert second.savings.steps_trained == 0


@pytest.mark.parametrize("change", [{"algorithm": FullTraining()}, {"n_trials": 5}, {"steps": 5}])
def test_a_call_with_other_arguments_after_an_interruption_starts_a_new_search(tmp_path, change):
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path, "random-halving", "train", Fuse(9))
    changed = call(tmp_path, "random-halving", **change)
    finished = [trial for trial in changed.study.trials if trial.state.is_finished()]
    assert len(finished) >= change.get("n_trials", 8)
    alone = call(tmp_path / "alone", "random-halving", **change)
    assert changed.plan.totals.steps_trained <= 9 + alone.plan.totals.steps_trained


def test_a_new_in_memory_study_on_the_same_store_trains_no_step_twice():
    journal, checkpoints = MemoryJournal(), None

    def run() -> hpstage.Result:
        study = optuna.create_study(direction="maximize", study_name="x", sampler=optuna.samplers.RandomSampler(seed=2))
        settings: dict[str, Any] = {"metric": "score", "steps": 6, "n_trials": 8, "store": journal}
        return hpstage.optimize(
            study, Fused(), space, executor=hpstage.InlineExecutor(), checkpoints=checkpoints, **settings
        )

    Fused.fuse = Fuse()
    first = run()
    trained = Fused.fuse.touched
    second = run()
    assert Fused.fuse.touched == trained
    assert outcome(second.study) == outcome(first.study)


def finite(folder: Path, sampler: optuna.samplers.BaseSampler, queue: list[dict[str, object]]) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.log")))
    study = optuna.create_study(study_name="f", storage=storage, sampler=sampler, direction="maximize")
    for params in queue:
        study.enqueue_trial(params)
    return study


@pytest.mark.parametrize(
    ("make_sampler", "queue"),
    [
        (lambda: optuna.samplers.GridSampler(GRID, seed=0), []),
        (lambda: optuna.samplers.BruteForceSampler(seed=0), []),
        (lambda: optuna.samplers.RandomSampler(seed=0), [{"a": 2, "late": 1, "b": b} for b in (1.0, 2.0)]),
    ],
    ids=["grid", "brute-force", "queued"],
)
@pytest.mark.parametrize("mishap", ["metric", "interruption"])
def test_a_trial_that_was_never_trained_is_proposed_again(tmp_path, make_sampler: Callable, queue, mishap):
    study = finite(tmp_path, make_sampler(), queue)
    settings: dict[str, Any] = {"steps": 6, "n_trials": 8, "store": tmp_path / "plan", "metric": "score"}
    fuse = Fuse(1 if mishap == "interruption" else 0)

    def fused_space(trial: optuna.Trial) -> dict[str, object]:
        described = space(trial)
        fuse.touch()
        return described

    Fused.fuse = Fuse()
    wrong = settings | {"metric": "scor"} if mishap == "metric" else settings
    with pytest.raises((UsageError, KeyboardInterrupt)):
        hpstage.optimize(study, Fused(), fused_space, executor=hpstage.InlineExecutor(), **wrong)
    study.sampler = make_sampler()
    hpstage.optimize(study, Fused(), fused_space, executor=hpstage.InlineExecutor(), **settings)
    complete = [trial.params for trial in study.get_trials(states=(TrialState.COMPLETE,))]
    assert len(complete) == 8
    if queue:
        assert complete[:2] == queue
    else:
        assert len({tuple(sorted(params.items())) for params in complete}) == 8


class Fickle(Algorithm):
    """Prunes trials at step 2 or, once it has changed its mind, trains them to the end."""

    synchronous = False
    prunes = True

    def __repr__(self) -> str:
        return "Fickle()"

    def check(self, setting: Setting) -> None: ...

    def start(self, setting: Setting, trials: Trials) -> Replies:
        return Replies(self)


class Replies(AlgorithmSearch):
    def __init__(self, algorithm: Fickle) -> None:
        self.algorithm = algorithm

    def room(self) -> int:
        return 8

    def added(self, index):
        return [Ask(index, 2)]

    def reported(self, index, step, value):
        if step == 2 and not type(self.algorithm).prunes:
            return [Ask(index, 6)]
        return [Finish(index, "pruned" if step == 2 else "complete")]

    def failed(self, index):
        return []

    def closed(self):
        return []


def test_a_trial_pruned_before_an_interruption_stays_pruned_and_does_not_count_as_failed(tmp_path, monkeypatch):
    """As in an asynchronous search, which results reach in another order."""
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path, "random-halving", "callback", Fuse(3), algorithm=Fickle())
    monkeypatch.setattr(Fickle, "prunes", False)
    result = call(tmp_path, "random-halving", algorithm=Fickle())
    states = [trial.state for trial in result.study.trials]
    assert states == [TrialState.PRUNED] * 3 + [TrialState.COMPLETE] * 5
    assert result.savings.failed == 0 and "failed" not in str(result.savings)
