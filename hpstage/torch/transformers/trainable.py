"""TrainerTrainable: a Hugging Face Trainer, trained step by step by hpstage."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer, TrainingArguments, set_seed
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import align_special_tokens

from hpstage.errors import StopTraining, TrainingError, UsageError
from hpstage.errors.text import AT_FIRST, changed_after
from hpstage.schedule import Scalar
from hpstage.schedule.space import MIXTURE
from hpstage.torch.horizon import Horizon
from hpstage.torch.loading.mixture import Mixture
from hpstage.torch.loading.streams import is_stream
from hpstage.torch.trainable import TorchTrainable
from hpstage.torch.transformers.arguments import Arguments, detach
from hpstage.torch.transformers.checkpointing import only_switched
from hpstage.torch.transformers.groups import built, group_values
from hpstage.torch.transformers.horizon import end_of, has_own_scheduler, horizon_of, see_end
from hpstage.torch.transformers.own_order import (
    FIXED,
    USUAL,
    Made,
    OwnBatches,
    has_own_order,
    orders_itself,
    own_loader,
)
from hpstage.torch.transformers.refusals import drop_callbacks, see_collator, see_trainer, used_callbacks
from hpstage.training.code.unread import may_read
from hpstage.training.step_log import log
from hpstage.training.warned import warn_once


class TrainerTrainable(TorchTrainable):
    """The setup of a Hugging Face ``Trainer``, trained step by step; a step is one update of the weights.

    Hyperparameters are named like fields of TrainingArguments. ``learning_rate``, ``weight_decay``, ``adam_beta1``,
    ``adam_beta2``, ``adam_epsilon``, ``per_device_train_batch_size``, ``gradient_accumulation_steps``,
    ``max_grad_norm``, ``label_smoothing_factor``, ``seed``, and fields that your own subclass adds, may change at any
    step; other fields are read when a trial begins. Other names are passed to ``model_init``.

    As in Trainer, the scheduler of ``args`` (linear by default) sets the learning rate, starting from
    ``learning_rate``, and trials end where ``args`` end training. With ``lr_scheduler_type="constant"``,
    ``learning_rate`` may follow a schedule of the space, and the steps of trials replace ``args.max_steps`` and
    ``args.num_train_epochs``.

    Trainer's own methods, or those of a subclass, do the work: ``compute_loss``, ``training_step``,
    ``create_optimizer``, ``create_scheduler``, ``get_batch_samples``, ``evaluate``, ``evaluation_loop``,
    ``prediction_step``. Metrics have Trainer's names (``eval_loss``, ``eval_accuracy``); metrics of speed are left out.

    Args:
        model: the model; each trial starts from its present weights. Its frozen parameters are shared among trials and
            are not part of states, so that a model with PEFT's adapters has small states.
        args: only the fields that decide training are used; the search decides when to log, save and evaluate.
        model_init: returns a new model, instead of ``model``. It takes no argument, or one: the values of the
            hyperparameters at step 0, by name.
        callbacks: they may act at steps (``on_step_begin``, ``on_step_end``, ...) and end the trial with
            ``control.should_training_stop``, but not log, evaluate or save.
        trainer_class: ``Trainer``, a subclass, or a ``functools.partial`` of one with its other arguments.

    The other arguments are those of Trainer. ``self.args`` of the Trainer has the present values. ``args.seed`` decides
    the first weights. The hyperparameter ``seed`` (default 0), which sets ``args.seed``, too, decides the order of
    samples and all randomness. ``dataloader_num_workers`` processes make samples, which the training process collates.

    Raises:
        UsageError: an argument, or a feature that it uses, is not supported in a search, or not exactly. The message
            names it.
    """

    stateless = (
        "self.given['processing_class'].deprecation_warnings",  # a record of warnings issued
        "self.given['data_collator'].tokenizer.deprecation_warnings",
    )
    _evaluates_by_library = True

    trainer: Any = None
    """The Trainer of the present trial: ``result.load(3).trainable.trainer.predict(...)``."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., torch.nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        trainer_class: Callable[..., Trainer] = Trainer,
    ) -> None:
        if (model is None) == (model_init is None):
            raise UsageError("give TrainerTrainable a model or a model_init, and not both")
        if args is None:
            raise UsageError("give TrainerTrainable args=TrainingArguments(...)")
        if train_dataset is None or eval_dataset is None:
            raise UsageError("give TrainerTrainable a train_dataset and an eval_dataset, from which metrics come")
        if model_init is not None and len(inspect.signature(model_init).parameters) > 1:
            raise UsageError("model_init takes more than one argument; it must take none, or the hyperparameters")
        see_trainer(trainer_class)
        see_collator(data_collator)
        self.arguments = Arguments(args)
        self.pretrained = model
        self.model_init = model_init
        self.train_dataset = train_dataset
        self.trainer_class = trainer_class
        others = {
            "data_collator": data_collator,
            "eval_dataset": eval_dataset,
            "processing_class": processing_class,
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "callbacks": used_callbacks(callbacks or ()) or None,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
        }
        # Without those that are None, since a subclass of Trainer may lack them.
        self.given = {name: value for name, value in others.items() if value is not None}
        if args.use_cpu:
            self.device = "cpu"
        if args.dataloader_num_workers:
            self.num_workers, self.pin_memory = args.dataloader_num_workers, args.dataloader_pin_memory
            self.prefetch_factor = args.dataloader_prefetch_factor or 2

    @property
    def _read_by_library(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.arguments.kind)]

    @property
    def batch_size(self) -> int:
        """Number of samples in a step: those of all accumulated batches."""
        return self._whole("per_device_train_batch_size") * self._whole("gradient_accumulation_steps")

    def dataset(self) -> Any:
        # A stream reports its own position: train on a copy, so that the user's stream stays where it is.
        return copy.deepcopy(self.train_dataset) if is_stream(self.train_dataset) else self.train_dataset

    def _prepared_data(self) -> Any:
        # A subclass of Trainer may tokenize, filter or pack its data when it is made, depending on its arguments.
        trainer = self.trainer
        mixed, own_order = isinstance(self.train_dataset, Mixture), has_own_order(trainer)
        if mixed and (own_order or not isinstance(trainer.train_dataset, Mixture)):
            raise self._no_mixture(type(trainer).__name__, own_order=own_order)
        if own_order:
            return OwnBatches(lambda: own_loader(trainer), trainer.args.gradient_accumulation_steps)
        if trainer.train_dataset is self.train_dataset:
            return None
        return copy.deepcopy(trainer.train_dataset) if is_stream(trainer.train_dataset) else trainer.train_dataset

    def model(self, hp: Mapping[str, Scalar]) -> torch.nn.Module:
        self._see_names(hp)
        self.initial = dict(hp)
        args = self.arguments.made(hp)
        set_seed(args.seed)
        new, make = self._new_model(hp)
        try:
            trainer = make(model=new, args=args, train_dataset=self.train_dataset, **self.given)
        except AttributeError as error:
            if isinstance(error.obj, Mixture):  # the Trainer calls map() or filter() of a data set of `datasets`
                raise self._no_mixture(getattr(make, "func", make).__name__, own_order=False) from error
            raise
        drop_callbacks(trainer)
        model: torch.nn.Module = trainer.model
        if args.activation_checkpointing:
            options = dict(args.activation_checkpointing_kwargs or {})
            choice = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
            enable: Any = model.activation_checkpointing_enable
            enable(activation_checkpointing_kwargs=options or None, **choice)
        if isinstance(trainer.processing_class, PreTrainedTokenizerBase | ProcessorMixin) and hasattr(model, "config"):
            align_special_tokens(model, trainer.processing_class)
        self.trainer = trainer
        self.collator = trainer._get_collator_with_removed_columns(trainer.data_collator)
        self.smoother = LabelSmoother()
        trainer.samples_seen = 0
        return model

    def optimizer(self, model: torch.nn.Module, hp: Mapping[str, Scalar]) -> torch.optim.Optimizer:
        trainer = self.trainer
        optimizer = built(trainer, self._followed(hp))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in model.parameters()):
            raise UsageError(
                f"the optimizer of {type(trainer).__name__} has no parameter of the model: an argument of trainer_class"
                f" holds another model, such as a loss built from a model. Pass a function that builds it from a model"
            )
        trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(model, optimizer)
        self.batches_of_epoch = self._count_batches()
        see_end(trainer, self.batches_of_epoch)
        if "learning_rate" in self._followed(hp):
            trainer.lr_scheduler = None
        else:
            trainer.create_scheduler(num_training_steps=trainer.state.max_steps)
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = model, trainer.optimizer, trainer.lr_scheduler
        trainer.is_in_train = True
        self._call("on_train_begin")
        detach()
        return optimizer

    def group_values(self, group: dict[str, Any], hp: Mapping[str, Scalar]) -> Mapping[str, Any]:
        return group_values(group, self._followed(hp))

    def _followed(self, hp: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        """Return the hyperparameters that groups follow: all, without the learning rate if a scheduler sets it."""
        return {name: value for name, value in hp.items() if name != "learning_rate" or not self._scheduler}

    @property
    def _scheduler(self) -> str:
        """The Trainer's scheduler that sets the learning rate, as errors name it; empty if there is none."""
        kind = self._kind
        return f"{kind.__name__}.create_scheduler()" if has_own_scheduler(kind) else self.arguments.scheduler

    @property
    def _kind(self) -> Any:
        """The class of the Trainer; if a function makes Trainers, the class of the present Trainer."""
        given = self.trainer_class
        kind: Any = given.func if isinstance(given, partial) else given
        return kind if isinstance(kind, type) else type(self.trainer)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise NotImplementedError("Trainer.training_step() computes the loss of each accumulated batch")

    def collate(self, samples: list[Any]) -> _Samples:
        return _Samples(samples)

    def update(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any
    ) -> torch.Tensor | float | None:
        """Update the weights once, as Trainer's loop does."""
        trainer = self.trainer
        self._follow()
        if not isinstance(batch, Made):
            batch = self._collated(batch.samples)
        with only_switched(model) if trainer.args.activation_checkpointing else nullcontext():
            return self._trained_on(model, batch)

    def _trained_on(self, model: torch.nn.Module, batch: Made) -> torch.Tensor:
        trainer, made = self.trainer, batch.batches
        batches, count = trainer.get_batch_samples(iter(made), len(made), trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(batches)
        self._call("on_step_begin")
        losses = []
        for number, inputs in enumerate(batches, 1):
            trainer.accelerator.sync_gradients = number == len(batches)
            losses.append(trainer.training_step(model, inputs, count))
            if number < len(batches):
                self._call("on_substep_end")
                if trainer.control.should_training_stop:  # as in Trainer, weights are not updated
                    raise StopTraining(_STOPPED)
        values = {"loss": float(sum(losses)), "learning_rate": trainer.optimizer.param_groups[0]["lr"]}
        if trainer.args.max_grad_norm > 0:
            norm = trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
            values["grad_norm"] = float(norm)
        self._call("on_pre_optimizer_step")
        trainer.optimizer.step()
        self._call("on_optimizer_step")
        if trainer.lr_scheduler is not None and not trainer.accelerator.optimizer_step_was_skipped:
            trainer.lr_scheduler.step()
        model.zero_grad()
        trainer.state.global_step += 1
        trainer.state.epoch = batch.epoch
        self._call("on_step_end")
        _log_step(trainer, values)
        if trainer.control.should_training_stop:
            raise StopTraining(_STOPPED)
        if (ended := end_of(trainer)) is not None:
            raise StopTraining(ended)
        return torch.stack(losses)

    def _collated(self, samples: list[Any]) -> Made:
        size, trainer = self.trainer.args.per_device_train_batch_size, self.trainer
        trainer.samples_seen += len(samples)
        made = [self.collator(samples[start : start + size]) for start in range(0, len(samples), size)]
        if is_stream(trainer.train_dataset):
            return Made(made, (trainer.state.global_step + 1) / trainer.state.max_steps)
        return Made(made, trainer.samples_seen / len(trainer.train_dataset))

    def evaluate(self, model: torch.nn.Module) -> Mapping[str, float]:
        """Return Trainer's metrics, without metrics of speed, which are never the same twice."""
        with only_switched(model) if self.trainer.args.activation_checkpointing else nullcontext():
            metrics = self.trainer.evaluate()
        return {name: value for name, value in metrics.items() if not name.endswith(_OF_SPEED) and name != "epoch"}

    @property
    def _horizon(self) -> Horizon | None:
        return horizon_of(self.trainer, self.batches_of_epoch, by_epoch=self.step_unit == "epoch")

    def _count_batches(self) -> int:
        """Return the number of batches in an epoch, as Trainer counts them."""
        trainer = self.trainer
        if has_own_order(trainer):
            return len(own_loader(trainer))
        if is_stream(trainer.train_dataset):
            return int(trainer.args.max_steps) * int(trainer.args.gradient_accumulation_steps)
        batches: int = math.ceil(len(trainer.train_dataset) / trainer.args.train_batch_size)
        return batches

    def _new_model(self, hp: Mapping[str, Scalar]) -> tuple[torch.nn.Module, Callable[..., Trainer]]:
        """Return a new model, and the class or function that makes a Trainer from it."""
        if self.model_init is not None:
            model = self.model_init(dict(hp)) if _takes_values(self.model_init) else self.model_init()
            return model, self.trainer_class
        assert self.pretrained is not None
        # Trials share frozen parameters: no training changes them, so they are not part of states.
        given = self.pretrained
        copied: dict[int, Any] = {id(part): part for part in given.parameters() if not part.requires_grad}
        model = copy.deepcopy(given, copied)
        if not isinstance(self.trainer_class, partial):
            return model, self.trainer_class
        # A loss that was built from the model must refer to the copy.
        others = {
            name: copy.deepcopy(value, copied) if _holds(value, given) else value
            for name, value in self.trainer_class.keywords.items()
        }
        return model, partial(self.trainer_class, **others)

    def _see_names(self, hp: Mapping[str, Scalar]) -> None:
        """Refuse hyperparameters that nothing reads."""
        fields = self.arguments.named(hp)
        given = self.model_init is not None and _takes_values(self.model_init)
        for name in hp:
            meant = self.arguments.suggestion(name)
            if name in fields or self._weighs(name) or (given and (not meant or may_read(self.model_init, name))):
                continue  # model_init may read a name in ways that cannot be found, unless it is similar to a field
            without = "model_init does not mention it" if given else "there is no model_init that takes an argument"
            raise UsageError(
                f"nothing reads the hyperparameter {name!r}: it is not a field of {self.arguments.kind.__name__}{meant}"
                f", and {without}. For one that your Trainer reads, add a field to a subclass of TrainingArguments"
            )

    @staticmethod
    def _no_mixture(name: str, *, own_order: bool) -> UsageError:
        return UsageError(
            f"train_dataset is a Mixture, whose weights decide the order of samples, but {name} {_DECIDES[own_order]}"
        )

    def _weighs(self, name: str) -> bool:
        """Return whether a hyperparameter is the weight of a source of the data."""
        return name.startswith(MIXTURE) and isinstance(self.train_dataset, Mixture)

    def _unchangeable(self, name: str, hp: Mapping[str, Scalar]) -> str:
        if name == "learning_rate" and (scheduler := self._scheduler):
            return (
                f"{scheduler} sets it from its value at step 0, unless the trial is trained with "
                f"lr_scheduler_type='constant', no create_scheduler(), and a schedule of learning_rate"
            )
        ordering = {field: hp.get(field, self.arguments.value(field)) for field in USUAL}
        if name in FIXED and orders_itself(self._kind, ordering):
            return (
                f"{self._kind.__name__} decides the order of samples itself, with a loader that it makes when a trial "
                f"begins, unless train_sampling_strategy, dataloader_drop_last and its loader have their defaults"
            )
        if self._weighs(name) or self.arguments.is_live(name):
            return ""
        return AT_FIRST

    def _follow(self) -> None:
        """Set the fields of ``trainer.args`` that hyperparameters name to the present values."""
        trainer = self.trainer
        if (ended := end_of(trainer)) is not None:
            raise TrainingError(f"{ended}; no further update can be trained")
        for name, value in self.hp.items():
            if self._weighs(name):
                continue
            if name == "learning_rate" and self._scheduler:
                if value != self.initial[name]:
                    raise UsageError(
                        f"two schedules change learning_rate: that of the space (from {self.initial[name]!r} to "
                        f"{value!r}) and {self._scheduler}. To follow the space, set lr_scheduler_type='constant' and "
                        f"define no create_scheduler(); otherwise give learning_rate a constant value"
                    )
            elif not self.arguments.is_live(name) or (name in FIXED and has_own_order(trainer)):
                if value != self.initial[name]:
                    raise UsageError(changed_after(name, self.initial[name], value))
            elif value != getattr(trainer.args, name):
                setattr(trainer.args, name, self.arguments.cast(name, value))
        if "label_smoothing_factor" in self.hp:
            self.smoother.epsilon = trainer.args.label_smoothing_factor
            trainer.label_smoother = self.smoother if self.smoother.epsilon else None

    def _call(self, event: str) -> None:
        """Call the callbacks for an event."""
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)
        for name in ("should_evaluate", "should_save", "should_log"):
            if getattr(trainer.control, name):
                warn_once(
                    f"control.{name}, set in {event}, is not used: the search decides when to evaluate, save and log"
                )
                setattr(trainer.control, name, False)
        if trainer.control.should_epoch_stop:
            raise UsageError(
                f"a callback has set control.should_epoch_stop in {event}, but a search cannot stop an epoch. Set "
                f"should_training_stop to end the trial"
            )

    def _whole(self, name: str) -> int:
        value = self.hp.get(name, self.arguments.value(name))
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1")
        return value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)  # hashable, since kinds of batches are remembered
class _Samples:
    """The samples of a step. The training process collates them, since it knows the size of accumulated batches."""

    samples: list[Any]


_DECIDES = {
    False: "makes other data from it. Prepare the sources first, and give it a Mixture of the prepared sources",
    True: "decides the order itself. Leave train_sampling_strategy, dataloader_drop_last and its loader at their "
    "defaults",
}
"""Why a Trainer refuses a mixture, and the remedy; the key is whether the Trainer decides the order itself."""
_STOPPED = "a callback has set control.should_training_stop"
_OF_SPEED = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")


def _holds(value: Any, model: torch.nn.Module) -> bool:
    """Return whether a value is a module that contains the model, or a dict with such a module."""
    parts = value.values() if isinstance(value, dict) else (value,)
    return any(part is model for one in parts if isinstance(one, torch.nn.Module) for part in one.modules())


def _takes_values(model_init: Callable[..., Any]) -> bool:
    return bool(inspect.signature(model_init).parameters)


def _log_step(trainer: Any, values: Mapping[str, float]) -> None:
    """Log a step with ``trainer.log()``, as with ``logging_steps=1``: a subclass may add values that it has collected.

    Values that the Trainer itself has logged in the step, for instance in ``compute_loss``, are logged as well.
    Callbacks, which display or collect logs, are not called.
    """
    handler = trainer.callback_handler
    callbacks, handler.callbacks = handler.callbacks, []
    try:
        trainer.log(dict(values))
    finally:
        handler.callbacks = callbacks
    history = trainer.state.log_history
    for entry in history:
        for name, value in entry.items():
            if name not in ("epoch", "step") and isinstance(value, int | float):
                log(name, value)
    history.clear()
