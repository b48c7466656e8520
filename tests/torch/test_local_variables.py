"""Local variables on which later steps depend are in the state, whenever they begin to change, or refused by name.

(Verification compares the first steps alone.)
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm import tqdm

from hpstage.checkpoints.state_tree import clone, digest
from hpstage.errors import StateError, UsageError
from hpstage.training.run import Run
from tests.torch.local_variables import (
    EXACT,
    Box,
    averaging_late,
    by_an_iterator_of_the_users,
    counting_in_an_inner_function,
    drawing_late,
    loading_late,
    metering_late,
    taken_from_the_model,
)
from tests.torch.loops import HP, LATE, assert_forks_continue, begun, made, stepped, trained
from tests.torch.trainables import samples

pytestmark = [pytest.mark.sampled(16), pytest.mark.forks]


@pytest.mark.ci
@pytest.mark.parametrize("function", EXACT)
def test_local_variables_on_which_later_steps_depend_are_in_the_state(function: Callable[[Run], None]) -> None:
    assert_forks_continue(function)


def test_a_local_variable_whose_object_the_model_held_until_a_late_step_is_in_the_state() -> None:
    """Its place in the state depends on whether it is that of the fork's code or of the state, its content does not."""

    def weights(trainable: Any) -> dict[str, Any]:
        return {path: text for path, text in trainable.portrait().items() if path.startswith("model.")}

    straight = trained(taken_from_the_model, LATE + 3)
    first = trained(taken_from_the_model, LATE)
    forked = made(taken_from_the_model)
    forked.load_state_dict(clone(first.state_dict()))
    for step in range(LATE, LATE + 3):
        forked.train(step, HP)
    assert weights(forked) == weights(straight)
    for trainable in (straight, first, forked):
        trainable.close()


def over_epochs(run: Run) -> None:
    """The iterator of the outer loop is not a variable."""
    parts = begun(run)
    steps = run.steps()
    count = 0
    for epoch in range(3):
        for _ in range(4):
            next(steps)
            stepped(run, parts, count + epoch)
            count += 1


def within_epochs(run: Run) -> None:
    parts = begun(run)
    count = 0
    for _ in range(1):
        for step in run.steps():
            stepped(run, parts, count)
            count += step >= LATE


def within_an_expression(run: Run) -> None:
    """The operand to the left of ``next`` is read before it, and no variable."""
    parts = begun(run)
    steps, total = run.steps(), 0.0
    while True:
        total = total + next(steps)
        stepped(run, parts, total)


def counted_around(run: Run) -> None:
    parts = begun(run)
    count = 0
    for number, step in enumerate(run.steps()):
        stepped(run, parts, count + number)
        count += step >= LATE


def generating(run: Run) -> None:
    parts = begun(run)
    numbers = (number for number in itertools.count())
    for _ in run.steps():
        stepped(run, parts, next(numbers))


def viewing(run: Run) -> None:
    parts = begun(run)
    weights = torch.ones(4)
    last = weights[:1]
    for step in run.steps():
        stepped(run, parts, last.sum())
        if step >= LATE:
            last = weights[step % 4 :]
            weights += 1


def replaying(run: Run) -> None:
    """Rows of the data in a memory, as they are, and as an array."""
    parts = begun(run)
    data, rows = torch.arange(12.0).reshape(4, 3), np.arange(12.0).reshape(4, 3)
    memory: deque[Any] = deque(maxlen=3)
    for step in run.steps():
        stepped(run, parts, 0.01 * sum(row.sum() for pair in memory for row in pair))
        if step >= LATE:
            memory.append((data[step % 4], rows[1:, step % 3]))
            data *= 1.1
            rows -= 1


@pytest.mark.parametrize("function", [viewing, replaying])
def test_views_of_tensors_in_local_variables_are_in_the_state(function: Callable[[Run], None]) -> None:
    assert_forks_continue(function)


def forgetting(run: Run) -> None:
    parts = begun(run)
    extra = 1.0
    for step in run.steps():
        stepped(run, parts, extra if step < LATE else 0.0)
        if step == LATE:
            del extra


def mapping(run: Run) -> None:
    parts = begun(run)
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        mapped = np.memmap(file.name, "f8", mode="r+")
        for step in run.steps():
            stepped(run, parts, float(mapped[0]))
            mapped[0] += step >= LATE


def choosing_code(run: Run) -> None:
    parts = begun(run)
    add: Any = copy.copy(float)
    for step in run.steps():
        stepped(run, parts, add(step))
        if step >= LATE:
            add = lambda number: number + step  # noqa: E731, B023


def referred_to_no_longer(run: Run) -> None:
    parts = begun(run)
    best = Box(0.0)
    reference = weakref.ref(best)
    for step in run.steps():
        stepped(run, parts, best.value + (reference() is None))
        if step == LATE:
            best = Box(1.0)


REFUSED: dict[Callable[[Run], None], str] = {
    drawing_late: "local variable batches is a range_iterator that has moved on",
    loading_late: "local variable batches",
    over_epochs: "local variable",
    within_epochs: "local variable count",
    within_an_expression: "local variable total",
    by_an_iterator_of_the_users: r"local variable self\.count",
    counted_around: "local variable enumerate",
    generating: "local variable numbers",
    forgetting: "local variable extra, .* it was 1.0 where .* and is nothing",
    choosing_code: "local variable add",
    mapping: "local variable mapped",
    referred_to_no_longer: "what local variable reference refers to is referred to weakly",
}


@pytest.mark.parametrize("function", REFUSED)
def test_local_variables_that_no_state_can_hold_are_refused_by_name(function: Callable[[Run], None]) -> None:
    trainable = trained(function, LATE)
    with contextlib.suppress(StateError):
        trainable.state_dict()
    for step in range(LATE, LATE + 3):
        trainable.train(step, HP)
    with pytest.raises(StateError, match=REFUSED[function]):
        trainable.state_dict()
    trainable.close()


def reading_the_graph(run: Run) -> None:
    parts = begun(run)
    for step in run.steps():
        if step != 1:
            loss = parts[0](samples()[0]).mean()
        stepped(run, parts, loss.detach())


def test_a_fork_that_reads_a_local_variable_without_a_saved_value_fails_by_name() -> None:
    """It never trains with another value."""
    first = trained(reading_the_graph, 1)
    state = clone(first.state_dict())
    first.close()
    forked = made(reading_the_graph)
    forked.load_state_dict(state)
    with pytest.raises(UnboundLocalError, match="'loss'") as raised:
        forked.train(1, HP)
    assert "This is a fork, in which loss has no value" in raised.value.__notes__[0]
    assert "graph" in raised.value.__notes__[0]
    forked.close()


def with_a_rule_made_late(run: Run) -> None:
    parts = begun(run)
    for step in run.steps():
        if step == 0:
            other = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
            scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda epoch: 0.9**epoch)
        stepped(run, parts, scheduler.get_last_lr()[0])
        other.step()
        scheduler.step()


def test_a_fork_names_the_local_variable_that_could_not_be_saved_and_the_reason() -> None:
    first = trained(with_a_rule_made_late, 1)
    state = clone(first.state_dict())
    first.close()
    forked = made(with_a_rule_made_late)
    forked.load_state_dict(state)
    with pytest.raises(UnboundLocalError, match="'scheduler'") as raised:
        forked.train(1, HP)
    why = r"scheduler has no value.*lr_lambdas\[0\] holds a function.*run\.attach\(\)"
    assert re.search(why, raised.value.__notes__[0])
    forked.close()


def keeping_it_on_the_run(run: Run) -> None:
    parts = begun(run)
    for _ in run.steps():
        run.count = stepped(run, parts)  # type: ignore[attr-defined]


def test_setting_an_attribute_on_run_is_refused() -> None:
    with pytest.raises(UsageError, match=r"run\.count"):
        trained(keeping_it_on_the_run, 1)


def reporting_before_the_loop(run: Run) -> None:
    parts = begun(run)
    first = next(parts[0].parameters()).sum().item()
    if run.wants_report:
        run.report(loss=first)
    for _ in run.steps():
        stepped(run, parts, first)


def test_a_report_before_the_loop_evaluates_a_loaded_state_without_changing_training() -> None:
    straight = trained(reporting_before_the_loop, LATE)
    state = straight.state_dict()
    assert isinstance(state, dict)
    forked = made(reporting_before_the_loop)
    forked.load_state_dict(clone(state | {"metrics": None}))
    assert forked.evaluate() == {"loss": next(straight.hand_over()["model"].parameters()).sum().item()}  # type: ignore[attr-defined]
    forked.train(LATE, HP)
    assert digest(forked.state_dict()) == digest(trained(reporting_before_the_loop, LATE + 1).state_dict())
    forked.close()


@pytest.mark.parametrize("function", [averaging_late, metering_late, counting_in_an_inner_function])
def test_a_local_variable_that_is_declared_stateless_may_change(function: Callable[[Run], None]) -> None:
    def train(run: Run) -> None:
        function(run)

    train.stateless = ("swa", "meter", "count")  # type: ignore[attr-defined]
    trainable = trained(train, LATE + 3)
    trainable.state_dict()
    trainable.close()


def started_again(run: Run) -> None:
    parts = begun(run)
    steps = run.steps()
    for _ in range(3):
        for _, _ in zip(range(5), steps, strict=False):
            stepped(run, parts)


def stepping_at_two_places(run: Run) -> None:
    parts = begun(run)
    steps = run.steps()
    next(steps)
    stepped(run, parts)
    while True:
        next(steps)
        stepped(run, parts)


def test_a_second_loop_over_the_same_steps_is_refused() -> None:
    """What counts its steps is not a local variable, and a fork would have it count from there."""
    with pytest.raises(UsageError, match="looped over twice"):
        trained(started_again, 7)


def test_a_function_that_takes_steps_at_two_places_is_refused() -> None:
    trainable = trained(stepping_at_two_places, 3)
    with pytest.raises(StateError, match="stepping_at_two_places waits for the next step at another place"):
        trainable.state_dict()
    trainable.close()


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, int]:
        return {"position": 0}

    def load_state_dict(self, state: Any) -> None:
        pass


def of_nothing(data: Callable[[], Any]) -> Callable[[Run], None]:
    def function(run: Run) -> None:
        begun(run)
        loader = DataLoader(data(), batch_size=8, drop_last=True)
        for _ in run.steps():
            for batch in run.batches(loader):
                loss = batch[0].mean()
            run.report(loss=loss.item())

    return function


@pytest.mark.parametrize("data", [Empty, lambda: TensorDataset(*(part[:2] for part in samples()))])
def test_an_epoch_without_a_batch_is_refused(data: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"is empty|every batch is dropped"):
        trained(of_nothing(data), 1)


def test_the_state_of_a_function_can_be_saved_before_its_first_step() -> None:
    trainable = made(averaging_late)
    assert trainable.state_dict()
    trainable.close()


def counted(run: Run) -> None:
    parts = begun(run)
    for count, step in enumerate(run.steps()):
        stepped(run, parts, step)
        if count > 100:
            parts[0].train()


def counted_around_a_bar(run: Run) -> None:
    parts = begun(run)
    for count, step in enumerate(tqdm(run.steps(), disable=True)):
        stepped(run, parts, step)
        if count > 100:
            parts[0].train()


class Passing:
    """An iterator of the user's."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.of)


def counted_around_an_object(run: Run) -> None:
    parts = begun(run)
    for count, step in enumerate(Passing(run.steps())):
        stepped(run, parts, step)
        if count > 100:
            parts[0].train()


def zipped(run: Run) -> None:
    parts = begun(run)
    for step, factor in zip(run.steps(), itertools.cycle([1.0, 1.5]), strict=False):
        stepped(run, parts, step)
        next(parts[0].parameters()).data.mul_(factor)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (counted, "enumerate"),
        (counted_around_a_bar, "enumerate"),
        (counted_around_an_object, "enumerate"),
        (zipped, "zip"),
    ],
)
def test_an_iterator_that_advances_with_the_steps_is_refused_by_name(function: Callable[[Run], Any], name: str) -> None:
    with pytest.raises(StateError, match=f"changed local variable {name}"):
        trained(function, 2).state_dict()
