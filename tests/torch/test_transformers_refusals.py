"""What a Hugging Face Trainer cannot do in a search is refused by name, or said."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate.state import GradientState

from hpstage.errors import UsageError

pytest.importorskip("transformers")

from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hpstage.training.warned import warn_once
from tests.torch.hugging_face import (
    OUTPUT,
    Stopping,
    Weighted,
    alone,
    arguments,
    bert,
    fresh,
    setup,
    trained,
    weights,
)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"args": {"torch_compile": True}}, "torch_compile"),
        ({"args": {"resume_from_checkpoint": "folder"}}, "resume_from_checkpoint"),
        ({"args": {"neftune_noise_alpha": 5.0}}, "neftune_noise_alpha"),
        ({"args": {"auto_find_batch_size": True}}, "auto_find_batch_size"),
        ({"args": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}}, "depends on metrics"),
        ({"args": {"optim": "galore_adamw_layerwise"}}, "backward pass"),
        ({"args": None}, "TrainingArguments"),
        ({"model_init": None}, "a model or a model_init"),
        ({"eval_dataset": None}, "eval_dataset"),
        ({"model_init": lambda hp, more: None}, "more than one argument"),
        (
            {"data_collator": DataCollatorForLanguageModeling(None, mlm=False, seed=3)},
            r"DataCollatorForLanguageModeling\(seed=3\) seeds a generator in each process",
        ),
        ({"callbacks": [EarlyStoppingCallback()]}, "EarlyStoppingCallback is not supported"),
        ({"callbacks": [type("Mine", (TrainerCallback,), {"on_save": print})()]}, r"Mine\.on_save\(\)"),
        (
            {"trainer_class": functools.partial(type("Mine", (Trainer,), {"train": print}), power=1)},
            r"Mine\.train\(\) is not called",
        ),
    ],
)
def test_trainer_arguments_without_meaning_in_a_search_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    if isinstance(given.get("args"), dict):
        given = {**given, "args": TrainingArguments(output_dir=OUTPUT, use_cpu=True, **given["args"])}
    with pytest.raises(UsageError, match=message):
        setup(**given)


class Impatient(Trainer):
    """It adds a callback itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(EarlyStoppingCallback())


class Evaluating(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_evaluate = True


def test_an_unsupported_callback_that_a_trainer_adds_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="EarlyStoppingCallback is not supported"):
        trained(fresh(setup(trainer_class=Impatient), {}), lambda step: {}, 0, 1)


def test_a_callback_that_requests_an_evaluation_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    trained(fresh(setup(callbacks=[Evaluating()]), {}), lambda step: {}, 0, 2)
    (record,) = [record for record in caplog.records if record.name == "hpstage"]
    assert "control.should_evaluate, set in on_step_end, is not used" in record.getMessage()


@pytest.mark.ci
def test_a_callback_may_end_training_between_accumulated_batches() -> None:
    """The weights are then left as they are, as under Trainer."""

    class Between(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop = state.global_step == 2

    given = {"callbacks": [Between()], "args": arguments(gradient_accumulation_steps=2)}
    here = weights(trained(fresh(setup(**given), {"seed": 42}), lambda step: {"seed": 42}, 0, 3))
    assert all(torch.equal(here[name], value) for name, value in alone(setup(**given), 42).items())
    GradientState._reset_state()  # Trainer has left it between accumulated batches, for all of the process


def test_a_get_train_dataloader_that_returns_no_dataloader_is_refused_by_name() -> None:
    kind = type("Mine", (Trainer,), {"get_train_dataloader": lambda self: iter([])})
    with pytest.raises(
        UsageError, match=r"Mine\.get_train_dataloader\(\) returned a list_iterator.*must return a DataLoader"
    ):
        trained(fresh(setup(trainer_class=kind), {}), lambda step: {}, 0, 1)


@pytest.mark.parametrize(
    ("hp", "message"),
    [
        ({"lr": 0.1}, r"nothing reads the hyperparameter 'lr'.*did you mean 'learning_rate'"),
        ({"batch_size": 4}, "per_device_train_batch_size"),
        ({"max_steps": 4}, "steps= of optimize"),
        ({"logging_steps": 4}, "has no effect"),
        ({"per_device_train_batch_size": 2.5}, "whole number"),
        ({"optim": "sgd", "adam_beta1": 0.8}, "SGD has no such field"),
    ],
)
def test_an_unknown_or_ineffective_hyperparameter_is_refused_by_name(hp: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trained(fresh(setup(), hp), lambda step: hp, 0, 1)


def passes_on(hp: dict[str, Any]) -> Any:
    return bert({**hp, "width": 8})


@pytest.mark.parametrize(
    ("model_init", "name", "meant"),
    [(bert, "lr", "learning_rate"), (bert, "weight_decy", "weight_decay"), (passes_on, "lr", None), (bert, "z", None)],
)
def test_a_misspelt_hyperparameter_is_refused_even_if_model_init_takes_hyperparameters(
    model_init: Any, name: str, meant: Any
) -> None:
    hp = {name: 0.1, "width": 8}
    refused = pytest.raises(UsageError, match=f"'{name}'.*did you mean '{meant}'.*model_init does not mention it")
    with refused if meant else nullcontext():
        trained(fresh(setup(model_init=model_init), hp), lambda step: hp, 0, 1)


@pytest.mark.parametrize(
    ("make", "hp_at", "message"),
    [
        (setup, lambda step: {"warmup_steps": step}, "read only when a trial begins"),
        (
            lambda: setup(args=arguments(train_sampling_strategy="sequential")),
            lambda step: {"per_device_train_batch_size": 2 + step},
            "'per_device_train_batch_size' changes from 2 to 3, but is read only when a trial begins",
        ),
        (lambda: setup(model_init=bert), lambda step: {"width": 8 * (1 + step)}, "read only when a trial begins"),
        (lambda: setup(callbacks=[Stopping("epoch")]), lambda step: {}, "should_epoch_stop in on_step_end"),
        (
            lambda: setup(trainer_class=Weighted),
            lambda step: {"learning_rate": 0.01 * step},
            "learning_rate is 0 at first",
        ),
        (
            lambda: setup(args=arguments(lr_scheduler_type="linear")),
            lambda step: {"learning_rate": 0.01 / (1 + step)},
            "lr_scheduler_type='linear' of TrainingArguments. To follow the space, set lr_scheduler_type='constant'",
        ),
    ],
)
def test_changes_that_a_trainer_cannot_follow_in_training_are_refused(
    make: Callable[[], Any], hp_at: Callable[[int], dict[str, Any]], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trained(fresh(make(), hp_at(0)), hp_at, 0, 4)


@pytest.mark.parametrize(
    ("fields", "callbacks", "named"),
    [
        ({"report_to": "tensorboard"}, [], "report_to=['tensorboard']) is not used in a search: result.write_report"),
        ({"push_to_hub": True}, [], "push_to_hub=True) is not used in a search: result.best_model().push_to_hub"),
        ({"load_best_model_at_end": True, "save_strategy": "best"}, [], "result.load(trial, 'best')"),
        ({}, [PrinterCallback, ProgressCallback()], "PrinterCallback is not used in a search"),
    ],
)
def test_trainer_arguments_that_only_report_or_save_are_left_out_with_a_warning(
    fields: dict[str, Any], callbacks: list[Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    args = TrainingArguments(output_dir=OUTPUT, use_cpu=True, **fields)
    with caplog.at_level(logging.WARNING, "hpstage"):
        trainables = [setup(args=args, callbacks=callbacks) for _ in range(2)]
    messages = [record.getMessage() for record in caplog.records]
    assert named in messages[0] and messages.count(messages[0]) == 1
    plain = setup(args=TrainingArguments(output_dir=OUTPUT, use_cpu=True))
    assert trainables[0].arguments.fields == plain.arguments.fields
    assert trainables[0].given.keys() == plain.given.keys()
