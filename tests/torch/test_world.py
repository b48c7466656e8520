"""What one trial does to the process is not the next one's; inspection changes nothing; groups come and go."""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import hpstage.torch
from hpstage.checkpoints.state_tree import digest, reread
from hpstage.errors import StateError, UsageError
from hpstage.execution.verification import portrait_of
from hpstage.training.capture.portrait import differences
from hpstage.training.capture.world import World
from hpstage.training.identity.code_identity import code_identity
from tests.torch.patterns import PATTERNS
from tests.torch.trainables import FORK, STEPS, Small, advance, fresh, hp_at, outcome

pytestmark = pytest.mark.sampled(4)


class Wide(Small):
    """It sets torch's default dtype where a hyperparameter is set."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        if hp["wide"]:
            torch.set_default_dtype(torch.float64)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3).to(torch.float32))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * (1 + torch.zeros(()).element_size())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"wide": float(torch.get_default_dtype() is torch.float64)}


def test_a_torch_setting_changed_by_a_trial_is_restored_for_the_next_trial() -> None:
    trainable: Any = fresh(Wide(), {**hp_at(0), "wide": False})
    expected = outcome(advance(trainable, 0, 3))
    trainable.setup({**hp_at(0), "wide": True})
    assert outcome(advance(trainable, 0, 3)) != expected
    assert torch.get_default_dtype() is torch.float64
    trainable.setup({**hp_at(0), "wide": False})
    assert outcome(advance(trainable, 0, 3)) == expected
    trainable.close()
    assert torch.get_default_dtype() is torch.float32


def test_a_state_holds_settings_made_by_training_and_not_other_settings_of_the_process() -> None:
    states = []
    for benchmark in (True, False):
        torch.backends.cudnn.benchmark = benchmark
        nn.Identity().register_forward_hook(lambda module, given, made: None)  # torch counts them
        trainable: Any = fresh(PATTERNS["settings of the process"]())
        states.append(digest(advance(trainable, 0, STEPS).state_dict()))
        trainable.close()
    assert states[0] == states[1]


class Decaying(Small):
    """It hooks into all optimizers of the process where a hyperparameter is set."""

    def optimizer(self, model: Any, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        def decay(optimizer: torch.optim.Optimizer, *given: Any) -> None:
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.mul_(0.9)

        if hp["decay"]:
            register_optimizer_step_post_hook(decay)
        return super().optimizer(model, hp)


class Dimming(Small):
    """It hooks into all modules of the process where a hyperparameter is set."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        if hp["decay"]:
            nn.modules.module.register_module_forward_hook(lambda module, given, made: made * 0.9)
        return super().model(hp)


@pytest.mark.parametrize("kind", [Decaying, Dimming])
def test_a_global_torch_hook_registered_by_a_trial_is_removed_for_the_next_trial_and_search(kind: Any) -> None:
    trainable: Any = fresh(kind(), {**hp_at(0), "decay": False})
    expected = outcome(advance(trainable, 0, 3))
    trainable.setup({**hp_at(0), "decay": True})
    decayed = outcome(advance(trainable, 0, 3))
    assert decayed != expected
    trainable.setup({**hp_at(0), "decay": False})
    assert outcome(advance(trainable, 0, 3)) == expected
    trainable.setup({**hp_at(0), "decay": True})
    assert outcome(advance(trainable, 0, 3)) == decayed
    trainable.close()
    assert outcome(advance(fresh(kind(), {**hp_at(0), "decay": False}), 0, 3)) == expected


def scale() -> float:
    return 1.0


def power(by: float) -> float:
    return by


def damped(*, by: float = 1.0) -> float:
    return by


class Rewriting(Small):
    """It gives functions other code and defaults where a hyperparameter is set."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        if hp["other"]:
            scale.__code__ = (lambda: 0.5).__code__
            power.__defaults__ = (2.0,)
            damped.__kwdefaults__["by"] *= 0.5
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * damped() * scale() ** (power.__defaults__ or (1.0,))[0]


def test_code_and_defaults_of_functions_that_a_trial_changes_are_restored_for_the_next_trial() -> None:
    before, identity = scale.__code__, code_identity(Rewriting())
    trainable: Any = fresh(Rewriting(), {**hp_at(0), "other": False})
    expected = outcome(advance(trainable, 0, 3))
    for _ in range(2):
        trainable.setup({**hp_at(0), "other": True})
        assert outcome(advance(trainable, 0, 3)) != expected
        assert damped() == 0.5
        trainable.setup({**hp_at(0), "other": False})
        assert outcome(advance(trainable, 0, 3)) == expected
    trainable.setup({**hp_at(0), "other": True})
    trainable.close()
    assert damped() == 1.0
    assert (scale.__code__, power.__defaults__) == (before, None)
    assert code_identity(Rewriting()) == identity


class Patching(Small):
    """It replaces functions of torch's where a hyperparameter is set, under names that are found by nobody."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        if hp["decay"]:
            setattr(nn.functional, "".join(("cross_", "entropy")), lambda *given: nn.functional.nll_loss(*given))
            setattr(nn.Linear, "".join(("for", "ward")), lambda layer, x: nn.functional.linear(x, layer.weight))
        return super().model(hp)


def test_a_torch_function_patched_by_a_trial_is_restored_for_the_next_trial_and_search() -> None:
    functions = nn.functional.cross_entropy, nn.Linear.forward
    trainable: Any = fresh(Patching(), {**hp_at(0), "decay": False})
    expected = outcome(advance(trainable, 0, 3))
    trainable.setup({**hp_at(0), "decay": True})
    assert outcome(advance(trainable, 0, 3)) != expected
    trainable.setup({**hp_at(0), "decay": False})
    assert outcome(advance(trainable, 0, 3)) == expected
    trainable.setup({**hp_at(0), "decay": True})
    advance(trainable, 0, 3)
    trainable.close()
    assert (nn.functional.cross_entropy, nn.Linear.forward) == functions


class Distilling(Small):
    """Features of a layer, by a hook for the length of a step."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        features: list[torch.Tensor] = []
        handle = model[1].register_forward_hook(lambda module, given, made: features.append(made))
        loss = super().loss(model, batch)
        handle.remove()
        return loss + features[0].square().mean()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        handles = [parameter.register_hook(lambda gradient: gradient * 0.5) for parameter in model.parameters()]
        super().update(model, optimizer, batch)
        for handle in handles:
            handle.remove()


def test_a_fork_is_not_affected_by_a_hook_that_was_registered_and_removed() -> None:
    straight: Any = advance(fresh(Distilling()), 0, STEPS)
    state = reread(advance(fresh(Distilling()), 0, FORK).state_dict())
    nn.Identity().register_forward_hook(lambda module, given, made: None).remove()
    forked: Any = fresh(Distilling())
    forked.load_state_dict(state)
    assert portrait_of(advance(forked, FORK, STEPS)) == portrait_of(straight)


def test_a_difference_in_settings_names_only_the_setting_that_differs() -> None:
    trainable: Any = fresh(Wide(), {**hp_at(0), "wide": False})
    before = trainable.portrait()
    torch.set_default_dtype(torch.float64)
    assert [path for path, _, _ in differences(before, trainable.portrait())] == ["process.default dtype"]
    trainable.close()


class Moving(Small):
    """It changes to a folder that another host may not have."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        os.chdir(self.folder)
        return super().loss(model, batch)


@pytest.mark.ci
def test_a_state_whose_working_folder_is_missing_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    trainable: Any = fresh(Moving(str(folder)))
    state = reread(advance(trainable, 0, 2).state_dict())
    trainable.close()
    folder.rmdir()
    other: Any = fresh(Moving(str(folder)))
    with pytest.raises(StateError, match=r"the state sets process to an object that does not exist here: .*elsewhere"):
        other.load_state_dict(state)


def test_a_tensor_can_still_be_resized_after_its_digest_was_computed() -> None:
    mine = torch.zeros(2)
    digest({"mine": mine})
    mine.resize_(5)
    assert mine.shape == (5,)


class Grouped(Small):
    """A group comes at the fourth step, with a learning rate of its own; the first one goes at the fifth."""

    def __init__(self, rate: float | None) -> None:
        super().__init__()
        self.rate, self.steps = rate, 0

    def optimizer(self, model: Any, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[5].parameters())}]
        return torch.optim.SGD(groups, lr=hp["lr"], momentum=0.9)

    def update(self, model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.steps += 1
        if self.steps == 4:
            rate = self.hp["lr"] if self.rate is None else self.rate
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": rate})
        super().update(model, optimizer, batch)
        if self.steps == 5:
            for parameter in optimizer.param_groups.pop(0)["params"]:
                optimizer.state.pop(parameter)


def test_param_groups_added_and_removed_in_training_are_in_the_state() -> None:
    expected = outcome(advance(fresh(Grouped(None)), 0, STEPS))
    for fork in (3, 4, 5, FORK):
        state = reread(advance(fresh(Grouped(None)), 0, fork).state_dict())
        other = fresh(Grouped(None))
        other.load_state_dict(state)
        assert outcome(advance(other, fork, STEPS)) == expected


def test_a_param_group_added_with_another_lr_than_the_hyperparameter_is_refused() -> None:
    with pytest.raises(UsageError, match=r"param group 2 of SGD was added with lr=0.5, but .*'lr' is 0.1 in this"):
        advance(fresh(Grouped(0.5)), 0, STEPS)
    with pytest.raises(UsageError, match=r"param group 2 of SGD was added with lr=0.5"):
        advance(fresh(Grouped(0.5)), 0, 4).state_dict()


class Returning(Small):
    """Model and optimizer return to what they were before, with the learning rate of then."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.kept = 0, None

    def update(self, model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.steps += 1
        super().update(model, optimizer, batch)
        if self.steps == 2:
            self.kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if self.steps == 4:
            model.load_state_dict(self.kept[0])
            optimizer.load_state_dict(self.kept[1])


def test_an_optimizer_that_loads_an_earlier_state_continues_exactly_after_a_fork() -> None:
    def trained(trainable: Any, start: int, stop: int) -> Any:
        for step in range(start, stop):
            trainable.train(step, {**hp_at(0), "lr": 0.1 / (step + 1)})
        return trainable

    expected = outcome(trained(fresh(Returning()), 0, STEPS))
    for fork in (3, 4, 5):
        other = fresh(Returning())
        other.load_state_dict(reread(trained(fresh(Returning()), 0, fork).state_dict()))
        assert outcome(trained(other, fork, STEPS)) == expected


@functools.cache
def table(size: int) -> torch.Tensor:
    return torch.full((size,), 2.0)


class Cached(Small):
    """A function under ``functools.cache``, whose result is changed, or not."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        self.changes = changes

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        found = table(3)
        if self.changes:
            found.add_(1)
        return super().loss(model, batch) * found.mean()


def test_a_result_of_a_cached_function_is_not_in_the_state_and_may_not_change() -> None:
    table.cache_clear()
    expected = outcome(advance(fresh(Cached(changes=False)), 0, STEPS))
    state = reread(advance(fresh(Cached(changes=False)), 0, FORK).state_dict())
    table.cache_clear()
    other = fresh(Cached(changes=False))
    other.load_state_dict(state)
    assert outcome(advance(other, FORK, STEPS)) == expected

    table.cache_clear()
    trainable: Any = advance(fresh(Cached(changes=True)), 0, 2)
    trainable.state_dict()
    with pytest.raises(StateError, match=r":table'?\.cached\[\d\], which functools.lru_cache keeps, has changed"):
        advance(trainable, 2, 3).state_dict()
    table.cache_clear()


class Turned(Small):
    """A layer becomes one of another class."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.steps = 0
        return super().model(hp)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == 2:
            model[2].__class__ = nn.Tanh
        return super().loss(model, batch)


def test_an_object_whose_class_changes_in_training_is_refused() -> None:
    with pytest.raises(StateError, match=r"model\.2 was a ReLU and has become a Tanh in training"):
        advance(fresh(Turned()), 0, 3).state_dict()


class Inner(hpstage.torch.TorchTrainable):
    """A trainable that trains another one's model, and keeps the other."""

    device = "cpu"
    batch_size = 8

    def __init__(self) -> None:
        self.other = Small()
        self.calls = [0]

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.other.hp = hp
        return self.other.model(hp)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return self.other.optimizer(model, hp)

    def dataset(self) -> Any:
        return self.other.dataset()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls[0] += 1
        return self.other.loss(model, batch) * self.calls[0]

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return self.other.evaluate(model)


def test_a_trainable_within_a_trainable_continues_exactly() -> None:
    expected = outcome(advance(fresh(Inner()), 0, STEPS))
    state = reread(advance(fresh(Inner()), 0, FORK).state_dict())
    other = fresh(Inner())
    other.load_state_dict(state)
    assert outcome(advance(other, FORK, STEPS)) == expected


def test_a_survey_of_unchanged_objects_creates_no_new_records() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4)
    kept = {"table": [(n, str(n)) for n in range(100_000)], "names": {str(n): n for n in range(1000)}}
    world = World((), lambda: [("model", model), ("kept", kept)])
    world.reset()
    world.begin()
    assert world.base is not None
    now = world._surveyor.survey(world._all_roots(), known=world.base)
    assert {id(record) for record in now} == {id(record) for record in world.base}
    assert world.capture()["changed"] == {}


class MetLate(Small):
    """What counts is in a module that nothing names."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.late = importlib.import_module(f"tests.torch.la{'te' if hp else ''}")
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.late.COUNTS.append(1)
        return super().loss(model, batch) * len(self.late.COUNTS)


def test_a_changed_module_that_setup_imports_is_refused_in_the_next_trial() -> None:
    trainable: Any = fresh(MetLate())
    advance(trainable, 0, 2)
    trainable.setup(hp_at(0))
    with pytest.raises(StateError, match=r"tests\.torch\.late:.*COUNTS.* has changed .* Import it at the top of your"):
        advance(trainable, 0, 1)


class MetByText(Small):
    """What counts is in a module that is first imported in training, by a name that nobody can read."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        late = importlib.import_module("tests.torch.late_in_" + type(batch[0]).__name__.replace("Tensor", "training"))
        late.COUNTS.append(1)
        return super().loss(model, batch) * len(late.COUNTS)


def test_a_module_first_imported_in_training_by_a_computed_name_is_refused() -> None:
    trainable: Any = advance(fresh(MetByText()), 0, 2)
    with pytest.raises(StateError, match=r"^tests\.torch\.late_in_training was first imported in training, by a name"):
        trainable.state_dict()
    with pytest.raises(StateError, match=r"modules tests\.torch\.late_in_\* has changed .* Import it at the top"):
        set_up_again(trainable)


def set_up_again(trainable: Any) -> None:
    trainable.setup(hp_at(0))
    advance(trainable, 0, 1)


class Scheduling(Small):
    """It lowers the learning rate by what it has measured."""

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model, hp)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return optimizer

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.scheduler.step(0.5)
        return {"loss": 0.5}


def test_a_change_made_by_evaluate_is_undone_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    trainable: Any = advance(fresh(Scheduling()), 0, 1)
    for _ in range(2):
        trainable.evaluate()
    said = [record.getMessage() for record in caplog.records if "is undone" in record.getMessage()]
    assert len(said) == 1
    assert "evaluate() has changed self.scheduler." in said[0]


@functools.cache
def weights(count: int) -> torch.Tensor:
    return torch.linspace(1, 2, count)


class Weighing(Small):
    """A table that a cached function makes: in a process that has evaluated, it is there before training begins."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * weights(3)[batch[1]].mean()


def test_a_state_does_not_depend_on_whether_a_cached_function_was_called_before() -> None:
    states = []
    for warm in (False, True):
        weights.cache_clear()
        trainable: Any = fresh(Weighing())
        if warm:
            trainable.evaluate()
            trainable.setup(hp_at(0))
        states.append(reread(advance(trainable, 0, FORK).state_dict()))
        trainable.close()
    assert digest(states[0]) == digest(states[1])
    weights.cache_clear()
    cold: Any = fresh(Weighing())
    cold.load_state_dict(states[1])
    assert digest(cold.state_dict()) == digest(states[1])
