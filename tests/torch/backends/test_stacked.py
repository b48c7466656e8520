"""A member's bits do not depend on how many members there are, on its slot, or on the others."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import repeat
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hpstage.torch.backends.stacked import Builder, Bundle, worth
from tests.torch.backends.siblings import (
    Cnn,
    CoupledAdam,
    Hp,
    Mlp,
    Nesterov,
    Sibling,
    TinyGpt,
    Trial,
    builder,
    train,
    train_eagerly,
)

pytestmark = pytest.mark.sampled(8)

KINDS: dict[str, type[Sibling]] = {kind.__name__: kind for kind in (Mlp, Cnn, Nesterov, CoupledAdam, TinyGpt)}
STEPS = 4

shared = cache(lambda name: builder(KINDS[name]()))
"""Builders, so that programs are built once for all examples."""


@cache
def alone(name: str, id: int) -> list[dict[str, Any]]:
    """States of a member that is trained without others, after each number of steps."""
    trial = Trial(KINDS[name](), id)
    bundle = Bundle(shared(name))
    states = [trial.state()]
    for _ in range(STEPS):
        train(bundle, [trial])
        bundle.sync(bundle.members[0])
        states.append({**trial.state(), "losses": list(trial.losses)})
    return states


def check_companies(name: str, companies: list[list[int]], most: Iterable[int | None] = repeat(None)) -> None:
    """Train in these companies, one for each step, by programs of at most so many."""
    trials: dict[int, Trial] = {}
    bundle = Bundle(shared(name))
    for company, by in zip(companies, most, strict=False):
        for id in company:
            trials.setdefault(id, Trial(KINDS[name](), id))
        train(bundle, [trials[id] for id in company], by)
    for member in list(bundle.members):
        bundle.leave(member)
    for id, trial in trials.items():
        assert trial.state() == alone(name, id)[trial.step]


companies = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=STEPS)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["Mlp", "Cnn"])
@given(companies=companies)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_bits_of_a_model_do_not_depend_on_stacked_models_that_join_or_leave(
    name: str, companies: list[list[int]]
) -> None:
    check_companies(name, companies)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["Cnn", "TinyGpt"])
@given(companies=companies, most=st.lists(st.integers(1, 4), min_size=STEPS, max_size=STEPS))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_bits_of_a_model_do_not_depend_on_how_stacked_models_are_divided_into_programs(
    name: str, companies: list[list[int]], most: list[int]
) -> None:
    check_companies(name, [[0, 1], [0, 1, 2]])  # programs of one, two and three
    made = shared(name)
    check_companies(name, companies, most)
    check_companies(name, [[0, 1, 2, 3, 4]], [3])
    assert max(width for _, width, _ in made._programs) >= 3


class Buffered(Mlp):
    """A buffer of 33 numbers, which products read: in a stack of two, the second is at an address of its own kind."""

    def model(self, hp: Hp) -> nn.Module:
        model = super().model(hp)
        model.register_buffer("v", torch.randn(33))
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * (0.5 + torch.dot(model.v, model.v))

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(3):
                model.v.mul_(1.01).add_(0.013)
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss


@pytest.mark.parametrize("way", [[([0, 1, 2], 2), ([0, 1, 2], 1)] * 2, [([0, 1], 2), ([1], None), ([1], None)]])
def test_buffers_of_stacked_models_are_aligned_like_buffers_of_a_single_model(
    way: list[tuple[list[int], int | None]],
) -> None:
    made = builder(Buffered())
    train(Bundle(made), [Trial(Buffered(), id) for id in range(2)])
    trials, bundle = [Trial(Buffered(), id) for id in range(3)], Bundle(made)
    for ids, most in way:
        train(bundle, [trials[id] for id in ids], most)
        assert all(part.data_ptr() % 64 == 0 for value in bundle._kept if isinstance(value, list) for part in value)
    bundle.sync(trials[1].member)  # type: ignore[arg-type]
    other, alone = Trial(Buffered(), 1), Bundle(made)
    for _ in way:
        train(alone, [other])
    alone.sync(other.member)  # type: ignore[arg-type]
    assert trials[1].state() == other.state()


def test_a_program_for_two_models_is_built_although_there_is_one_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "_PAID", 0.0)
    trials, bundle = [Trial(Mlp(), id) for id in range(4)], Bundle(builder(Mlp()))
    train(bundle, trials)
    for _ in range(STEPS):
        train(bundle, trials, 2)
    assert bundle.widths == [2, 2, 2, 2]


def test_a_stacked_program_that_changes_bits_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "_PAID", 0.0)
    checked: list[int] = []

    def disagrees(self: Builder, step: object, made: Any, example: object) -> bool:
        checked.append(made.width)
        return False

    monkeypatch.setattr(Builder, "_agrees", disagrees)
    made = builder(Mlp())
    trials, bundle = [Trial(Mlp(), id) for id in range(2)], Bundle(made)
    for _ in range(STEPS):
        train(bundle, trials, 2)
    assert checked == [2] and bundle.widths == [1, 1]
    bundle.sync(bundle.members[1])
    assert trials[1].state() == alone("Mlp", 1)[STEPS]


def test_a_step_trains_no_stacked_model_if_one_of_its_programs_fails() -> None:
    trials, bundle = [Trial(Mlp(), id) for id in range(3)], Bundle(shared("Mlp"))
    check_companies("Mlp", [[0, 1]])
    train(bundle, trials[:2], 2)
    train(bundle, trials, 2)
    before = [member.stream for member in bundle.members]
    turns = [trial.turn() for trial in trials]
    x, y = turns[2][0]
    batches = [turns[0][0], turns[1][0], (x, torch.full_like(y, 7))]  # of 5 classes
    with pytest.raises(IndexError, match="7 is out of bounds"):
        bundle.step(batches, [hp for _, hp in turns], 2)
    for member, stream in zip(bundle.members, before, strict=True):
        assert torch.equal(member.stream, stream)
    for trial in trials:
        trial.step -= 1
    train(bundle, trials, 2)
    for trial in trials:
        bundle.sync(trial.member)  # type: ignore[arg-type]
    assert trials[0].state() == alone("Mlp", 0)[3] and trials[2].state() == alone("Mlp", 2)[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@given(companies=companies)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bits_of_a_model_do_not_depend_on_stacked_models_for_any_optimizer(
    name: str, companies: list[list[int]]
) -> None:
    check_companies(name, companies)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.ci
def test_a_model_keeps_its_bits_when_a_stack_shrinks_from_five_models_to_two(name: str) -> None:
    check_companies(name, [[4, 0, 2, 1, 3], [2, 0]])


@pytest.mark.ci
@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["Mlp", "Cnn", "TinyGpt"])
@pytest.mark.parametrize("members", range(1, 25))
@pytest.mark.ci_one_in(2)
def test_bits_of_a_model_do_not_depend_on_the_number_of_stacked_models(name: str, members: int) -> None:
    check_companies(name, [list(range(members))])


@pytest.mark.parametrize("name", KINDS)
def test_a_stacked_step_equals_an_eager_update_up_to_rounding(name: str) -> None:
    """Up to rounding, which is that of this code."""
    stacked, eager = Trial(KINDS[name](), 1), Trial(KINDS[name](), 1)
    bundle = Bundle(shared(name))
    for _ in range(STEPS):
        train(bundle, [stacked])
        train_eagerly(eager)
    bundle.leave(bundle.members[0])
    assert stacked.losses == pytest.approx(eager.losses, rel=1e-5)
    for (key, mine), its in zip(stacked.model.state_dict().items(), eager.model.state_dict().values(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-6), key
    mine, its = stacked.optimizer.state_dict()["state"], eager.optimizer.state_dict()["state"]
    assert {key: set(state) for key, state in mine.items()} == {key: set(state) for key, state in its.items()}


@pytest.mark.parametrize("name", KINDS)
def test_a_trial_that_switches_between_eager_and_stacked_steps_has_eager_losses(name: str) -> None:
    trial, eager = Trial(KINDS[name](), 1), Trial(KINDS[name](), 1)
    bundle = Bundle(shared(name))
    train_eagerly(trial)
    train(bundle, [trial])
    bundle.leave(bundle.members[0])
    train_eagerly(trial)
    for _ in range(3):
        train_eagerly(eager)
    assert trial.losses == pytest.approx(eager.losses, rel=1e-5)


@pytest.mark.parametrize("name", ["Mlp", "TinyGpt"])
def test_hyperparameters_that_change_at_every_step_cause_no_new_trace_or_program(name: str) -> None:
    made: Builder = builder(KINDS[name]())
    bundle = Bundle(made)
    trials = [Trial(KINDS[name](), id) for id in range(3)]
    train(bundle, trials)
    counted = (made.tracer.traced, made.built)
    for _ in range(5):
        train(bundle, trials)
    assert counted == (made.tracer.traced, made.built)
    assert made.tracer.traced == 1  # of three equal models


class Settings:
    """As Hugging Face's configurations: each model has its own."""

    def __init__(self, slope: float) -> None:
        self.slope, self.more, self.itself = slope, {"names": {"a", "b"}}, self


class Configured(Mlp):
    slope = 0.5

    def model(self, hp: Any) -> Any:
        model: Any = super().model(hp)
        model.settings = Settings(self.slope)
        return model

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * model.settings.slope


def test_models_whose_configuration_objects_are_equal_are_traced_once() -> None:
    subject = Configured()
    made, trials = builder(subject), [Trial(subject, id) for id in range(3)]
    train(Bundle(made), trials)
    assert made.tracer.traced == 1
    subject.slope = 0.25
    train(Bundle(made), [other := Trial(subject, 0)])
    assert made.tracer.traced == 2
    assert other.losses == [trials[0].losses[0] / 2]
