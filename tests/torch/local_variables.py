"""Training functions whose local variables decide later steps, and are in the state."""

from __future__ import annotations

import contextlib
import copy
import enum
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from hpstage.training.run import Run
from tests.torch.loops import LATE, Parts, Swallowing, anchor, begun, stepped
from tests.torch.trainables import network, samples, sgd


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


def counting_in_a_function_made_again(run: Run) -> None:
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


class Box:
    def __init__(self, value: float) -> None:
        self.value = value


def referred_to_weakly(run: Run) -> None:
    """The reference is made again with what it refers to."""
    parts = begun(run)
    best = Box(0.0)
    reference = weakref.ref(best)
    for step in run.steps():
        referred = reference()
        stepped(run, parts, 0.0 if referred is None else referred.value)
        if step >= LATE:
            best = Box(best.value + 1)
            reference = weakref.ref(best)


def hooked_after_it_was_attached(run: Run) -> None:
    parts = begun(run)
    calls = []
    parts[0].register_forward_hook(lambda module, inputs, output: calls.append(1))
    for _ in run.steps():
        stepped(run, parts, len(calls) * anchor(parts[0], 0.0))


def hooked_until_late(run: Run) -> None:
    parts = begun(run)
    calls = []
    handle = parts[0].register_forward_hook(lambda module, inputs, output: calls.append(1))
    for step in run.steps():
        if step == LATE:
            handle.remove()
            calls.append(1)
        stepped(run, parts, len(calls) * anchor(parts[0], 0.0))


def taken_from_the_model(run: Run) -> None:
    parts = begun(run)
    parts[0].seen = seen = [0.0]  # type: ignore[assignment]
    for step in run.steps():
        if step == LATE - 2:
            del parts[0].seen
        seen[0] += 1.0
        stepped(run, parts, seen[0] * anchor(parts[0], 0.0))


def kept_from_the_model(run: Run) -> None:
    model = network()
    model.seen = seen = [0.0]  # type: ignore[assignment]
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for step in run.steps():
        if step == LATE - 2:
            del model.seen
        seen[0] += 1.0
        stepped(run, (model, optimizer), seen[0] * anchor(model, 0.0))


def hooked_for_a_step(run: Run) -> None:
    parts = begun(run)
    handle = None
    for step in run.steps():
        number = 0 if handle is None else handle.id
        if step >= LATE - 2:
            handle = parts[0].register_forward_hook(lambda *_: None)
        stepped(run, parts, number)
        if handle is not None:
            handle.remove()


def keeping_what_torch_gives(run: Run) -> None:
    parts = begun(run)
    noise, best, choose = None, None, min
    for step in run.steps():
        drawn = 0.0 if noise is None or best is None else float(choose(noise.sample(), best.values[0]))
        loss = stepped(run, parts, drawn)
        if step >= LATE - 2:
            noise = torch.distributions.Normal(float(loss), 1.0)
            best = torch.stack([loss.detach(), torch.ones(())]).sort()
            choose = max


EXACT: list[Callable[[Run], None]] = [
    hooked_after_it_was_attached,
    hooked_until_late,
    hooked_for_a_step,
    keeping_what_torch_gives,
    kept_from_the_model,
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
    counting_in_a_function_made_again,
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
    referred_to_weakly,
]
