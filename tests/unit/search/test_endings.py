"""Training that ends itself: its trials end there and no others, as a decision that is kept, and the books balance."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algorithm import Algorithm
from hpstage.algos import (
    ASHA,
    FullTraining,
    Hyperband,
    MedianStopping,
    OptunaPruner,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from hpstage.errors import InternalError, NonFiniteLoss, TrainingError
from hpstage.plan.checks import check
from hpstage.plan.facts import ChainId, NodeId, StateReached, TargetAsked, TrainingEnded, TrialAdded, TrialId, WorkerId
from hpstage.plan.log import open_existing_plan, read_facts
from hpstage.plan.messages import BoundaryReached, Report
from hpstage.plan.plan import SearchPlan
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal, SQLiteJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate

pytestmark = pytest.mark.sampled(4)

STEPS = 16
ALGORITHMS = [
    FullTraining(),
    SuccessiveHalving(2, 2),
    ASHA(2, 2),
    Hyperband(2, 2),
    MedianStopping(4, 4, 2),
    OptunaPruner(4),
    PopulationBasedTraining(4),
]


class Ending(Tape):
    """Is complete once its score is above 1.5, and raises under a late ``lr`` that is too small."""

    version = "ending"
    stateless = ("trained",)
    trained: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.trained = []

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        lr = hp["lr"]
        assert isinstance(lr, float)
        if step >= 9 and lr < 0.2:
            raise optuna.TrialPruned(f"lr {lr} is too small at step {step}")
        super().train(step, hp)
        self.trained.append(step)
        if self.score > 1.5:
            raise hpstage.StopTraining(f"score {self.score:.3f}")


def space(trial: optuna.Trial) -> dict[str, object]:
    drop = trial.suggest_categorical("drop", [4, 7, 12])
    return {"lr": s.multistep(trial.suggest_float("lr", 0.1, 1.3, step=0.3), [drop], gamma=0.3)}


def search(store: object, *, trainable: object = None, n_trials: int = 12, **options: object) -> hpstage.Result:
    study = options.pop("study", None) or optuna.create_study(
        study_name="study", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=1)
    )
    return hpstage.optimize(
        study,  # type: ignore[arg-type]
        trainable or Ending(),
        options.pop("space", space),  # type: ignore[arg-type]
        metric="score",
        steps=options.pop("steps", STEPS),  # type: ignore[arg-type]
        n_trials=n_trials,
        executor=hpstage.InlineExecutor(),
        store=store,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def alone(schedules: Mapping[str, s.Schedule]) -> tuple[str, int, float | None]:
    """How a trial ends that a plain loop trains, its steps, and its value."""
    tape = Ending()
    tape.setup({name: schedule.value(0) for name, schedule in schedules.items()})
    for step in range(STEPS):
        try:
            tape.train(step, {name: schedule.value(step) for name, schedule in schedules.items()})
        except hpstage.StopTraining:
            return "COMPLETE", step + 1, tape.score
        except optuna.TrialPruned:
            return "PRUNED", step, None
    return "COMPLETE", STEPS, tape.score


def outcome(result: hpstage.Result) -> list[tuple[object, ...]]:
    return [(trial.params, trial.state, trial.value, trial.intermediate_values) for trial in result.study.trials]


def test_trials_that_stop_themselves_end_where_a_plain_training_loop_ends_them() -> None:
    trainable = Ending()
    result = search(MemoryJournal(), trainable=trainable, verify="off")
    ends = set()
    for trial in result.study.trials:
        state, steps, value = alone(result.schedules(trial.number))
        ends.add((state, steps < STEPS))
        assert (trial.state.name, trial.value if state == "COMPLETE" else None) == (state, value)
        assert trial.user_attrs["hpstage:steps"] == result.plan.trials[result.trial_id(trial.number)].requested == steps
        assert trial.intermediate_values == ({steps: value} if state == "COMPLETE" else {})
        assert ("hpstage:ended" in trial.user_attrs) == (steps < STEPS)
    assert ends == {("COMPLETE", True), ("COMPLETE", False), ("PRUNED", True)}
    validate(result.plan)
    saved = result.savings
    assert saved.steps_unique == saved.steps_trained == len(trainable.trained) == merged(result.plan).steps_unique
    assert saved.steps_wasted == saved.failed == 0


class Silent(Ending):
    """Ends without a word, in a step or where none is trained."""

    version = "silent"

    def __init__(self, error: Exception, where: str = "train") -> None:
        super().__init__()
        self.error, self.where = error, where

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if self.where == "train" and step == 2:
            raise self.error
        Tape.train(self, step, hp)

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        if self.where == "setup":
            raise self.error
        super().setup(hp)

    def evaluate(self) -> dict[str, float]:
        if self.where == "evaluate":
            raise self.error
        return super().evaluate()


@pytest.mark.parametrize("error", [optuna.TrialPruned(), hpstage.StopTraining()], ids=["pruned", "complete"])
def test_a_stop_or_prune_without_a_message_is_described_by_its_exception_and_step(error: Exception) -> None:
    result = search(MemoryJournal(), trainable=Silent(error), n_trials=1)
    assert result.study.trials[0].user_attrs["hpstage:ended"] == f"{type(error).__name__} in step 2"


def test_a_prune_without_a_message_in_evaluate_is_described_by_its_exception() -> None:
    result = search(MemoryJournal(), trainable=Silent(optuna.TrialPruned(), "evaluate"), n_trials=1)
    assert result.study.trials[0].state == TrialState.PRUNED
    assert "TrialPruned" in result.study.trials[0].user_attrs["hpstage:ended"]


@pytest.mark.parametrize("where", ["setup", "evaluate"])
def test_raising_stop_training_outside_a_training_step_is_refused_with_the_remedy(where: str) -> None:
    with pytest.raises(TrainingError, match=r"StopTraining: enough \(raise it in a training step"):
        search(MemoryJournal(), trainable=Silent(hpstage.StopTraining("enough"), where), n_trials=1, catch=())


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_trials_that_stop_themselves_end_equally_with_and_without_sharing(algorithm: Algorithm) -> None:
    shared = search(MemoryJournal(), algorithm=algorithm)
    apart = search(MemoryJournal(), algorithm=algorithm, sharing=False)
    assert outcome(shared) == outcome(apart)
    for result in (shared, apart):
        assert all(trial.state.is_finished() and trial.state != TrialState.FAIL for trial in result.study.trials)
        validate(result.plan)
        assert result.savings.steps_trained >= merged(result.plan).steps_unique


def test_trials_that_stopped_themselves_are_not_trained_again_by_a_later_search(tmp_path: Path) -> None:
    first = search(tmp_path)
    again = Ending()
    second = search(
        tmp_path,
        trainable=again,
        study=optuna.create_study(
            study_name="other", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=1)
        ),
    )
    assert again.trained == []
    assert outcome(second) == outcome(first)
    assert second.savings.steps_asked == first.savings.steps_asked


def test_extending_a_search_does_not_extend_trials_that_stopped_themselves(tmp_path: Path) -> None:
    first = search(tmp_path)
    trainable = Ending()
    longer = search(tmp_path, trainable=trainable, study=first.study, steps=STEPS + 4, extend=True)
    whole = [trial for trial in first.study.trials[:12] if "hpstage:ended" not in trial.user_attrs]
    assert len(longer.study.trials) == 12 + len(whole)
    assert {trial.user_attrs["hpstage:extends"] for trial in longer.study.trials[12:]} == {t.number for t in whole}
    validate(longer.plan)


def test_a_plan_read_from_the_journal_knows_where_trials_stopped_themselves(tmp_path: Path) -> None:
    result = search(tmp_path, evaluate_every=3)
    journal = SQLiteJournal(tmp_path / "plan.sqlite")
    facts = list(read_facts(journal))
    restored = open_existing_plan(journal)
    journal.close()
    assert {fact.outcome for fact in facts if isinstance(fact, TrainingEnded)} == {"complete", "pruned"}
    assert restored.totals == result.plan.totals
    assert {id: (t.requested, t.answered, t.targets) for id, t in restored.trials.items()} == {
        id: (t.requested, t.answered, t.targets) for id, t in result.plan.trials.items()
    }


@pytest.mark.ci
@pytest.mark.parametrize("every", [1, 3])
def test_intermediate_values_stop_where_a_trial_stops_itself(every: int) -> None:
    result = search(MemoryJournal(), evaluate_every=every)
    for trial in result.study.trials:
        _, steps, value = alone(result.schedules(trial.number))
        assert all(step % every == 0 or step == steps for step in trial.intermediate_values)
        assert max(trial.intermediate_values, default=0) <= steps
        if value is not None:
            assert trial.intermediate_values[steps] == value
    validate(result.plan)


def test_a_report_with_trials_that_stopped_themselves_shows_the_unique_steps_of_the_result(tmp_path: Path) -> None:
    result = search(tmp_path / "store", algorithm=SuccessiveHalving(2, 2))
    page = result.write_report(tmp_path / "report")
    assert f"{result.savings.steps_unique:,}" in page.read_text()


class Diverging(Ending):
    version = "diverging"

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if step == 5 and hp["lr"] == 0.7:
            raise NonFiniteLoss(f"the training loss is nan in step {step}")
        super().train(step, hp)


def test_a_diverged_trial_is_pruned_and_logged_once_for_its_branch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        result = search(MemoryJournal(), trainable=Diverging())
    diverged = [t for t in result.study.trials if "loss is nan" in t.user_attrs.get("hpstage:ended", "")]
    assert diverged and all(t.state == TrialState.PRUNED for t in diverged)
    assert caplog.text.count("the training loss is nan in step 5") == len(
        {result.plan.trials[result.trial_id(t.number)].node_at(5).id for t in diverged}
    )
    assert result.study.best_trial.state == TrialState.COMPLETE


class Unmeasured(Ending):
    version = "unmeasured"

    def evaluate(self) -> Mapping[str, float]:
        if self.score > 1.5:
            raise ValueError("no measurement")
        return super().evaluate()


def test_an_evaluation_that_fails_after_stop_training_fails_its_trials() -> None:
    result = search(MemoryJournal(), trainable=Unmeasured())
    failed = [trial for trial in result.study.trials if trial.state == TrialState.FAIL]
    assert failed and all("no measurement" in trial.user_attrs["hpstage:failure"] for trial in failed)
    validate(result.plan)


def plan_of(*ends: int) -> SearchPlan:
    """A plan of trials that branch at steps 4 and 8, each requested to its end."""
    plan = SearchPlan("w")  # type: ignore[arg-type]
    lines = [s.constant(1.0), s.piecewise({0: 1.0, 4: 2.0}), s.piecewise({0: 1.0, 8: 3.0})]
    for number, (line, end) in enumerate(zip(lines, ends, strict=True)):
        plan.apply(TrialAdded(TrialId(f"s/{number}"), {"lr": line}, 16))
        plan.apply(TargetAsked(TrialId(f"s/{number}"), end))
    return plan


def ended(plan: SearchPlan, step: int, outcome: str) -> TrainingEnded:
    chain, worker, root = ChainId("c"), WorkerId("w"), NodeId(0)
    if outcome == "complete":
        plan.apply(StateReached(chain, worker, root, 0, step + 1, 0.0, 1.0, metrics={"score": 1.0}))
    return TrainingEnded(chain, worker, root, step, 0.0, outcome)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "outcome", "requested"),
    [
        (9, "complete", [10, 12, 16]),  # the others have parted before
        (7, "complete", [8, 12, 8]),  # the last parts where training has ended
        (8, "pruned", [8, 12, 16]),  # in a step that the last has under another value
        (7, "pruned", [7, 12, 7]),
        (3, "complete", [4, 4, 4]),
        (0, "pruned", [0, 0, 0]),
    ],
)
def test_the_end_of_training_applies_to_all_trials_that_share_its_step(
    step: int, outcome: str, requested: list[int]
) -> None:
    plan = plan_of(16, 12, 16)
    fact = ended(plan, step, outcome)
    check(plan, fact)
    plan.apply(fact)
    validate(plan)
    assert [trial.requested for trial in plan.trials.values()] == requested
    for number in range(3):  # requested again, and further
        plan.apply(TargetAsked(TrialId(f"s/{number}"), 16))
    validate(plan)
    after = [16 if was in (12, 16) else was for was in requested]
    assert [trial.requested for trial in plan.trials.values()] == after
    assert all(a <= b for a, b in pairwise(sorted(plan.trials[TrialId("s/0")].targets)))


def test_a_training_end_recorded_as_complete_without_metrics_is_refused() -> None:
    plan = plan_of(16, 12, 16)
    with pytest.raises(InternalError, match="no metrics"):
        plan.apply(TrainingEnded(ChainId("c"), WorkerId("w"), NodeId(0), 3, 0.0, "complete"))


class Patient(Tape):
    """Is complete where its loss rises."""

    version = "patient"
    losses = (5.0, 4.0, 6.0, 3.0, 2.0, 1.0)

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        before = self.score or math.inf
        super().train(step, hp)
        self.score = self.losses[step]
        if self.score > before:
            raise hpstage.StopTraining("the loss rises")


class Dying(hpstage.InlineExecutor):
    """Its process dies after it has reported the state at step 3."""

    dead = False

    def wait(self, timeout: float | None) -> list[Report]:
        if self.dead:
            raise InternalError("died")
        reports = super().wait(timeout)
        self.dead = any(isinstance(report, BoundaryReached) and report.reached.step == 3 for report in reports)
        return reports


def test_a_trial_that_stopped_itself_is_not_trained_further_after_a_crash(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="study", direction="minimize")
    for executor in (Dying(), hpstage.InlineExecutor()):
        with suppress(InternalError):
            hpstage.optimize(
                study,
                Patient(),
                lambda _: {"lr": 0.1},
                metric="score",
                steps=6,
                n_trials=1,
                executor=executor,
                store=tmp_path,
            )
    [trial] = study.trials
    assert (trial.value, trial.user_attrs["hpstage:steps"]) == (6.0, 3)
