"""The torch loop: order of data, schedules in the optimizer, modes, and errors that name the remedy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

import hpstage
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.errors import NonFiniteLoss, StateError, TrainingError, UsageError
from hpstage.store import MemoryJournal
from hpstage.torch.data import batches_of
from hpstage.torch.environment import describe
from hpstage.training.randomness import rekey
from hpstage.training.sample_order import SampleOrder
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import SAMPLES, Averaged, Small, adam, advance, fresh, hp_at, samples

pytestmark = pytest.mark.sampled(4)

CPU = torch.device("cpu")


# --- order ------------------------------------------------------------------------------------------------


class Recording(Small):
    """Remembers which samples each batch had."""

    def dataset(self) -> TensorDataset:
        return TensorDataset(*samples(), torch.arange(SAMPLES))

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        x, y, number = batch
        seen.append(number.tolist())
        super().update(model, optimizer, (x, y))


class RecordingEpochs(Recording):
    step_unit = "epoch"


seen: list[list[int]] = []


def seen_in(obj: Recording, batch_sizes: list[int]) -> list[list[int]]:
    seen.clear()
    trainable = fresh(obj)
    for step, size in enumerate(batch_sizes):
        trainable.train(step, {**hp_at(0), "batch_size": size})
    return list(seen)


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_every_epoch_has_every_sample_once_in_its_own_order() -> None:
    numbers = flat(seen_in(Recording(), [10] * 6))
    first, second = numbers[:SAMPLES], numbers[SAMPLES:]
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second


def test_the_order_of_samples_does_not_depend_on_batch_sizes() -> None:
    assert flat(seen_in(Recording(), [7, 11, 3, 20, 19])) == flat(seen_in(Recording(), [15, 15, 30]))


def test_a_batch_at_the_end_of_an_epoch_is_filled_with_samples_of_the_next_epoch() -> None:
    assert [len(batch) for batch in seen_in(Recording(), [8] * 5)] == [8] * 5
    assert [len(batch) for batch in seen_in(Recording(), [70, 8])] == [70, 8]


def test_a_step_with_step_unit_epoch_ends_with_the_epoch() -> None:
    batches = seen_in(RecordingEpochs(), [8, 12])
    assert [len(batch) for batch in batches] == [8, 8, 8, 6, 12, 12, 6]
    assert flat(batches) == flat(seen_in(Recording(), [15] * 4))


def test_the_order_of_samples_is_a_philox_permutation_of_seed_and_epoch() -> None:
    import numpy as np

    expected = np.random.Generator(np.random.Philox(key=[5, 1])).permutation(10)
    assert SampleOrder(10).take(5, 10, 10).tolist() == expected.tolist()
    assert SampleOrder(10).take(5, 7, 6).tolist()[3:] == expected.tolist()[:3]
    assert SampleOrder(10).take(-1, 0, 10).tolist() != SampleOrder(10).take(1, 0, 10).tolist()


# --- batches ----------------------------------------------------------------------------------------------


class Listed(Dataset[Any]):
    """The same samples without tensors to index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    return type(one) is type(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(*samples()), Subset(TensorDataset(*samples()), [5, 3, 8, 1]), TensorDataset(samples()[0])],
)
def test_indexing_tensors_at_once_gives_the_batch_of_default_collate(dataset: Any) -> None:
    for position, count in ((0, 3), (2, 50)):
        quick = batches_of(dataset, None, CPU).take(1, position, count)
        assert same(quick, batches_of(dataset, default_collate, CPU).take(1, position, count))
        assert same(quick, batches_of(Listed(dataset), None, CPU).take(1, position, count))


def test_a_stream_without_a_position_and_an_empty_data_set_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

        def __len__(self) -> int:
            return 3

    with pytest.raises(UsageError, match="map-style"):
        batches_of(Stream(), None, CPU)
    with pytest.raises(UsageError, match="empty"):
        batches_of(TensorDataset(torch.zeros(0, 3)), None, CPU)


def test_data_are_described_by_length_and_content_or_by_the_version_stated() -> None:
    class Changed(Small):
        def dataset(self) -> TensorDataset:
            x, y = samples()
            return TensorDataset(x + 1, y)

    class Stated(Changed):
        data_version = "2"

    described = as_trainable(Small()).describe_data()  # type: ignore[attr-defined]
    assert described.startswith(f"{SAMPLES} x ")
    assert described == as_trainable(Small()).describe_data()  # type: ignore[attr-defined]
    assert described != as_trainable(Changed()).describe_data()  # type: ignore[attr-defined]
    assert as_trainable(Stated()).describe_data().startswith("version 2,")  # type: ignore[attr-defined]


def test_samples_without_a_digest_are_refused_with_the_remedy_data_version() -> None:
    class Odd(Small):
        def dataset(self) -> Any:
            return [threading.Lock()]

    with pytest.raises(UsageError, match="data_version"):
        as_trainable(Odd()).describe_data()  # type: ignore[attr-defined]


# --- schedules in the optimizer ---------------------------------------------------------------------------


def groups_at(obj: Small, *values: dict[str, Any], reload: bool = False) -> list[dict[str, Any]]:
    """The param groups of the state after a step under each of ``values``."""
    base = {"lr": 0.1, "momentum": 0.9, "batch_size": 4}
    trainable = fresh(obj, {**base, **values[0]})
    for step, changed in enumerate(values):
        if reload:
            state = clone(trainable.state_dict())
            trainable.setup({**base, **values[0]})
            trainable.load_state_dict(state)
        trainable.train(step, {**base, **changed})
    return trainable._built.optimizer.param_groups  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("reload", [False, True])
def test_optimizer_fields_follow_the_hyperparameter_of_their_name_also_after_loading(reload: bool) -> None:
    (group,) = groups_at(Small(), {"lr": 0.1}, {"lr": 1, "momentum": 0.5, "weight_decay": 0.01}, reload=reload)
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (1.0, 0.5, 0.01)
    assert type(group["lr"]) is float


def test_betas_follow_beta1_and_beta2() -> None:
    (group,) = groups_at(Small(adam), {"beta1": 0.9}, {"beta1": 0.8})
    assert group["betas"] == (0.8, 0.999)


def test_a_learning_rate_tensor_is_updated_in_place() -> None:
    rate = torch.tensor(0.1)

    def make(parameters: Any, hp: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9)

    (group,) = groups_at(Small(make), {}, {"lr": 0.25})
    assert group["lr"] is rate
    assert rate.item() == 0.25


def two_groups(parameters: Any, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": hp["lr"] * 0.5}, {"params": others}], lr=hp["lr"], momentum=0.9)


def test_a_param_group_built_with_another_lr_is_refused_unless_group_values_sets_it() -> None:
    class Scaled(Small):
        def group_values(self, group: dict[str, Any], hp: Mapping[str, Any]) -> Mapping[str, Any]:
            return {"lr": hp["lr"] * (0.5 if len(group["params"]) == 1 else 1)}

    with pytest.raises(UsageError, match=r"param group 0 .* lr=0.05, .* 'lr' is 0.1 .* group_values"):
        groups_at(Small(two_groups), {})
    groups = groups_at(Scaled(two_groups), {}, {"lr": 0.02})
    assert [group["lr"] for group in groups] == [0.01, 0.02]


def test_group_values_may_depend_on_attributes_that_training_changes() -> None:
    class Halving(Small):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.scale = 1.0

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.scale *= 0.5
            return super().loss(model, batch)

        def group_values(self, group: dict[str, Any], hp: Mapping[str, Any]) -> Mapping[str, Any]:
            return {"lr": hp["lr"] * self.scale}

    straight = advance(fresh(Halving()), 0, 3).state_dict()
    forked = fresh(Halving())
    forked.load_state_dict(clone(advance(fresh(Halving()), 0, 2).state_dict()))
    assert digest(advance(forked, 2, 3).state_dict()) == digest(straight)


# --- the model --------------------------------------------------------------------------------------------


def test_evaluate_runs_without_gradients_and_training_modes_are_restored() -> None:
    class Frozen(Small):
        def model(self, hp: Any) -> nn.Module:
            model = super().model(hp)
            model[1].eval()  # type: ignore[index]  # its statistics are not to change
            models.append(model)
            return model

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            assert not model.training
            assert not torch.is_grad_enabled()
            return super().evaluate(model)

    models: list[Any] = []
    trainable = advance(fresh(Frozen()), 0, 1)
    trainable.evaluate()
    assert [module.training for module in models[0]] == [True, False, True, True, True, True]  # type: ignore[operator, union-attr, attr-defined]
    assert torch.is_grad_enabled()


def test_the_model_is_reused_if_the_initial_hyperparameters_are_the_same() -> None:
    built = []

    class Counting(Small):
        stateless = ("built",)

        def model(self, hp: Any) -> nn.Module:
            built.append(hp)
            return super().model(hp)

    trainable = advance(fresh(Counting()), 0, 2)
    state = clone(trainable.state_dict())
    for _ in range(3):
        trainable.setup(hp_at(0))
        trainable.load_state_dict(state)
    assert len(built) == 1
    trainable.setup({**hp_at(0), "lr": 0.5})
    trainable.load_state_dict(state)
    assert len(built) == 2


def test_attributes_set_in_training_do_not_remain_on_the_users_object() -> None:
    subject = Averaged()
    before = dict(vars(subject))
    trainable: Any = advance(fresh(subject), 0, 1)
    trainable.close()
    assert vars(subject) == before


# --- errors -----------------------------------------------------------------------------------------------


def failing(**members: Any) -> Small:
    return type("Digits", (Small,), members)()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("members", "error", "match"),
    [
        ({"loss": lambda *_: 3.0}, UsageError, r"Digits.loss\(\) returned float; it must return a scalar tensor"),
        ({"loss": lambda *_: torch.ones(2)}, UsageError, r"a tensor of shape \(2,\)"),
        ({"evaluate": lambda *_: 3.0}, TrainingError, r"Digits.evaluate\(\) returned float; return a dict"),
        ({"evaluate": lambda *_: {"a": "1"}}, TrainingError, "gave str for 'a'"),
        ({"evaluate": lambda *_: {"a": torch.ones(2)}}, TrainingError, "gave Tensor for 'a'"),
        ({"evaluate": lambda *_: {1: 2.0}}, TrainingError, "names of metrics are str"),
        ({"model": lambda *_: 3}, UsageError, r"Digits.model\(\) returned int; it must return a torch.nn.Module"),
        ({"optimizer": lambda *_: 3}, UsageError, r"Digits.optimizer\(\) returned int"),
        ({"step_unit": "minute"}, UsageError, "step_unit is 'minute'"),
    ],
)
def test_wrong_return_values_of_methods_are_refused_by_name(
    members: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        advance(fresh(failing(**members)), 0, 1).evaluate()


@pytest.mark.parametrize("hp", [{"lr": 0.1}, {"lr": 0.1, "batch_size": 0}, {"lr": 0.1, "batch_size": 4.5}])
def test_a_batch_size_that_is_missing_zero_or_fractional_is_refused(hp: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="batch size"):
        fresh(Small(), {"momentum": 0.9, **hp}).train(0, {"momentum": 0.9, **hp})


def test_the_batch_size_may_be_an_attribute_of_the_trainable() -> None:
    hp = {"lr": 0.1, "momentum": 0.9}
    trainable = fresh(failing(batch_size=5), hp)
    trainable.train(0, hp)
    assert trainable.state_dict()["samples"] == 5  # type: ignore[index]


def test_a_seed_that_is_not_a_whole_number_is_refused() -> None:
    with pytest.raises(UsageError, match="seed"):
        fresh(Small(), {**hp_at(0), "seed": "abc"}).evaluate()


def test_a_loss_that_is_not_finite_ends_training_unless_terminate_on_nan_is_false() -> None:
    def not_finite(**attributes: Any) -> Small:
        return failing(loss=lambda self, model, batch: model(batch[0]).sum() * float("nan"), **attributes)

    with pytest.raises(NonFiniteLoss, match="the training loss is nan in step 0"):
        advance(fresh(not_finite()), 0, 2)
    advance(fresh(not_finite(terminate_on_nan=False)), 0, 2)


@pytest.mark.parametrize("bad", [None, 2])
def test_a_loss_is_read_after_the_next_batch_is_loaded_and_before_that_batch_is_trained(
    bad: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a GPU computes while a batch is made. What is trained, and what it raises, is as if it waited."""
    events: list[str] = []
    read = torch.Tensor.item

    def reading(tensor: torch.Tensor) -> Any:
        events.append("read")
        return read(tensor)

    def update(self: Small, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        events.append("train")
        loss = Small.update(self, model, optimizer, batch)
        return loss * float("nan") if events.count("train") == bad else loss

    def collate(self: Small, batch: Any) -> Any:
        events.append("take")
        if events.count("take") == 3 and bad:
            raise ValueError("the third batch cannot be read")
        return default_collate(batch)

    monkeypatch.setattr(torch.Tensor, "item", reading)
    trainable = fresh(failing(update=update, collate=collate, step_unit="epoch"))
    if bad is None:
        trainable.train(0, hp_at(0))
        assert events == ["take", "train", *["take", "read", "train"] * 3, "read"]
    else:
        with pytest.raises(NonFiniteLoss, match="the training loss is nan in step 0"):
            trainable.train(0, hp_at(0))
        assert events == ["take", "train", "take", "read", "train", "take", "read"]


def test_an_update_that_returns_no_loss_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def silent(self: Small, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        Small.update(self, model, optimizer, batch)

    settings: tuple[tuple[dict[str, Any], int], ...] = (({}, 1), ({"terminate_on_nan": False}, 0))
    for attributes, times in settings:
        caplog.clear()
        advance(fresh(failing(update=silent, **attributes)), 0, 3)
        found = [record.getMessage() for record in caplog.records if "returns no loss" in record.getMessage()]
        assert len(found) == times
        assert all("terminate_on_nan = False" in text for text in found)


def other_network(self: Small, hp: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: Small(adam), "SGD, but optimizer.. returns torch.optim.adam.Adam"),
        (lambda: failing(model=other_network), "another model"),
    ],
)
def test_a_state_of_another_optimizer_or_model_is_refused(other: Callable[[], Small], match: str) -> None:
    state = advance(fresh(Small()), 0, 1).state_dict()
    trainable = fresh(other())
    with pytest.raises(StateError, match=match):
        trainable.load_state_dict(state)
    trainable.setup(hp_at(0))
    advance(trainable, 0, 1)


def test_a_trainable_without_evaluate_cannot_be_created() -> None:
    class Partial(Small):
        evaluate = hpstage_abstract()

    with pytest.raises(TypeError, match="evaluate"):
        Partial()  # type: ignore[abstract]


def test_a_trainable_without_loss_is_refused_unless_it_overrides_update() -> None:
    class Neither(hpstage.torch.TorchTrainable):
        def model(self, hp: Any) -> nn.Module:
            return nn.Linear(1, 1)

        def optimizer(self, model: nn.Module, hp: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

        def dataset(self) -> Any:
            return TensorDataset(torch.ones(4, 1))

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"weight": float(model.weight.sum())}  # type: ignore[arg-type]

    class Updated(Neither):
        def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
            optimizer.zero_grad()
            model(batch[0]).sum().backward()
            optimizer.step()

    with pytest.raises(UsageError, match=r"Neither has neither loss\(model, batch\) nor an update\(\) of its own"):
        as_trainable(Neither())
    trainable = as_trainable(Updated())
    trainable.setup({"batch_size": 2})
    before = trainable.evaluate()
    trainable.train(0, {"batch_size": 2})
    assert trainable.evaluate() != before


def hpstage_abstract() -> Any:
    from hpstage.torch import TorchTrainable

    return TorchTrainable.evaluate


# --- cost -------------------------------------------------------------------------------------------------


def test_a_step_takes_less_than_three_times_as_long_as_seeding_and_loading_its_batch() -> None:
    """Without keying the generators and taking the batch. Both are timed in turns, since the machine may be busy."""

    class Idle(Small):
        def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
            pass

    trainable, hp = fresh(Idle()), hp_at(0)
    batches = batches_of(TensorDataset(*samples()), None, CPU)

    def least() -> None:
        for step in range(100):
            rekey(3, step)
            batches.take(3, 8 * step, 8)

    def whole() -> None:
        for step in range(100):
            trainable.train(step, hp)

    def seconds(run: Callable[[], None]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    times = [(seconds(whole), seconds(least)) for _ in range(20)]
    assert min(took for took, _ in times) < 3 * min(took for _, took in times)


def test_the_environment_describes_torch_device_isa_threads_and_numerics() -> None:
    described = describe("cpu")
    assert {"torch", "device", "isa", "threads", "numerics"} <= described.keys()
    assert described["threads"] == "1"
    assert all(isinstance(value, str) for value in described.values())


def test_a_hyperparameter_that_the_space_lacks_and_the_model_reads_is_refused_before_training() -> None:
    study = optuna.create_study()
    with pytest.raises(
        UsageError, match=r"training cannot begin: .*the space returns no hyperparameter 'width'; it has"
    ):
        hpstage.optimize(
            study,
            failing(model=lambda _, hp: torch.nn.Linear(4, hp["width"])),
            lambda trial: {"lr": 0.1, "batch_size": 4, "momentum": trial.suggest_float("momentum", 0.0, 0.9)},
            metric="loss",
            steps=3,
            n_trials=2,
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
        )
