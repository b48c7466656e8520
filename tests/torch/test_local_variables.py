"""Local variables on which later steps depend are in the state, whenever they begin to change, or refused by name.

(Verification compares the first steps alone.)
"""

from __future__ import annotations

import contextlib
import copy
import enum
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hpstage.checkpoints.state_tree import clone, digest
from hpstage.errors import StateError, UsageError
from hpstage.training.run import Run
from tests.torch.loops import HP, LATE, Parts, Swallowing, anchor, assert_forks_continue, begun, made, stepped, trained
from tests.torch.trainables import samples

pytestmark = [pytest.mark.sampled(16), pytest.mark.forks]


def averaging_late(run: Run) -> None:
    parts = begun(run)
    swa = None
    for step in run.steps():
        stepped(run, parts)
        if step >= LATE:
            if swa is None:
                swa = AveragedModel(parts[0])
            swa.update_parameters(parts[0])


def anchored_late(run: Run) -> None:
    parts = begun(run)
    frozen = None
    for step in run.steps():
        stepped(run, parts, anchor(parts[0], frozen))
        if step == LATE:
            frozen = next(parts[0].parameters()).detach().clone()


def best_so_far(run: Run) -> None:
    parts = begun(run)
    best = 0.0
    for step in run.steps():
        loss = stepped(run, parts, best)
        if step >= LATE:
            best = min(best, float(loss) - 10)


def counting_late(run: Run) -> None:
    parts = begun(run)
    count = 0
    for step in run.steps():
        stepped(run, parts, count)
        count += step >= LATE


def listing_late(run: Run) -> None:
    parts = begun(run)
    losses: list[float] = []
    for step in run.steps():
        loss = stepped(run, parts, sum(losses))
        if step >= LATE:
            losses.append(float(loss))


def changing_an_array(run: Run) -> None:
    parts = begun(run)
    weights = np.ones(3)
    for step in run.steps():
        stepped(run, parts, float(weights[0]))
        if step >= LATE:
            weights *= 2


def changing_a_tensor_by_another_name(run: Run) -> None:
    parts = begun(run)
    weights = torch.ones(3)
    for step in run.steps():
        stepped(run, parts, weights.sum())
        if step >= LATE:
            weights.numpy()[0] += 1


class Meter:
    def __init__(self) -> None:
        self.seen = 0
        self.of = {"loss": [0.0]}


def metering_late(run: Run) -> None:
    parts = begun(run)
    meter = Meter()
    for step in run.steps():
        stepped(run, parts, sum(meter.of["loss"]))
        if step >= LATE:
            meter.of["loss"].append(1.0)


def drawing_late(run: Run) -> None:
    parts = begun(run)
    batches = iter(range(100))
    for step in run.steps():
        stepped(run, parts, next(batches) if step >= LATE else 0)


def loading_late(run: Run) -> None:
    parts = begun(run)
    batches = iter(DataLoader(TensorDataset(*samples()), batch_size=3))
    for step in run.steps():
        stepped(run, parts, next(batches)[0].mean() if step >= LATE else 0)


def counting_in_an_inner_function(run: Run) -> None:
    parts = begun(run)
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    for step in run.steps():
        stepped(run, parts, counted() if step >= LATE else 0)


def counting_in_a_function_made_anew(run: Run) -> None:
    parts = begun(run)
    count = 0
    for step in run.steps():
        stepped(run, parts, (lambda: count)())
        count += step >= LATE


def conditional(run: Run) -> None:
    parts = begun(run)
    for step in run.steps():
        if step == LATE:
            noise = torch.ones(())
        stepped(run, parts, noise if step > LATE else 0)


def caught(run: Run) -> None:
    """A value of the step before, which only a handler reads."""
    parts = begun(run)
    extra = 0.0
    for step in run.steps():
        try:
            if step >= LATE:
                raise ValueError
            stepped(run, parts)
        except ValueError:
            extra = float(stepped(run, parts, extra))


def swallowed_by_suppress(run: Run) -> None:
    """Where an error is suppressed, the value of an earlier step is read."""
    parts = begun(run)
    extra = 0.0
    for step in run.steps():
        with contextlib.suppress(ValueError):
            if step > LATE:
                raise ValueError
            extra = float(step >= LATE)
        stepped(run, parts, extra)


def swallowed_by_a_class(run: Run) -> None:
    parts = begun(run)
    extra, guard = 0.0, Swallowing()
    for step in run.steps():
        with guard:
            if step > LATE:
                raise ValueError
            extra = float(step >= LATE)
        stepped(run, parts, extra)


def by_a_generator_of_the_users(run: Run) -> None:
    def counted() -> Iterator[int]:
        count = 0
        for step in run.steps():
            count += step >= LATE
            yield count

    parts = begun(run)
    for count in counted():
        stepped(run, parts, count)


def by_a_helper(run: Run) -> None:
    def loop(parts: Parts, weight: float) -> None:
        for step in run.steps():
            stepped(run, parts, weight)
            if step >= LATE:
                weight = 2.0

    loop(begun(run), 1.0)


def read_by_an_inner_function_before_it_is_set(run: Run) -> None:
    def train() -> None:
        stepped(run, parts, extra)

    parts = begun(run)
    extra = 0.0
    for step in run.steps():
        train()
        extra = float(step >= LATE)


def possibly_old(run: Run) -> None:
    parts = begun(run)
    for step in run.steps():
        for x in run.batches(DataLoader(TensorDataset(*samples()), batch_size=8)):
            if x[0].mean() > step:
                loss = x[0].mean()
        run.report(loss=float(loss))
        stepped(run, parts)


def moved_into_the_model(run: Run) -> None:
    """A list that only a variable holds becomes an attribute of the model, and is changed by the old name."""
    parts = begun(run)
    seen = [0.0]
    around = {"seen": seen}
    for step in run.steps():
        if step == LATE:
            parts[0].seen = seen  # type: ignore[assignment]
        stepped(run, parts, sum(getattr(parts[0], "seen", [])) + len(around["seen"]))
        if step > LATE:
            seen.append(1.0)


def one_list_by_two_names(run: Run) -> None:
    parts = begun(run)
    one: list[Any] = []
    other = one
    for step in run.steps():
        stepped(run, parts, len(one))
        if step == LATE:
            one = other = [one]
        if step > LATE:
            other.append(step)


def fetched_ahead(run: Run) -> None:
    """The next batch is fetched while this one is trained, as nanoGPT does."""
    parts = begun(run)
    batch = torch.rand(3)
    for _ in run.steps():
        stepped(run, parts, batch.sum())
        batch = torch.rand(3)


def computed_from_the_model(run: Run) -> None:
    """A fork computes it of the weights that training began with, since it restores its own where the loop begins."""
    parts = begun(run)
    scale = next(parts[0].parameters()).sum().item()
    for _ in run.steps():
        stepped(run, parts, scale)


def scheduled(run: Run) -> None:
    """Neither the scheduler nor the second model and its optimizer are attached."""
    parts = begun(run)
    critic = torch.nn.Linear(1, 1)
    second = torch.optim.Adam(critic.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(second, 2, 0.5)
    for _ in run.steps():
        loss = stepped(run, parts, critic(torch.rand(4, 1)).detach().mean())
        second.zero_grad()
        (critic(torch.rand(4, 1)).mean() - loss).square().backward()
        second.step()
        scheduler.step()


def drawing(run: Run) -> None:
    parts = begun(run)
    draw, rng = random.Random(3), np.random.default_rng(5)
    for _ in run.steps():
        stepped(run, parts, draw.random() + rng.random())


def made_of_a_local_class(run: Run) -> None:
    class Window:
        def __init__(self, size: int) -> None:
            self.items, self.size = [0.0], size

    parts = begun(run)
    window = None
    for step in run.steps():
        loss = stepped(run, parts, 0.0 if window is None else sum(window.items))
        window = window or (Window(3) if step >= LATE else None)
        if window is not None:
            window.items = [*window.items, float(loss)][-window.size :]


def graph_of_the_last_step(run: Run) -> None:
    """Only an empty epoch would have it read the loss of the epoch before."""
    parts = begun(run)
    for _ in run.steps():
        for x, _ in DataLoader(TensorDataset(*samples()), batch_size=60):
            loss = parts[0](x).mean()
        stepped(run, parts, loss.detach())


def taught_by_a_copy(run: Run) -> None:
    """It is made between attach() and the loop: in a fork, too, of the weights that training began with."""
    parts = begun(run)
    teacher = copy.deepcopy(parts[0]).eval()
    for step in run.steps():
        stepped(run, parts, teacher(samples()[0]).mean().detach() if step >= LATE else 0)


def recorded_from_the_model(run: Run) -> None:
    parts = begun(run)
    history = [next(parts[0].parameters()).sum().item()]
    best = {"loss": history[0], "of": (history[0],)}
    for _ in run.steps():
        loss = stepped(run, parts, history[0] + best["of"][0])
        if loss < best["loss"]:
            best = {"loss": float(loss), "of": (float(loss),)}


def kept_on_the_model(run: Run) -> None:
    """What is attached changes before the loop, and depends on the weights."""
    parts = begun(run)
    parts[0].scale = scale = [next(parts[0].parameters()).sum().item()]  # type: ignore[assignment]
    for _ in run.steps():
        stepped(run, parts, scale[0])
        scale[0] /= 2


def split(run: Run) -> None:
    """Local variables have their memory in common."""
    x, _ = samples()
    training, validation = x[:20], x[20:]
    weights = np.ones(4, "f4")
    view = torch.from_numpy(weights)[1:]
    parts = begun(run)
    for step in run.steps():
        stepped(run, parts, training.mean() + validation.mean() + x.mean() + view.sum() + float(weights[0]))
        view += step >= LATE
        weights *= 1.5


def read_by_name(run: Run) -> None:
    parts = begun(run)
    for step in run.steps():
        stepped(run, parts, locals().get("last", 0))
        if step >= LATE:
            last = step


class Counting(Iterator[int]):
    def __init__(self, run: Run) -> None:
        self.steps, self.count = run.steps(), 0

    def __next__(self) -> int:
        self.count += 1
        return next(self.steps)


def by_an_iterator_of_the_users(run: Run) -> None:
    parts = begun(run)
    counting = Counting(run)
    for _ in counting:
        stepped(run, parts, counting.count)


class Phase(enum.Flag):
    WARM = 1
    COLD = 2


def flagged(run: Run) -> None:
    parts = begun(run)
    phase = Phase.WARM
    for step in run.steps():
        stepped(run, parts, phase.value)
        if step >= LATE:
            phase = Phase.WARM | Phase.COLD if step % 2 else Phase(0)


EXACT: list[Callable[[Run], None]] = [
    taught_by_a_copy,
    recorded_from_the_model,
    kept_on_the_model,
    split,
    read_by_name,
    flagged,
    averaging_late,
    anchored_late,
    best_so_far,
    counting_late,
    listing_late,
    changing_an_array,
    changing_a_tensor_by_another_name,
    metering_late,
    counting_in_an_inner_function,
    counting_in_a_function_made_anew,
    read_by_an_inner_function_before_it_is_set,
    conditional,
    caught,
    swallowed_by_suppress,
    swallowed_by_a_class,
    by_a_generator_of_the_users,
    by_a_helper,
    possibly_old,
    moved_into_the_model,
    one_list_by_two_names,
    fetched_ahead,
    computed_from_the_model,
    scheduled,
    drawing,
    made_of_a_local_class,
    graph_of_the_last_step,
]


@pytest.mark.parametrize("function", EXACT)
def test_local_variables_on_which_later_steps_depend_are_in_the_state(function: Callable[[Run], None]) -> None:
    assert_forks_continue(function)


def over_epochs(run: Run) -> None:
    """The iterator of the outer loop is no variable."""
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


REFUSED: dict[Callable[[Run], None], str] = {
    drawing_late: "local variable batches is a range_iterator that has moved on",
    loading_late: "local variable batches",
    over_epochs: "local variable",
    within_epochs: "local variable count",
    within_an_expression: "local variable total",
    by_an_iterator_of_the_users: r"local variable self\.count",
    counted_around: "local variable enumerate",
    generating: "local variable numbers",
    viewing: "local variable (last|weights)",
    forgetting: "local variable extra, .* it was 1.0 where .* and is nothing",
    choosing_code: "local variable add",
    mapping: "local variable mapped",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_no_state_can_hold_is_refused_by_name(function: Callable[[Run], None]) -> None:
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


def test_a_fork_that_reads_what_no_state_can_hold_fails_by_name() -> None:
    """It never trains with another value."""
    first = trained(reading_the_graph, 1)
    state = clone(first.state_dict())
    first.close()
    forked = made(reading_the_graph)
    forked.load_state_dict(state)
    with pytest.raises(UnboundLocalError, match="'loss'") as raised:
        forked.train(1, HP)
    assert "This is a fork" in raised.value.__notes__[0]
    forked.close()


def keeping_it_on_the_run(run: Run) -> None:
    parts = begun(run)
    for _ in run.steps():
        run.count = stepped(run, parts)  # type: ignore[attr-defined]


def test_a_run_is_given_nothing_to_keep() -> None:
    with pytest.raises(UsageError, match=r"run\.count"):
        trained(keeping_it_on_the_run, 1)


def reporting_before_the_loop(run: Run) -> None:
    parts = begun(run)
    first = next(parts[0].parameters()).sum().item()
    if run.wants_report:
        run.report(loss=first)
    for _ in run.steps():
        stepped(run, parts, first)


def test_a_state_is_measured_before_the_loop_and_trained_as_before() -> None:
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
def test_a_variable_that_is_named_stateless_may_change(function: Callable[[Run], None]) -> None:
    def train(run: Run) -> None:
        function(run)

    train.stateless = ("swa", "meter", "count")  # type: ignore[attr-defined]
    trainable = trained(train, LATE + 3)
    trainable.state_dict()
    trainable.close()


def begun_anew(run: Run) -> None:
    parts = begun(run)
    steps = run.steps()
    for _ in range(3):
        for _, _ in zip(range(5), steps, strict=False):
            stepped(run, parts)


def asked_at_two_places(run: Run) -> None:
    parts = begun(run)
    steps = run.steps()
    next(steps)
    stepped(run, parts)
    while True:
        next(steps)
        stepped(run, parts)


def test_a_loop_that_begins_anew_is_refused() -> None:
    """What counts its steps is no local variable, and a fork would have it count from there."""
    with pytest.raises(UsageError, match="looped over twice"):
        trained(begun_anew, 7)


def test_steps_that_are_asked_for_at_another_place_are_refused() -> None:
    trainable = trained(asked_at_two_places, 3)
    with pytest.raises(StateError, match="asked_at_two_places waits for the next step at another place"):
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


def test_a_state_is_taken_of_a_loop_that_waits_for_its_first_step() -> None:
    trainable = made(averaging_late)
    assert trainable.state_dict()
    trainable.close()


def counted(run: Run) -> None:
    parts = begun(run)
    for count, step in enumerate(run.steps()):
        stepped(run, parts, step)
        if count > 100:
            parts[0].train()


def zipped(run: Run) -> None:
    parts = begun(run)
    for step, factor in zip(run.steps(), itertools.cycle([1.0, 1.5]), strict=False):
        stepped(run, parts, step)
        next(parts[0].parameters()).data.mul_(factor)


@pytest.mark.parametrize(("function", "name"), [(counted, "enumerate"), (zipped, "zip")])
def test_an_iterator_that_moves_on_with_the_steps_is_refused_by_name(function: Callable[[Run], Any], name: str) -> None:
    with pytest.raises(StateError, match=f"changed local variable {name}"):
        trained(function, 2).state_dict()
