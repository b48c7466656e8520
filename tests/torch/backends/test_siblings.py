"""Searches whose siblings are trained as one: the bits are those of a stack of one, whatever the others are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpstage
import hpstage.torch
from hpstage import schedule as s
from hpstage.algos import ASHA, SuccessiveHalving
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import UsageError
from hpstage.plan.facts import ChainStarted, StateReached
from hpstage.plan.log import read_facts
from hpstage.store import MemoryJournal
from hpstage.torch.backends.siblings import StackedLoop
from tests.bundled import Unmeasured
from tests.invariants import validate

pytestmark = pytest.mark.sampled(5)

STEPS = 12
X = torch.linspace(-2, 2, 80).reshape(20, 4)
Y = X.sin().sum(1, keepdim=True)
Digests = dict[tuple[int, int], tuple[float, str]]


class Siblings(hpstage.torch.TorchTrainable):
    device = "cpu"
    numerics = "stacked"
    max_stacked = 1

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.2), nn.Linear(7, 1))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=0.9, weight_decay=hp.get("weight_decay", 0.0))

    def dataset(self) -> Any:
        return TensorDataset(X, Y)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": nn.functional.mse_loss(model(X), Y).item()}


class Epochs(Siblings):
    """The last batch of an epoch is short."""

    step_unit = "epoch"


class Frozen(Siblings):
    """The first layer is the same in all trials and is never trained; those of one seed train on the same batches."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        first = nn.Linear(4, 4).requires_grad_(False)
        first.load_state_dict({"weight": torch.linspace(-1, 1, 16).reshape(4, 4), "bias": torch.ones(4)})
        return nn.Sequential(first, nn.Tanh(), super().model(hp))


def space(trial: optuna.Trial) -> dict[str, Any]:
    """Trials differ in what is a number of the graph, in its shapes, in its formulas, and in the order of data."""
    return {
        "lr": s.multistep(trial.suggest_categorical("lr", [0.1, 0.05]), [trial.suggest_int("drop", 2, 8, step=3)]),
        "batch_size": s.piecewise({0: 6, 5: trial.suggest_categorical("late", [6, 8])}),
        "weight_decay": trial.suggest_categorical("decay", [0.0, 0.01]),
        "seed": trial.suggest_int("seed", 0, 1),
    }


def search(trainable: object, stacked: int, space: Any = space, **options: Any) -> hpstage.Result:
    trainable.max_stacked = stacked  # type: ignore[attr-defined]
    study = options.pop("study", None) or optuna.create_study(
        study_name="study", sampler=optuna.samplers.RandomSampler(seed=4)
    )
    settings: dict[str, Any] = {"metric": "loss", "steps": STEPS, "n_trials": 10, "store": MemoryJournal()}
    settings |= {"executor": Unmeasured(), "checkpoint_every": 5}
    return hpstage.optimize(study, trainable, space, **(settings | options))


def kept(result: hpstage.Result) -> dict[str, str | None]:
    """The digests of all states that are kept, by key."""
    return {key: state.digest for key, state in result.plan.kept.items()}


@pytest.mark.ci
@pytest.mark.one_in(3)
@pytest.mark.ci_one_in(2)
@pytest.mark.parametrize("kind", [Siblings, Epochs, Frozen])
@pytest.mark.parametrize("algorithm", [None, SuccessiveHalving(3, 2), ASHA(3, 2)], ids=repr)
def test_bits_of_a_search_do_not_depend_on_how_many_siblings_are_stacked(kind: type[Siblings], algorithm: Any) -> None:
    alone, together = (search(kind(), stacked, algorithm=algorithm) for stacked in (1, 4))
    validate(together.plan)
    ours, theirs = kept(alone), kept(together)
    common = ours.keys() & theirs.keys()
    assert len(common) > 10 and all(ours[key] == theirs[key] for key in common)
    if algorithm is None or algorithm.synchronous:
        assert [trial.value for trial in alone.study.trials] == [trial.value for trial in together.study.trials]
        assert together.savings.steps_trained == alone.savings.steps_trained == together.savings.steps_unique


@pytest.mark.ci
def test_a_stacked_search_has_the_same_values_with_and_without_sharing() -> None:
    shared, separate = search(Siblings(), 3), search(Siblings(), 3, sharing=False)
    assert [trial.value for trial in shared.study.trials] == [trial.value for trial in separate.study.trials]
    assert shared.savings.steps_trained < separate.savings.steps_trained


@pytest.mark.ci
@pytest.mark.parametrize("kind", [Siblings, Frozen])
def test_every_fork_of_a_stacked_search_is_verified(kind: type[Siblings]) -> None:
    """Also while others are in the middle of their chains."""
    result = search(kind(), 3, verify="all")
    assert result.plan.verified and not result.plan.differences


@pytest.mark.ci
def test_a_sibling_whose_loss_is_not_finite_is_pruned_and_the_other_siblings_complete() -> None:
    def diverging(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": [0.05, 1e30, 0.02][trial.number], "batch_size": 5}

    alone, together = (search(Siblings(), stacked, diverging, n_trials=3) for stacked in (1, 3))
    for result in alone, together:
        states = [trial.state for trial in result.study.trials]
        assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE]
    assert [trial.values for trial in alone.study.trials] == [trial.values for trial in together.study.trials]
    assert all(math.isfinite(trial.value) for trial in together.study.trials if trial.values)


@pytest.mark.ci
def test_models_of_a_stacked_search_can_be_loaded(tmp_path: Path) -> None:
    trainable = Siblings()
    result = search(trainable, 4, store=tmp_path)
    for trial in result.study.trials[:3]:
        loaded = result.load(trial)
        loaded.model.eval()
        assert Siblings().evaluate(loaded.model)["loss"] == trial.value
    assert set(vars(trainable)) == {"max_stacked"}


@pytest.mark.ci
def test_all_slots_of_a_stacked_search_train_chains() -> None:
    journal = MemoryJournal()
    search(Siblings(), 3, store=journal)
    facts = list(read_facts(journal))
    assert {fact.worker for fact in facts if isinstance(fact, ChainStarted)} == {"inline", "inline#1", "inline#2"}
    assert any(fact.source == "live" for fact in facts if isinstance(fact, StateReached))


class Named(Siblings):
    """Has attributes of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def dataset(self) -> Any:
        self.held_out = X, Y
        return super().dataset()


@pytest.mark.ci
def test_a_trainable_with_attributes_has_the_same_values_with_one_slot_or_several() -> None:
    alone, together = (search(Named("it"), stacked, n_trials=4) for stacked in (1, 3))
    assert [trial.value for trial in alone.study.trials] == [trial.value for trial in together.study.trials]


class Words(Siblings):
    """One sibling has an index beyond the table, where its neighbour's rows are."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Embedding(16, 16), nn.Flatten(), nn.Linear(32, 1))

    def dataset(self) -> Any:
        return TensorDataset(torch.arange(40).reshape(20, 2) % 16, Y)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0] + self.hp["beyond"] * (batch[0] == 15)), batch[1])

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": sum(weight.double().sum().item() for weight in model.parameters())}


def test_an_index_outside_an_embedding_fails_only_its_own_trial() -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": [0.01, 0.02, 0.03][trial.number], "beyond": [0, 1, 0][trial.number], "batch_size": 20}

    alone, together = (search(Words(), stacked, space, n_trials=3) for stacked in (1, 3))
    for result in alone, together:
        states = [trial.state for trial in result.study.trials]
        assert states == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
        assert "IndexError" in result.study.trials[1].user_attrs["hpstage:failure"]
    assert [trial.values for trial in alone.study.trials] == [trial.values for trial in together.study.trials]


def test_a_loader_with_worker_processes_is_refused_if_several_models_are_stacked() -> None:
    class Loaded(Siblings):
        def dataset(self) -> Any:
            return DataLoader(list(zip(X, Y, strict=True)), batch_size=5, num_workers=1)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="max_stacked = 1"):
        search(Loaded(), 2, lambda trial: {"lr": 0.1}, n_trials=1)


def test_a_step_trained_for_a_closed_chain_does_not_enter_the_next_chain() -> None:
    """Where a chain is closed after its step was trained with others'."""
    subject = Siblings()
    subject.max_stacked = 2
    first, second = StackedLoop(subject).members()
    hp = {"lr": 0.1, "batch_size": 5}
    for slot in first, second:
        slot.setup(hp)
    loop = first.stack.first  # type: ignore[attr-defined]
    loop.train_together({0: (0, hp), 1: (0, hp)})
    first.train(0, hp)
    second.setup(hp)  # its chain was closed
    second.train(0, hp)
    assert digest(first.state_dict()) == digest(second.state_dict())
    loop.close()


@pytest.mark.parametrize("stacked", [0, 2.0, True])
def test_max_stacked_is_refused_unless_it_is_a_positive_whole_number(stacked: Any) -> None:
    with pytest.raises(UsageError, match="max_stacked is"):
        search(Siblings(), stacked)


class Averaging(Siblings):
    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        self.average = [weight.detach().clone() for weight in model.parameters()]
        return loss


class Counting(Siblings):
    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        return super().loss(model, batch)


class Keeping(Siblings):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.net = super().model(hp)
        return self.net


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Averaging, "changes self.average"),
        (Counting, "self"),
        (Keeping, "changes self.net"),
    ],
)
@pytest.mark.parametrize("stacked", [1, 3])
def test_training_that_cannot_be_stacked_is_refused_by_name(kind: type[Siblings], named: str, stacked: int) -> None:
    with pytest.raises(UsageError, match=f"numerics = 'stacked'.*{named}|{named}.*numerics = 'stacked'"):
        search(kind(), stacked, lambda trial: {"lr": 0.1, "batch_size": 5}, n_trials=3)


class Setting(Siblings):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        torch.set_float32_matmul_precision("medium" if hp["batch_size"] > 5 else "high")
        return super().model(hp)


def set_up(stacked: int, *sizes: int) -> None:
    subject = Setting()
    subject.max_stacked = stacked
    first = StackedLoop(subject)
    try:
        for slot, size in zip((first, *first.members()), sizes, strict=False):
            slot.setup({"lr": 0.1, "batch_size": size})
            slot.prepare()  # type: ignore[attr-defined]
    finally:
        first.close()


def test_slots_that_need_different_settings_of_the_process_are_refused() -> None:
    set_up(2, 5, 5)
    set_up(1, 5, 7)  # one after the other
    with pytest.raises(UsageError, match=r"the setting 'f.* precision.*' of the process from .*eager"):
        set_up(2, 5, 7)


class Logging(Siblings):
    """Logs tensors of the graph, a parameter that the step changes, a hyperparameter and a number; twice one name."""

    step_unit = "epoch"

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.log("loss", loss)
        self.log("weight", model[0].weight[0, 0])
        self.log("rate", self.hp["lr"])
        self.log("number", 3)
        self.log("twice", loss)
        self.log("twice", 3 * loss)
        return loss


@pytest.mark.ci
def test_each_stacked_sibling_logs_the_values_that_it_logs_without_siblings(tmp_path: Path) -> None:
    eager = Logging()
    eager.numerics = "eager"
    # A step of the eager class has other bits, and what it logs is the same but for rounding.
    alone, together, by_itself = (
        search(trainable, stacked, checkpoints=tmp_path / str(index), n_trials=6)
        for index, (trainable, stacked) in enumerate([(Logging(), 1), (Logging(), 4), (eager, 1)])
    )
    for number in range(6):
        values = together.log(number).values
        assert values == alone.log(number).values
        assert values.keys() == {"loss", "weight", "rate", "number", "twice"}
        for name, found in by_itself.log(number).values.items():
            assert values[name] == pytest.approx(found, rel=1e-3)
        assert [*values["loss"]] == steps_of(together, number)
        assert values["twice"] == pytest.approx({step: 2 * loss for step, loss in values["loss"].items()})


def steps_of(result: hpstage.Result, number: int) -> list[int]:
    """The steps that a trial has begun: the loss that ends one is logged as well."""
    ended = result.study.trials[number].state == TrialState.PRUNED
    return list(range(result.trial(number).planned.requested + ended))


class Printing(Logging):
    """Cannot be recorded: each of its models is trained by itself."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.log("item", loss.item())
        return loss


@pytest.mark.ci
def test_a_trainable_that_cannot_be_stacked_logs_a_value_at_each_step(tmp_path: Path) -> None:
    result = search(Printing(), 3, n_trials=2, checkpoints=tmp_path)
    for number in range(2):
        values = result.log(number).values
        assert values["item"] == values["loss"]
        assert [*values["item"]] == steps_of(result, number)
