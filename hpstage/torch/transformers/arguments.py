"""TrainingArguments: the fields that decide training, those that hpstage replaces, and those that are refused."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import tempfile
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainingArguments

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.torch.transformers.horizon import LENGTH
from hpstage.training.warned import warn_once

logger = logging.getLogger("hpstage")

LIVE = frozenset(
    (
        *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "seed"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "label_smoothing_factor"),
    )
)
"""Fields that may change at any step. Fields that a user's subclass adds may change, too; others are read at step 0."""

_REFUSED = {
    "accelerator_config": "a trial trains on one device",
    "auto_find_batch_size": "state per_device_train_batch_size",
    "data_seed": "the hyperparameter `seed` decides the order of samples",
    "deepspeed": "a trial trains on one device",
    "fsdp": "a trial trains on one device",
    "full_determinism": "training is deterministic without it",
    "neftune_noise_alpha": "add the noise in the model",
    "parallelism_config": "a trial trains on one device",
    "resume_from_checkpoint": "a search continues from its own states",
    "torch_compile": "the model is trained as it is",
}
_UNUSED = {
    "load_best_model_at_end": "result.load(trial, 'best') gives the best state of a trial",
    "log_completions": "a reward function can print them, for hpstage logs to show",
    "push_to_hub": "result.best_model().push_to_hub(...) does it after the search",
    "report_to": "result.write_report(...) and optuna-dashboard show what the search has measured",
}
"""Fields without effect on training, but on which a user may rely: a warning names their replacement."""
_REFUSED_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")
_REFUSED_OPTIMIZERS = ("layerwise", "lomo")

_IGNORED = frozenset(
    (
        *("output_dir", "run_name", "project", "do_train", "do_eval", "do_predict", "disable_tqdm", "debug"),
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "metric_for_best_model", "greater_is_better"),
        *("enable_jit_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint", "local_rank"),
        *("include_num_input_tokens_seen", "skip_memory_metrics", "logging_strategy", "logging_steps"),
        *("logging_first_step", "log_level", "log_level_replica", "log_on_each_node"),
        # transformers itself sets them if the field that replaces them is set.
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    )
)
"""Fields about logging, saving, loading and the time of evaluations, which the search decides. They decide no bits."""
_OF_LIBRARY = {field.name for field in dataclasses.fields(TrainingArguments)}
_IGNORED_PREFIXES = ("save_", "hub_", "trackio_", "ddp_", "dataloader_")


class Arguments:
    """The fields of the user's TrainingArguments that decide training, as plain values, which can be part of a key.

    Args:
        given: the user's TrainingArguments.

    Attributes:
        kind: the class of the arguments.
        fields: names and values of the fields.
        scheduler: the argument that changes the learning rate, as errors name it; empty if none does.

    Raises:
        UsageError: a field is set that a search does not support, or not exactly. The message names it.
    """

    def __init__(self, given: TrainingArguments) -> None:
        self.kind = type(given)
        _see(given)
        self.fields = self._stated(given)
        scheduler = str(_plain(given.lr_scheduler_type))
        self.scheduler = "" if scheduler == "constant" else f"lr_scheduler_type={scheduler!r} of TrainingArguments"
        for name in self.fields.keys() & _REFUSED.keys():
            raise UsageError(
                f"TrainingArguments({name}={self.fields[name]!r}) is not supported in a search: {_REFUSED[name]}"
            )
        for name, instead in _UNUSED.items():
            if value := getattr(given, name, None):
                warn_once(f"TrainingArguments({name}={value!r}) is not used in a search: {instead}")

    def _stated(self, given: TrainingArguments) -> dict[str, Any]:
        """Return a minimal set of fields from which equal arguments can be made.

        ``__post_init__`` may derive a field from other fields, or from the machine: TRL's arguments choose bf16 if
        neither bf16 nor fp16 is given. So it does not follow from a field's default whether the user has given it.
        """
        values = {
            field.name: _plain(getattr(given, field.name))
            for field in dataclasses.fields(given)
            if field.init and (field.name in _REFUSED or not is_ignored(field.name))
        }
        fields = {name: value for name, value in values.items() if not _same(value, self._default(name))}
        names = [*fields]
        while names:
            name = names.pop()
            fewer = {other: value for other, value in fields.items() if other != name}
            try:
                made = self._made(fewer)
            except Exception:  # without this field, the machine does not support another one, or two others conflict
                continue
            if all(_same(_plain(getattr(made, other)), value) for other, value in values.items()):
                fields, names = fewer, [*fewer]
        return fields

    def _default(self, name: str) -> Any:
        (field,) = (field for field in dataclasses.fields(self.kind) if field.name == name)
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    def made(self, hp: Mapping[str, Scalar]) -> TrainingArguments:
        """Return new arguments with the fields that hyperparameters name set to their values."""
        made = self._made({**self.fields, **{name: self.cast(name, hp[name]) for name in self.named(hp)}})
        if made.world_size > 1:
            raise UsageError(
                "this process is one of several in a torch.distributed group, but a trial trains on one device; run "
                "the search in a single process"
            )
        made._n_gpu = min(made._n_gpu, 1)  # with several GPUs, Trainer would wrap the model in DataParallel
        _see(made)
        return made

    def _made(self, fields: Mapping[str, Any]) -> TrainingArguments:
        # Trainer creates its output folder, so give it an existing one. Nothing is written into it.
        silent = {"output_dir": tempfile.gettempdir(), "report_to": "none", "disable_tqdm": True}
        pin_memory = torch.cuda.is_available()  # for evaluation; torch warns if it has no effect
        return self.kind(**{**fields, **silent, "dataloader_pin_memory": pin_memory})

    def named(self, hp: Iterable[str]) -> list[str]:
        """Return the hyperparameters that name fields. Raise :class:`UsageError` if a field cannot be one."""
        fields = {field.name for field in dataclasses.fields(self.kind) if field.init}
        for name in hp:
            if name == "batch_size":
                raise UsageError(
                    "the hyperparameter 'batch_size' is called per_device_train_batch_size in TrainingArguments; "
                    "give it that name"
                )
            if name in fields and (name in _REFUSED or name in LENGTH or is_ignored(name)):
                raise UsageError(
                    f"the hyperparameter {name!r} is a field of TrainingArguments that has no effect in a search"
                    + (": steps= of optimize() is the length of trials" if name in LENGTH else "")
                )
        return [name for name in hp if name in fields]

    def value(self, name: str) -> Any:
        """Return the value of a field for trials in which no hyperparameter has its name."""
        if name in self.fields:
            return self.fields[name]
        return self._default(name)

    def cast(self, name: str, value: Scalar) -> Scalar:
        """Return the value of a hyperparameter in the type of its field, since schedules give ``1`` for ``1.0``.

        Raises:
            UsageError: the field needs a whole number, but the value is another one.
        """
        kind = next(field.type for field in dataclasses.fields(self.kind) if field.name == name)
        if kind in (float, "float") and type(value) is int:
            return float(value)
        if kind in (int, "int") and type(value) is not int:
            raise UsageError(f"the hyperparameter {name!r} is {value!r}; TrainingArguments needs a whole number")
        return value

    def is_live(self, name: str) -> bool:
        return name in LIVE or name in {field.name for field in dataclasses.fields(self.kind)} - _OF_LIBRARY

    def suggestion(self, name: str) -> str:
        """Return a question that suggests a field with a name similar to ``name``; empty if there is none."""
        names = [field.name for field in dataclasses.fields(self.kind) if not is_ignored(field.name)]
        close = ["learning_rate"] if name == "lr" else difflib.get_close_matches(name, names, 1)
        return f" (did you mean {close[0]!r}?)" if close else ""


def detach() -> None:
    """Give future Trainers their own shared state. All Trainers of a process share it, and new TrainingArguments clear
    it; existing Trainers keep the present one."""
    for kind in (AcceleratorState, PartialState):
        kind._shared_state = dict(kind._shared_state)


def is_ignored(name: str) -> bool:
    if name == "dataloader_drop_last":  # it decides which samples are trained on
        return False
    return name in _IGNORED or name in _UNUSED or (name in _OF_LIBRARY and name.startswith(_IGNORED_PREFIXES))


def _see(args: TrainingArguments) -> None:
    scheduler, optimizer = str(_plain(args.lr_scheduler_type)), str(_plain(args.optim))
    if scheduler in _REFUSED_SCHEDULERS:
        raise UsageError(
            f"lr_scheduler_type={scheduler!r} depends on metrics, which are measured only if the search requests them. "
            f"Give learning_rate a schedule"
        )
    if any(name in optimizer for name in _REFUSED_OPTIMIZERS):
        raise UsageError(
            f"optim={optimizer!r} updates weights during the backward pass, which a search does not support. Choose "
            f"another optimizer"
        )


def _same(value: Any, other: Any) -> bool:
    return bool(type(value) is type(other) and value == other)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return value.to_dict() if hasattr(value, "to_dict") else value
