"""Damaged stores, failing disks and senseless trainables: named, with nothing lost and nothing guessed."""

from __future__ import annotations

import json
import logging
import math
import re
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.checkpoints import CheckpointStore, FolderCheckpoints
from hpstage.errors import CheckpointError, CheckpointFull, StateError, StoreError, TrainingError, UsageError
from hpstage.plan.facts import Kept, SearchStarted, StateKey
from hpstage.store import MemoryJournal, SQLiteJournal
from hpstage.testing.toys import Tape, alone

optuna.logging.set_verbosity(optuna.logging.ERROR)

GRID = {"a": [1, 2], "late": [1, 2], "b": [1.0, 2.0]}


def space(trial: optuna.Trial) -> dict[str, object]:
    late = trial.suggest_categorical("late", [1, 2])
    return {
        "a": s.piecewise({0: trial.suggest_categorical("a", [1, 2]), 4: late}),
        "b": trial.suggest_categorical("b", [1.0, 2.0]),
    }


def search(
    trainable: object | None = None, make: Callable[[optuna.Trial], Any] = space, **options: Any
) -> hpstage.Result:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(GRID, seed=0))
    settings: dict[str, Any] = {"metric": "score", "steps": 8, "n_trials": 8, "store": MemoryJournal()}
    settings |= {"executor": hpstage.InlineExecutor(), "checkpoint_every": 3} | options
    return hpstage.optimize(study, Tape() if trainable is None else trainable, make, **settings)


def check_values(result: hpstage.Result, steps: int = 8) -> None:
    """Every trial has the value that it has alone."""
    for trial in result.study.trials:
        schedules = result.plan.trials[f"{result.study.study_name}/{trial.number}"].schedules
        assert trial.value == alone(schedules, steps).score


@pytest.fixture
def no_log() -> Iterator[None]:
    """Nothing is logged: Optuna's log would hold a name that is no Unicode, and so would the test's report, which
    pytest-xdist could not send."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"n_jobs": 2}, r"optimize\(\) got an unexpected .* 'n_jobs'; n_jobs: .*hpstage\.local_cluster\(n_workers=4\)"),
        ({"gc_after_trial": True}, r"optimize\(\) got an unexpected .* 'gc_after_trial'; gc_after_trial: leave it out"),
        ({"n_job": 2}, r"optimize\(\) got an unexpected keyword argument 'n_job'$"),
    ],
    ids=str,
)
def test_an_argument_of_optunas_loop_is_named_with_what_replaces_it(option: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        hpstage.optimize(optuna.create_study(), Tape(), lambda trial: {"a": 1}, metric="score", steps=2, **option)


def test_betas_are_two_hyperparameters() -> None:
    with pytest.raises(UsageError, match=r"hyperparameter 'betas': .* 'beta1' and 'beta2'"):
        hpstage.optimize(
            optuna.create_study(), Tape(), lambda trial: {"betas": (0.9, 0.98)}, metric="score", steps=2, n_trials=1
        )


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize("what", ["study_name", "metric"])
def test_names_that_no_journal_can_hold_are_refused_before_anything_is_trained(what: str) -> None:
    bad = "\udcff"  # what a byte that is no UTF-8 becomes on a command line
    study = optuna.create_study(study_name=bad if what != "metric" else "study")
    with pytest.raises(UsageError, match=rf"{what} is '\\udcff'; give another, which is valid Unicode"):
        hpstage.optimize(
            study,
            Tape(),
            space,
            metric=bad if what == "metric" else "score",
            steps=8,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
        )


# --- stores -----------------------------------------------------------------------------------------------


def rewrite(folder: Path, position: int, record: bytes) -> None:
    with sqlite3.connect(folder / "plan.sqlite") as connection:
        connection.execute("UPDATE log SET record = ? WHERE position = ?", (record, position))
    connection.close()


def test_a_store_of_a_newer_format_is_refused_with_the_remedy(tmp_path):
    search(store=tmp_path)
    journal = SQLiteJournal(tmp_path / "plan.sqlite")
    header = json.loads(journal.read(0, 1)[0])
    journal.close()
    rewrite(tmp_path, 0, json.dumps(header | {"format": 99, "novelty": [1]}).encode())
    with pytest.raises(StoreError, match=r"format 99 by a newer hpstage.*upgrade"):
        search(store=tmp_path)


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("garbage", [b"", b"\xff\x00", b"{}", b"[1]", b'{"type":"Wish"}', b'{"type":"StateReached"}'])
def test_garbage_in_the_journal_is_named(tmp_path, position, garbage):
    search(store=tmp_path)
    rewrite(tmp_path, position, garbage)
    with pytest.raises(StoreError, match="choose another store"):
        search(store=tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"node": 12345}, {"step": 0}, {"metrics": {"score": "high"}}, {"kept": {"key": "k", "bytes": 1, "digest": "d"}}],
    ids=lambda change: next(iter(change)),
)
def test_a_record_that_contradicts_the_journal_is_named(tmp_path, change):
    search(store=tmp_path)
    journal = SQLiteJournal(tmp_path / "plan.sqlite")
    records = [json.loads(record) for record in journal.read()]
    journal.close()
    position, reached = next((i, r) for i, r in enumerate(records) if r["type"] == "StateReached")
    rewrite(tmp_path, position, json.dumps(reached | change).encode())
    with pytest.raises(StoreError, match=f"record {position} of the journal"):
        search(store=tmp_path)


def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path):
    (tmp_path / "plan.sqlite").write_bytes(b"my thesis " * 1000)
    with pytest.raises(StoreError, match="not a journal of hpstage"):
        search(store=tmp_path)
    assert (tmp_path / "plan.sqlite").read_bytes() == b"my thesis " * 1000


@pytest.mark.parametrize("option", ["store", "checkpoints"])
def test_a_folder_that_is_a_file_or_lies_below_one_is_named(tmp_path, option):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((StoreError, CheckpointError), match="file"):
            search(**{option: path})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"catch": ("ValueError",)}, "catch is ('ValueError',); give classes of exceptions"),
        ({"catch": 5}, "catch is 5; give classes"),
        ({"callbacks": [5]}, "callbacks is [5]; give functions of the study and a trial"),
        ({"metric": None}, "metric is None; give the name"),
        ({"store": 5}, "store is 5; give a folder or a URL, or a Journal, or None"),
        ({"store": b"plan"}, "store is b'plan'"),
        ({"checkpoints": 5}, "checkpoints is 5; give a folder or a URL, or a CheckpointStore, or None"),
        ({"store": "nosuch://plan"}, "there is no store of the kind nosuch://"),
        ({"store": "redis://127.0.0.1:1"}, "say with checkpoints= where all of them reach its checkpoints"),
        *(
            ({switch: wrong}, f"{switch} is {wrong!r}; give True or False")
            for switch in ("extend", "sharing")
            for wrong in (0, 1, None, "", "abc", [], numpy.False_)
        ),
        *(
            ({name: wrong}, f"{name} is {wrong!r}; give a whole number of at least {least}")
            for name, least in {"steps": 1, "n_trials": 0, "evaluate_every": 1, "checkpoint_every": 1}.items()
            for wrong in (numpy.int64(least - 1), numpy.float64(5), numpy.True_)
        ),
        ({"timeout": numpy.float32("nan")}, "give a number of seconds above 0"),
        ({"checkpoint_budget": numpy.int64(-1)}, "give bytes: a whole number, or a text"),
    ],
)
def test_senseless_arguments_are_named_before_workers_are_started(option: dict[str, Any], message: str) -> None:
    executor = hpstage.InlineExecutor()
    executor.open = None  # type: ignore[assignment, method-assign]  # were it called, this would be a TypeError
    with pytest.raises(UsageError, match=re.escape(message)):
        search(executor=executor, **option)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    """Nothing that is recorded shows which were given, so that either resumes the other's search."""

    def started(kind: Callable[[int], Any]) -> SearchStarted:
        counts = {"steps": 8, "n_trials": 4, "evaluate_every": 4, "checkpoint_every": 3, "checkpoint_budget": 10**6}
        result = search(
            algorithm=SuccessiveHalving(min_steps=kind(2), reduction_factor=kind(2)),
            timeout=numpy.float32(600),
            **{name: kind(number) for name, number in counts.items()},
        )
        [fact] = [fact for fact in result.journal if isinstance(fact, SearchStarted)]
        return msgspec.structs.replace(fact, study="", identity="", at=0.0)

    assert started(numpy.int64) == started(numpy.int32) == started(int)


# --- checkpoints ------------------------------------------------------------------------------------------


class Failing(CheckpointStore):
    """A store whose ``fails_at``-th save finds the disk full."""

    def __init__(self, inner: CheckpointStore, fails_at: int) -> None:
        self.inner, self.left = inner, fails_at

    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        self.left -= 1
        if self.left == 0:
            raise CheckpointFull("cannot write: the disk is full")
        return self.inner.save(key, state, step=step, parent=parent)

    def load(self, key: StateKey) -> object:
        return self.inner.load(key)

    def manifest(self, key: StateKey) -> Any:
        return self.inner.manifest(key)

    def delete(self, key: StateKey) -> None:
        self.inner.delete(key)

    def keys(self) -> Iterator[StateKey]:
        return self.inner.keys()


@pytest.mark.ci
def test_a_checkpoint_that_cannot_be_written_costs_others_or_stops_the_search_and_the_next_call_goes_on(tmp_path):
    whole = search(store=MemoryJournal())
    for fails_at in range(1, 100):
        journal = MemoryJournal()
        failing = Failing(FolderCheckpoints(tmp_path / str(fails_at), "w"), fails_at)
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(GRID, seed=0))
        options: dict[str, Any] = {"metric": "score", "steps": 8, "n_trials": 8, "checkpoint_every": 3}
        options |= {"store": journal, "checkpoints": failing}
        told = ""
        try:
            hpstage.optimize(study, Tape(), space, executor=hpstage.InlineExecutor(), **options)
        except CheckpointError as error:
            told = str(error)
        if failing.left > 0:
            break
        if not told:
            assert any(b"the disk is full" in record for record in journal.read())
            assert [t.value for t in study.trials] == [t.value for t in whole.study.trials]
            continue
        assert "disk is full" in told
        result = hpstage.optimize(study, Tape(), space, executor=hpstage.InlineExecutor(), **options)
        assert [t.value for t in result.study.trials] == [t.value for t in whole.study.trials]
        assert result.plan.totals.steps_trained <= whole.plan.totals.steps_trained + 3
    assert fails_at > 8


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_disk_that_refuses_to_write_is_a_checkpoint_error_and_leaves_no_rest(tmp_path):
    script = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from hpstage.checkpoints import FolderCheckpoints
from hpstage.errors import StateError, CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))
store = FolderCheckpoints({str(tmp_path)!r}, "w")
store.save("small", b"x" * 1000, step=1, parent=None)
try:
    store.save("large", b"x" * 1_000_000, step=2, parent="small")
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "large" in done.stdout
    assert list(FolderCheckpoints(tmp_path, "w").keys()) == ["small"]
    assert not any((tmp_path / ".tmp").glob("*"))


def spoil_by_truncating(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoil_by_flipping_a_bit(folder: Path) -> None:
    for file in folder.iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)


def spoil_by_deleting(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize("spoil", [spoil_by_truncating, spoil_by_flipping_a_bit, spoil_by_deleting])
@pytest.mark.parametrize("which", [slice(None), slice(0, None, 2)], ids=["all", "half"])
def test_spoilt_checkpoints_are_computed_anew_and_values_stay_the_same(tmp_path, spoil, which):
    search(store=tmp_path, algorithm=SuccessiveHalving(2, 2))
    folders = sorted(path.parent for path in (tmp_path / "checkpoints").glob("*/*/manifest.json"))
    assert len(folders) > 5
    for folder in folders[which]:
        spoil(folder)
    # All trials are trained to the end now: those that were halved away go on from states that are spoilt.
    result = search(store=tmp_path)
    check_values(result)
    again = search(store=tmp_path)
    assert again.savings.steps_trained == 0


class Secretive(Tape):
    def state_dict(self) -> object:
        return {"inner": [super().state_dict(), lambda: None]}


def test_a_state_that_cannot_be_captured_ends_the_search_and_names_the_path():
    with pytest.raises(StateError, match=r"state\['inner'\]\[1\] is a function"):
        search(Secretive(), n_trials=1)


# --- trainables -------------------------------------------------------------------------------------------


class Half:
    def setup(self, hp): ...
    def train(self, step, hp): ...


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (Tape, "Tape is a class: pass an instance"),
        (Half(), "no evaluate and no state_dict and no load_state_dict"),
        (7, "int cannot be trained"),
        ("model", "str cannot be trained"),
        (lambda: None, "must take one argument"),
        (lambda run, more: None, "must take one argument"),
        (None.__class__, "is a class"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(trainable, message):
    with pytest.raises(UsageError, match=message):
        search(trainable)


def returning(what: object) -> Tape:
    class Returning(Tape):
        version = "returning"

        def evaluate(self):
            return what if self.score else {"score": 0.0}

    return Returning()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (None, "returned NoneType; return a dict"),
        (0.5, "returned float; return a dict"),
        ([("score", 1)], "returned list; return a dict"),
        ({"score": "0.5"}, "gave str for 'score'"),
        ({"score": [0.5]}, "gave list for 'score'"),
        ({"score": None}, "gave NoneType for 'score'"),
        ({"score": 10**400}, "gave int for 'score'"),
        ({1: 0.5}, "the metric 1; names of metrics are str"),
        ({"score": 1.0, "\udce9": 0.5}, r"the metric '\udce9'; names of metrics are str, of valid Unicode"),
    ],
)
def test_metrics_that_are_none_fail_their_trial_and_are_named(what, message):
    result = search(returning(what), n_trials=1)
    [trial] = result.study.trials
    assert trial.state == optuna.trial.TrialState.FAIL
    assert message in trial.user_attrs["hpstage:failure"]


class ReadsMore(Tape):
    version = "reads more"

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def setup(self, hp: Any) -> None:
        super().setup(hp)
        if self.at == "setup":
            assert hp["dropout"]

    def train(self, step: int, hp: Any) -> None:
        assert "dropout" not in hp and hp.get("dropout", 0.5) == 0.5
        if self.at == "train":
            assert hp["dropout"]
        super().train(step, hp)


def test_a_hyper_parameter_that_the_space_does_not_return_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UsageError) as caught:
        search(ReadsMore("setup"))
    first, *traceback = str(caught.value).splitlines()
    assert first == (
        "training cannot begin: KeyError: 'dropout' (the space returns no hyperparameter 'dropout'; it has 'a', 'b')"
    )
    assert any('assert hp["dropout"]' in line for line in traceback)


def test_one_that_only_a_step_reads_is_named_in_its_trials_failure() -> None:
    [trial] = search(ReadsMore("train"), n_trials=1).study.trials
    assert "the space returns no hyperparameter 'dropout'; it has 'a', 'b'" in trial.user_attrs["hpstage:failure"]


def test_a_training_function_is_told_which_hyper_parameter_the_space_does_not_return() -> None:
    def train(run: hpstage.Run) -> None:
        run.attach()
        assert run.hp["dropout"]

    with pytest.raises(UsageError, match=r"^training cannot begin: .*the space returns no hyperparameter 'dropout'"):
        search(train)


def test_a_dict_of_the_models_own_that_training_fills_may_be_empty_before() -> None:
    class Fills(Tape):
        version = "fills"
        seen: dict[str, float]

        def setup(self, hp: Any) -> None:
            super().setup(hp)
            self.seen = {}

        def train(self, step: int, hp: Any) -> None:
            super().train(step, hp)
            self.seen["last"] = hp["a"]

        def evaluate(self) -> Any:
            return {"score": self.seen["last"]}

        def state_dict(self) -> Any:
            return {"tape": super().state_dict(), "seen": dict(self.seen)}

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state["tape"])
            self.seen = dict(state["seen"])

    assert all(trial.state.name == "COMPLETE" for trial in search(Fills()).study.trials)


@pytest.mark.parametrize("what", [0.5, None, [("score", 1)], {f"m{number}": 0.5 for number in range(10**6)}])
def test_what_is_no_mapping_of_metrics_is_refused_before_anything_is_trained(what: object) -> None:
    class Wrong(Tape):
        version = "wrong"

        def train(self, step: int, hp: Any) -> None:
            raise AssertionError("trained")

        def evaluate(self) -> Any:
            return what

    message = rf"evaluate\(\) returned {type(what).__name__}; return a dict .*, such as {{'accuracy': value}}$"
    if isinstance(what, dict):
        message = r"evaluate\(\) returned 1,000,000 metrics, more than 10,000: log values"
    with pytest.raises(UsageError, match=message):
        search(Wrong())


@pytest.mark.parametrize("value", [True, 3, math.inf, -math.inf])
def test_any_number_is_a_metric(value):
    result = search(returning({"score": value}), n_trials=1)
    assert result.study.trials[0].value == value


def test_tensors_of_one_number_are_metrics():
    torch = pytest.importorskip("torch")
    result = search(returning({"score": torch.tensor([0.5])}), n_trials=1)
    assert result.study.trials[0].value == 0.5


def test_a_metric_that_comes_to_be_missing_is_named_and_nothing_is_lost():
    class Forgetful(Tape):
        version = "1"

        def evaluate(self):
            return {"other": 1.0} if self.score else {"other": 0.0, "score": 0.0}

    journal = MemoryJournal()
    with pytest.raises(UsageError, match="gives 'other', but metric='score' was asked for"):
        search(Forgetful(), store=journal)
    assert search(Forgetful(), store=journal, metric="other").study.best_value == 1.0


# --- names, numbers and sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", " ", "лр", "学習率", "a\nb", "a/b", '"', "__proto__", "x" * 10_000, "\0", "self"])
def test_any_text_is_a_name_of_a_hyper_parameter(tmp_path, name):
    result = search(make=lambda trial: {name: trial.suggest_categorical("a", [1, 2])}, store=tmp_path, n_trials=2)
    check_values(result)
    assert search(make=lambda trial: {name: 1}, store=tmp_path, n_trials=1).savings.steps_trained == 0


@pytest.mark.parametrize("value", [2**53, 2**53 + 1, 2**63, -(2**63) - 1, 1e308, 5e-324, -0.0])
def test_numbers_of_any_size_come_through_or_are_refused(tmp_path, value):
    def make(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.piecewise({0: 1, 3: value})}

    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        with pytest.raises(UsageError, match="does not fit 64 bits"):
            search(make=make, store=tmp_path, n_trials=1)
        return
    check_values(search(make=make, store=tmp_path, n_trials=1))
    assert search(make=make, store=tmp_path, n_trials=1).savings.steps_trained == 0


def test_ten_thousand_steps_of_cosines_are_planned_and_kept_apart(tmp_path):
    def make(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.cosine(float(trial.suggest_categorical("a", [1, 2])), 10_000), "b": 1}

    result = search(make=make, steps=10_000, n_trials=4, checkpoint_every=None, store=tmp_path)
    assert result.savings.steps_trained == 20_000
    assert search(make=make, steps=10_000, n_trials=4, store=tmp_path).savings.steps_trained == 0


def test_three_hundred_trials_of_one_step():
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        Tape(),
        lambda trial: {"a": trial.suggest_int("a", 1, 100)},
        metric="score",
        steps=1,
        n_trials=300,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )
    assert [trial.value for trial in study.trials] == [0.0 + trial.params["a"] for trial in study.trials]
    assert result.savings.steps_trained == len({trial.params["a"] for trial in study.trials})


def test_a_failure_that_catch_does_not_name_leaves_what_was_reached():
    journal = MemoryJournal()
    with pytest.raises(TrainingError, match="returned NoneType"):
        search(returning(None), store=journal, catch=())
    assert len(journal) > 3


def test_an_objective_of_optuna_is_told_what_a_training_function_is_given() -> None:
    def objective(trial: Any) -> float:
        return float(trial.suggest_float("x", 0.0, 1.0))

    [trial] = search(objective, n_trials=1).study.trials
    assert "is given a run, not a trial; suggest in space(trial)" in trial.user_attrs["hpstage:failure"]


def test_a_space_that_asks_its_trial_for_what_runs_have_is_told_of_swapped_arguments() -> None:
    def train(run):
        run.attach()
        for _ in run.steps():
            run.report(value=run.hp["a"])

    def space(trial):
        return {"a": trial.suggest_float("a", 0.0, 1.0)}

    study = optuna.create_study()
    with pytest.raises(UsageError, match=r"asked it for .attach, which a run has: are the arguments swapped\?"):
        hpstage.optimize(study, space, train, metric="value", steps=2, n_trials=1, executor=hpstage.InlineExecutor())
    assert not study.trials


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"audit": "always"}, "audit is 'always'; give one of 'idle', 'winner', 'off'"),
        ({"audit": True}, "audit is True; give one of"),
        ({"audit_budget": -0.1}, "audit_budget is -0.1; give a number that is at least 0"),
        ({"audit_budget": math.nan}, "audit_budget is nan; give a number"),
        ({"audit_budget": math.inf}, "audit_budget is inf; give a number"),
        ({"audit_budget": True}, "audit_budget is True; give a number"),
        ({"audit_budget": "5 %"}, "audit_budget is '5 %'; give a number"),
        ({"audit_budget": None}, "audit_budget is None; give a number"),
    ],
)
def test_what_no_audit_can_be_is_named_before_anything_is_written(given: dict[str, Any], told: str) -> None:
    journal = MemoryJournal()
    with pytest.raises(UsageError, match=re.escape(told)):
        search(store=journal, **given)
    assert len(journal) == 0


def test_an_executor_that_cannot_audit_searches_as_ever() -> None:
    result = search(audit="idle", audit_budget=0)
    check_values(result)
    assert str(result.audit).startswith("nothing was audited")
    assert not result.audit.figures and result.audit.line == ""


@pytest.mark.parametrize("storage", [None, "sqlite:///{}/study.db"])
def test_other_choices_of_a_parameter_leave_no_trial(storage: str | None, tmp_path: Path) -> None:
    study = optuna.create_study(
        storage=storage and storage.format(tmp_path), sampler=optuna.samplers.RandomSampler(seed=0)
    )

    def search(space: Any) -> None:
        hpstage.optimize(
            study, Tape(), space, metric="score", steps=2, n_trials=2, executor=hpstage.InlineExecutor(), store=tmp_path
        )

    search(lambda trial: {"a": trial.suggest_categorical("a", [1, 2])})
    for wider in (
        lambda trial: {"a": trial.suggest_categorical("a", [1, 2, 3])},
        lambda trial: {"a": trial.suggest_int("a", 1, 3)},
    ):
        with pytest.raises(
            UsageError, match=r"trial 0 of study .* has another kind of 'a' or other choices.* another study"
        ):
            search(wider)
    assert len(study.trials) == 2

    def later(trial: optuna.Trial) -> dict[str, object]:
        first = trial.suggest_categorical("b", ["x", "y"])
        return {
            "a": trial.suggest_categorical("a", [1, 2]) if trial.number < 4 else trial.suggest_int("a", 1, 2),
            "b": first,
        }

    search(later)
    with pytest.raises(UsageError, match="has another kind of 'a'"):
        search(later)
