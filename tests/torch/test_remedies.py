"""What a refusal says is to be done is done, and the search runs."""

from __future__ import annotations

import ast
import ctypes
import itertools
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.cli.naming import trainable_named
from hpstage.errors import StateError, TrainingError
from hpstage.store import MemoryJournal

pytestmark = pytest.mark.forks

STEPS = 5
X = torch.linspace(-1, 1, 64)[:, None]


def searched(trainable: Any) -> list[float | None]:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"at": [2, 3]}))

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": s.multistep(0.1, [trial.suggest_categorical("at", [2, 3])], gamma=0.1)}

    executor = hpstage.InlineExecutor()
    hpstage.optimize(study, trainable, space, metric="loss", steps=STEPS, executor=executor, store=MemoryJournal())
    return [trial.value for trial in study.trials]


class Trainer:
    """Its loop and what it counts for its log are its own, as in many scripts."""

    def __init__(self, run: hpstage.Run) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=run.hp["lr"])
        self.steps, self.seconds = 0, 0.0
        self.sums = {"loss": 0.0}

    def train(self, run: hpstage.Run) -> None:
        run.attach(model=self.model, optimizer=self.optimizer)
        for _ in run.steps():
            self.loss = torch.nn.functional.mse_loss(self.model(X), X * X)
            self.loss.backward()
            self.size = self.model.weight.sum()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            self.seconds += 0.5
            self.sums["loss"] += self.loss.item()
            run.report(loss=self.loss.item())


def by_trainer() -> Callable[[hpstage.Run], None]:
    def train(run: hpstage.Run) -> None:
        Trainer(run).train(run)

    return train


def by_reachable_trainer() -> Callable[[hpstage.Run], None]:
    def train(run: hpstage.Run) -> None:
        trainer = Trainer(run)
        trainer.model.__dict__["trainer"] = trainer
        trainer.train(run)

    return train


class Part:
    def __init__(self) -> None:
        self.count, self.other = itertools.count(), itertools.count()


def by_items() -> Callable[[hpstage.Run], None]:
    def train(run: hpstage.Run) -> None:
        parts, model = [Part(), Part()], torch.nn.Linear(1, 1)
        run.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=run.hp["lr"]))
        for _ in run.steps():
            next(parts[0].count)
            next(parts[1].other)
            run.report(loss=run.hp["lr"])

    return train


class Counting:
    """Counts in several attributes what is in no state."""

    stateless: tuple[str, ...] = ()

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.weights = torch.zeros(3)
        self.seen, self.log, self.sums = 0, list[int](), {"lr": 0.0}

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.weights += hp["lr"]
        self.seen += 1
        self.log.append(step)
        self.sums["lr"] += hp["lr"]

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(self.weights.sum())}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"].clone()


def stateless_in(message: str) -> tuple[str, ...]:
    (line,) = re.findall(r"`(?:train\.)?stateless = (\(.*?\))`", message)
    return tuple(ast.literal_eval(line))


CASES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "attributes of a local variable": (by_trainer, ("self.size",)),
    "attributes of items": (by_items, ("parts[0].count", "parts[1].other")),
    "attributes of an object": (Counting, ("seen", "log", "sums")),
    "a tensor of a graph": (by_reachable_trainer, ("model.trainer.size",)),
}


@pytest.mark.ci
@pytest.mark.parametrize(("make", "names"), CASES.values(), ids=list(CASES))
def test_an_error_names_all_differing_attributes_and_its_stateless_line_excludes_them(
    make: Callable[[], Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(StateError) as refused:
        searched(make())
    named = stateless_in(str(refused.value))
    assert set(named) == set(names)
    trainable = make()
    trainable.stateless = named
    assert None not in searched(trainable)


SCRIPT = """
import torch

class Meter:
    handle = None

def main(run):
    model, meter = torch.nn.Linear(1, 1), Meter()
    run.attach(model=model)
    for step in run.steps():
        meter.handle = iter([step, 0])
        next(meter.handle)
        run.report(loss=run.hp["lr"])
"""


@pytest.mark.ci
def test_the_stateless_line_of_an_error_works_if_pasted_below_the_function(tmp_path: Path) -> None:
    script = tmp_path / "as_written.py"
    script.write_text(SCRIPT)
    with pytest.raises(StateError) as refused:
        searched(trainable_named(f"{script}:main"))
    (line,) = re.findall(r"`(main\.stateless = .*?)`", str(refused.value))
    script = tmp_path / "as_mended.py"
    script.write_text(f"{SCRIPT}\n{line}\n")
    assert None not in searched(trainable_named(f"{script}:main"))


class Member:
    numbers = itertools.count()
    members = 0

    def __init__(self) -> None:
        next(self.numbers)


class CountedMember:
    members = 0

    def __init__(self) -> None:
        type(self).members += 1


def test_a_count_of_a_class_is_refused_with_a_remedy_that_works() -> None:
    def training(kind: Any) -> Callable[[hpstage.Run], None]:
        def train(run: hpstage.Run) -> None:
            members = [kind()]
            run.attach(counted=Counted())
            for _ in run.steps():
                members.append(kind())
                run.report(loss=kind.members)

        return train

    with pytest.raises(TrainingError, match=r"Member\.numbers has changed .* Keep a position of your own"):
        searched(training(Member))
    assert searched(training(CountedMember)) == [STEPS + 1, STEPS + 1]


class WithAdam:
    """Its state is a pickle of torch's own objects."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=hp["lr"])

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.optimizer.param_groups[0]["lr"] = hp["lr"]
        self.optimizer.zero_grad()
        (self.model(X) - X).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> dict[str, float]:
        return {"loss": (self.model(X) - X).pow(2).mean().item()}

    def state_dict(self) -> dict[str, Any]:
        return {"all": hpstage.pickled((self.model, self.optimizer))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model, self.optimizer = pickle.loads(state["all"])  # noqa: S301  # its own


@pytest.mark.ci
def test_torch_objects_can_be_saved_with_hpstage_pickled() -> None:
    assert None not in searched(WithAdam())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.empty(0, dtype=torch.int64),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.arange(12, dtype=torch.int16)[::3],
        torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)),
    ],
    ids=["plain", "empty", "bfloat16", "view", "parameter"],
)
def test_tensors_saved_with_hpstage_pickled_are_restored_and_give_equal_bytes_again(tensor: torch.Tensor) -> None:
    content = hpstage.pickled(tensor)
    loaded = pickle.loads(content)  # noqa: S301  # its own
    assert type(loaded) is type(tensor)
    assert (loaded.dtype, loaded.stride(), loaded.requires_grad) == (
        tensor.dtype,
        tensor.stride(),
        tensor.requires_grad,
    )
    assert torch.equal(loaded, tensor)
    assert hpstage.pickled(loaded) == content
    with torch.no_grad():
        loaded.zero_()  # its memory can be written


@pytest.mark.ci
def test_an_object_may_be_attached_under_the_name_self() -> None:
    def train(run: hpstage.Run) -> None:
        counted = Counted()
        run.attach(self=counted)
        for _ in run.steps():
            counted.total += run.hp["lr"]
            run.report(loss=counted.total)

    assert None not in searched(train)


class Counted:
    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


class Pointing(Counting):
    """Holds its numbers in memory of a library in C, as LightGBM's boosters do."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        self._hold([0.0])

    def _hold(self, numbers: list[float]) -> None:
        self.memory = (ctypes.c_double * len(numbers))(*numbers)
        self.handle = ctypes.c_void_p(ctypes.addressof(self.memory))

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self._hold([*self.memory, hp["lr"]])

    def evaluate(self) -> dict[str, float]:
        return {"loss": sum(self.memory)}

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": list(self.memory)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._hold(state["numbers"])


@pytest.mark.ci
def test_a_changed_memory_address_in_a_pointer_is_not_a_difference() -> None:
    assert None not in searched(Pointing())


class Numbered(Pointing):
    """Counts in a pointer."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        super().setup(hp)
        self.counted = ctypes.c_void_p(1)

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        super().train(step, hp)
        assert self.counted.value is not None
        self.counted = ctypes.c_void_p(self.counted.value + 1)


def test_a_pointer_used_as_a_counter_is_reported_as_a_difference() -> None:
    with pytest.raises(StateError, match=r"self\.counted is"):
        searched(Numbered())


def test_a_name_in_stateless_does_not_cover_attributes_of_other_objects() -> None:
    subject = by_trainer()
    subject.stateless = ("size",)  # type: ignore[attr-defined]
    with pytest.raises(StateError, match=r"self\.size"):
        searched(subject)


class Seen:
    count = 0
    cache: ClassVar[dict[int, float]] = {}


def test_other_class_attributes_are_restored_if_one_is_declared_stateless() -> None:
    def train(run: hpstage.Run) -> None:
        run.attach(counted=Counted())
        for step in run.steps():
            Seen.count += 1
            Seen.cache[step] = run.hp["lr"]
            run.report(loss=Seen.count)

    train.stateless = ("cache",)  # type: ignore[attr-defined]
    assert searched(train) == [STEPS, STEPS]


def test_a_memory_address_in_an_attached_object_is_refused() -> None:
    def train(run: hpstage.Run) -> None:
        model: Any = torch.nn.Linear(1, 1)
        model.memory, model.handle = ctypes.c_double(0.0), ctypes.c_void_p()
        run.attach(model=model)
        for _ in run.steps():
            model.handle.value = ctypes.addressof(model.memory)
            run.report(loss=run.hp["lr"])

    with pytest.raises(StateError, match=r"model\.handle .*c_void_p"):
        searched(train)


class Playing:
    """Takes its numbers from environments, of which no base class says that they are random."""

    seeded = False

    def __init__(self, run: hpstage.Run) -> None:
        gymnasium = pytest.importorskip("gymnasium")
        self.envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
        self.seen, _ = self.envs.reset(seed=0 if self.seeded else None)
        for env in (self.envs, *self.envs.envs) if self.seeded else ():
            env.action_space.seed(0)
            env.observation_space.seed(0)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=run.hp["lr"])

    def train(self, run: hpstage.Run) -> None:
        self.model.__dict__["player"] = self
        run.attach(model=self.model, optimizer=self.optimizer)
        for _ in run.steps():
            given = self.model(torch.from_numpy(self.seen))
            self.seen = self.envs.step(given.argmax(1).numpy())[0]
            loss = given.square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            run.report(loss=loss.item())


class Seeded(Playing):
    seeded = True


@pytest.mark.ci
def test_environments_without_a_seed_are_refused_with_the_remedy() -> None:
    def unseeded(run: hpstage.Run) -> None:
        Playing(run).train(run)

    def seeded(run: hpstage.Run) -> None:
        Seeded(run).train(run)

    with pytest.raises(StateError, match=r"_np_random is a random generator .*that is unseeded, .* by reset\(seed=0\)"):
        searched(unseeded)
    values = searched(seeded)
    assert values == searched(seeded)
    assert None not in values
