"""Function style: an ordinary loop stepped from outside, in a thread that is never left behind."""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import traceback
from contextlib import nullcontext
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

import hpstage
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.errors import StateError, StopTraining, TrainingError, UsageError
from hpstage.store import MemoryJournal
from hpstage.training.function import FunctionTrainable
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import network, samples

pytestmark = pytest.mark.sampled(4)


class Total:
    """The least that can be attached."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


events: list[str] = []


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    events.clear()
    before = set(threading.enumerate())
    yield
    if set(threading.enumerate()) - before:
        gc.collect()  # an error's traceback may still hold its trainable
    assert set(threading.enumerate()) <= before


def adding(run: Run) -> None:
    total = Total()
    run.attach(total=total)
    try:
        for step in run.steps():
            total.value += run.hp["lr"] * (step + 1)
            if run.wants_report:
                events.append(f"reported at {step}")
                run.report(total=total.value)
    finally:
        events.append("unwound")


adding.stateless = ("events",)  # type: ignore[attr-defined]


def made(function: Any) -> FunctionTrainable:
    trainable = as_trainable(function)
    assert isinstance(trainable, FunctionTrainable)
    trainable.setup({"lr": 1})
    return trainable


def trained(trainable: FunctionTrainable, *values: float) -> FunctionTrainable:
    for step, value in enumerate(values):
        trainable.train(step, {"lr": value})
    return trainable


def test_a_training_function_reads_the_hyperparameters_of_each_step() -> None:
    assert trained(made(adding), 1, 10, 100).evaluate() == {"total": 321.0}


CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=0)
LOCAL = threading.local()


def by_context(step: int) -> float:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


def by_thread(step: int) -> float:
    LOCAL.count = getattr(LOCAL, "count", 0) + 1
    return LOCAL.count


def by_mode(step: int) -> float:
    was = torch.is_grad_enabled()
    if step == 1:
        torch.set_grad_enabled(False)
    return was


def by_autocast(step: int) -> float:
    was = torch.is_autocast_enabled("cpu")
    if step == 1:
        torch.set_autocast_enabled("cpu", True)
    return was


def by_errors(step: int) -> float:
    was = np.geterr()["divide"] == "ignore"
    if step == 1:
        np.seterr(divide="ignore")
    return was


@pytest.mark.parametrize("number", [by_context, by_thread, by_mode, by_autocast, by_errors])
def test_thread_local_settings_of_a_training_function_are_in_the_state(number: Any) -> None:
    def train(run: Run) -> None:
        total = Total()
        run.attach(total=total)
        for step in run.steps():
            total.value += number(step)
            run.report(total=total.value)

    train.stateless = ("number",)  # type: ignore[attr-defined]
    straight = trained(made(train), *[1] * 6)
    expected = straight.evaluate(), digest(straight.state_dict())
    straight.close()
    first = trained(made(train), *[1] * 3)
    state = clone(first.state_dict())
    first.close()
    fork = made(train)
    fork.load_state_dict(state)
    for step in range(3, 6):
        fork.train(step, {"lr": 1})
    assert (fork.evaluate(), digest(fork.state_dict())) == expected
    fork.close()


def test_a_training_function_reports_metrics_only_on_request() -> None:
    trainable = made(adding)
    for step in range(4):
        trainable.announce(step == 2)
        trainable.train(step, {"lr": 1})
        if step == 2:
            assert trainable.evaluate() == {"total": 6.0}
    assert events == ["reported at 2"]
    with pytest.raises(TrainingError, match=r"not known: adding did not report them, .* Report .* run.report"):
        trainable.evaluate()


def test_a_loaded_state_of_a_function_has_its_metrics_without_further_training() -> None:
    state = clone(trained(made(adding), 1, 10).state_dict())
    loaded = made(adding)
    loaded.load_state_dict(state)
    assert loaded.evaluate() == {"total": 21.0}
    loaded.train(2, {"lr": 100})
    assert loaded.evaluate() == {"total": 321.0}


def test_a_report_before_the_loop_gives_the_metrics_of_the_initial_or_loaded_state() -> None:
    def reporting(run: Run) -> None:
        total = Total()
        run.attach(total=total)
        if run.wants_report:
            run.report(total=total.value)
        for _ in run.steps():
            total.value += 1

    trainable = made(reporting)
    assert trainable.evaluate() == {"total": 0.0}
    trained(trainable, 1, 1)
    state = clone(trainable.state_dict())
    loaded = made(reporting)
    loaded.load_state_dict(state)
    assert loaded.evaluate() == {"total": 2.0}


def test_a_function_that_does_not_report_requested_metrics_fails_at_that_step() -> None:
    def silent(run: Run) -> None:
        run.attach()
        for _ in run.steps():
            pass

    trainable = made(silent)
    trainable.announce(True)
    with pytest.raises(TrainingError, match=r"silent gave no metrics at step 0, .* call run.report"):
        trainable.train(0, {})


def test_an_attached_optimizer_follows_the_schedules() -> None:
    rates = []

    def loop(run: Run) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"])
        run.attach(model=model, optimizer=optimizer)
        for _ in run.steps():
            rates.append(optimizer.param_groups[0]["lr"])

    trainable = trained(made(loop), 1, 0.5)
    state = clone(trainable.state_dict())
    trainable.setup({"lr": 1})
    trainable.load_state_dict(state)
    trainable.train(2, {"lr": 0.25})
    assert rates == [1, 0.5, 0.25]


def test_the_thread_of_a_training_function_computes_the_bits_of_the_main_thread() -> None:
    results: list[Any] = []

    def work() -> tuple[str, bool, int]:
        torch.default_generator.manual_seed(1)
        x, y = samples()
        big = torch.randn(512, 512)
        model = network()
        nn.functional.cross_entropy(model(x), y).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return digest([gradients, big @ big, big.sum(0)]), torch.is_grad_enabled(), torch.get_num_threads()

    def loop(run: Run) -> None:
        run.attach()
        for _ in run.steps():
            results.append(work())

    made(loop).train(0, {})
    assert results == [work()]


# --- errors -----------------------------------------------------------------------------------------------


def test_an_error_in_a_training_function_is_raised_with_the_users_traceback() -> None:
    def helper() -> None:
        raise ZeroDivisionError("of the user")

    def broken(run: Run) -> None:
        run.attach()
        for step in run.steps():
            if step == 1:
                helper()

    trainable = trained(made(broken), 1)
    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        trainable.train(1, {})
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["broken", "helper"]
    with pytest.raises(TrainingError, match="has ended"):
        trainable.train(1, {})
    trainable.setup({})
    trainable.train(0, {})


def attaches_late(run: Run) -> None:
    run.attach()
    for _ in run.steps():
        run.attach(total=Total())


def attaches_never(run: Run) -> None:
    for _ in run.steps():
        pass


def attaches_a_list(run: Run) -> None:
    run.attach(numbers=[1])


def loops_never(run: Run) -> None:
    run.attach()


def loops_twice(run: Run) -> None:
    run.attach()
    for _ in run.steps():
        break
    for _ in run.steps():
        pass


def attaches_without_a_name(run: Run) -> None:
    run.attach(Total())


def reports_without_a_name(run: Run) -> None:
    run.attach(total=Total())
    for _ in run.steps():
        run.report(0.5)


def zips(run: Run) -> None:
    run.attach()
    for _step, _batch in zip(run.steps(), run.batches(list(range(8)), batch_size=2), strict=False):
        pass


def takes_other_data(run: Run) -> None:
    run.attach()
    for step in run.steps():
        run.indices(10 + step, 2)


def takes_too_little(run: Run) -> None:
    run.attach()
    for _ in run.steps():
        run.indices(10, 0)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (attaches_late, "before the loop"),
        (attaches_never, r"call run.attach\(...\) with all that training changes"),
        (attaches_a_list, r"run.attach\(numbers=...\): list has no state_dict"),
        (attaches_without_a_name, r"run.attach\(\) takes objects by name: run.attach\(total=...\)"),
        (reports_without_a_name, r"run.report\(\) takes metrics by name.*run.report\(accuracy=0.9\)"),
        (loops_twice, "looped over twice"),
        (zips, r"for batch in run.batches\(...\) is itself a loop over steps, in which run.step is the step"),
        (takes_other_data, "10 samples, and now 11"),
        (takes_too_little, "batch size is 0"),
    ],
)
def test_misuse_of_run_is_refused_with_the_remedy(function: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        trained(made(function), 1, 1)


def test_a_function_that_returns_before_its_loop_is_an_error() -> None:
    with pytest.raises(TrainingError, match=r"loops_never returned before its first step.*raise optuna.TrialPruned"):
        trained(made(loops_never), 1, 1)


def test_a_function_that_never_loops_stops_the_search() -> None:
    study = optuna.create_study()
    options: dict[str, Any] = {"metric": "loss", "steps": 2, "n_trials": 40, "store": MemoryJournal()}
    with pytest.raises(TrainingError, match=r"no trial can be trained: .*loops_never returned before its first step"):
        hpstage.optimize(
            study, loops_never, lambda trial: {"lr": trial.number}, executor=hpstage.InlineExecutor(), **options
        )
    assert len(study.trials) < 40


def test_a_function_that_returns_before_its_loop_in_some_trials_fails_only_those_trials() -> None:
    def choosy(run: Run) -> None:
        run.attach(total=(total := Total()))
        if run.hp["lr"] > 1:
            return
        for _ in run.steps():
            total.value += 1
            if run.wants_report:
                run.report(loss=total.value)

    grid = optuna.samplers.GridSampler({"lr": [2.0, 0.5]}, seed=0)
    for catch in ((Exception,), ()):
        study = optuna.create_study(sampler=grid)
        with nullcontext() if catch else pytest.raises(TrainingError, match="returned before its first step"):
            hpstage.optimize(
                study,
                choosy,
                lambda trial: {"lr": trial.suggest_categorical("lr", [2.0, 0.5])},
                metric="loss",
                steps=2,
                n_trials=2,
                catch=catch,
                executor=hpstage.InlineExecutor(),
                store=MemoryJournal(),
            )
        if catch:
            assert sorted(trial.state.name for trial in study.trials) == ["COMPLETE", "FAIL"]


def test_a_function_that_leaves_its_loop_ends_training() -> None:
    def leaving(run: Run) -> None:
        run.attach()
        for _ in run.steps():
            break

    with pytest.raises(StopTraining, match="leaving has left its loop in step 0"):
        trained(made(leaving), 1)


def test_a_state_with_other_attached_objects_is_refused() -> None:
    state = clone(trained(made(adding), 1).state_dict())

    def other(run: Run) -> None:
        run.attach(sum=Total())
        for _ in run.steps():
            pass

    with pytest.raises(StateError, match=r"\['total'\], but run.attach\(\) was given \['sum'\]"):
        made(other).load_state_dict(state)
    with pytest.raises(StateError, match="not a state of a training function"):
        made(adding).load_state_dict({})


# --- the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
def test_closing_a_trainable_unwinds_its_function_and_ends_its_thread(steps: int) -> None:
    trainable = trained(made(adding), *[1] * steps)
    trainable.announce(False)
    trainable.state_dict()
    assert threading.active_count() > 1
    trainable.close()
    assert events[-1] == "unwound"
    trainable.close()


def test_deleting_a_trainable_unwinds_its_function() -> None:
    trainable = trained(made(adding), 1)
    del trainable
    gc.collect()
    assert events[-1] == "unwound"


def test_a_function_that_catches_all_exceptions_is_unwound_on_close() -> None:
    def stubborn(run: Run) -> None:
        run.attach()
        for _ in run.steps():
            pass

    def catching(run: Run) -> None:
        try:
            stubborn(run)
        except BaseException:
            events.append("caught")

    catching.stateless = ("events",)  # type: ignore[attr-defined]
    trained(made(catching), 1).close()
    assert events == ["caught"]


def test_a_function_that_imports_torch_itself_starts_from_the_seed_of_the_trial() -> None:
    """In a process without torch, since here it is imported long since."""
    import subprocess
    import sys
    from pathlib import Path

    script = """
import sys
from hpstage.training.function import FunctionTrainable
assert "torch" not in sys.modules
def loop(run):
    import torch
    model = torch.nn.Linear(3, 3)
    run.attach(model=model)
    for step in run.steps():
        pass
def first(seed):
    trainable = FunctionTrainable(loop)
    trainable.setup({"seed": seed})
    return trainable.state_dict()["captured"]["values"]["model.weight"].tolist()
assert first(1) == first(1) != first(2)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_training_function_is_followed_without_looking_at_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sys._current_frames()`` looks at all threads of the process, and has waited for some of JAX's forever."""

    def refuse() -> Any:
        raise AssertionError("it looks at all threads")

    monkeypatch.setattr(sys, "_current_frames", refuse)

    def function(run: Run) -> None:
        total = 0.0
        run.attach()
        for _ in run.steps():
            total += float(run.hp["lr"])  # type: ignore[arg-type]
            if run.wants_report:
                run.report(total=total)

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [2, 4]}))
    result = hpstage.optimize(
        study,
        function,
        lambda trial: {"lr": hpstage.schedule.multistep(1.0, [trial.suggest_categorical("drop", [2, 4])], gamma=0.5)},
        metric="total",
        steps=6,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )
    assert {trial.params["drop"]: trial.value for trial in study.trials} == {2: 4.0, 4: 5.0}
    assert result.savings.steps_trained == 4 + 4 + 2
