"""A Hugging Face Trainer on sentences of random words, for tests: setups, classes of the user's and a search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.errors import StopTraining
from hpstage.torch.transformers import TrainerTrainable
from hpstage.training.randomness import rekey
from hpstage.training.sample_order import SampleOrder
from hpstage.training.trainables import as_trainable

SAMPLES, STEPS, FORK = 26, 8, 4
OUTPUT = "never-written"


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Words whose smallest decides the label; some samples are longer than others."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        words = rng.integers(1, 40, rng.integers(3, 7)).tolist()
        found.append({"input_ids": words, "label": min(words) % 3, "comment": "is no input of the model"})
    return found


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest of the batch, so that it matters which samples are together."""
    assert "comment" not in samples[0]
    longest = max(len(sample["input_ids"]) for sample in samples)
    words = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    return {
        "input_ids": words,
        "attention_mask": (words != 0).long(),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def text(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = collate(samples)
    del batch["labels"]
    return {**batch, "labels": torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def bert(hp: Mapping[str, Any] | None = None) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=40,
        hidden_size=(hp or {}).get("width", 16),
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=(hp or {}).get("dropout", 0.1),
        attention_probs_dropout_prob=(hp or {}).get("dropout", 0.1),
    )
    return BertForSequenceClassification(config)


def new_bert() -> BertForSequenceClassification:
    return bert()


def without_dropout() -> BertForSequenceClassification:
    return bert({"dropout": 0.0})


def gpt() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2))


def arguments(**fields: Any) -> TrainingArguments:
    given = {"per_device_train_batch_size": 4, "max_steps": STEPS, "lr_scheduler_type": "constant", **fields}
    return TrainingArguments(output_dir=OUTPUT, use_cpu=True, report_to="none", **given)


def setup(**given: Any) -> TrainerTrainable:
    return TrainerTrainable(
        **{
            "model_init": None if "model" in given else new_bert,
            "args": arguments(),
            "train_dataset": sentences(SAMPLES, 0),
            "eval_dataset": sentences(9, 1),
            "data_collator": collate,
            "compute_metrics": accuracy,
            **given,
        }
    )


class Weighted(Trainer):
    """A loss of the user's, with a weight that TrainingArguments have; it counts how often it was computed."""

    def __init__(self, *args: Any, power: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.power, self.computed = power, 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        self.computed += 1
        loss = nn.functional.cross_entropy(outputs.logits, labels) ** self.power * getattr(self.args, "weight", 1.0)
        loss = loss + 1e-3 * self.computed * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The classifier learns faster."""
        classifier = list(self.model.classifier.parameters())
        others = [p for p in self.model.parameters() if all(p is not one for one in classifier)]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": others, "weight_decay": self.args.weight_decay},
                {"params": classifier, "lr": 4 * self.args.learning_rate, "weight_decay": 0.0},
            ],
            lr=self.args.learning_rate,
        )
        return self.optimizer


@dataclass
class WithWeight(TrainingArguments):
    weight: float = 1.0


class Shrinking(TrainerCallback):
    """Changes the model in some steps, and keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.seen.append(float(model.classifier.weight.detach().norm()))
        if state.global_step % 3 == 0:
            with torch.no_grad():
                model.classifier.weight.mul_(1 - 0.1 * min(self.seen))


class Stopping(TrainerCallback):
    def __init__(self, what: str) -> None:
        self.what = f"should_{what}_stop"

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        setattr(control, self.what, state.global_step == 3)


class Filtering(Trainer):
    """Prepares its own data by its arguments, as TRL's trainers do."""

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, train_dataset=[row for row in train_dataset if row["label"]], **kwargs)


@dataclass
class ChoosingPrecision(TrainingArguments):
    """Chooses bf16 where neither it nor fp16 is stated, as TRL's arguments do."""

    bf16: bool | None = None

    def __post_init__(self) -> None:
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        super().__post_init__()


class Backwards(torch.utils.data.Sampler[int]):
    """It gives every other sample first, from another one in each epoch: an order that goes by what was before."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.generator = count, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        first = int(torch.randint(self.count, (1,), generator=self.generator))
        yield from ((first - 2 * number) % self.count for number in range(self.count))


class OwnOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Backwards(len(self.train_dataset), self.args.seed)


CASES: dict[str, Callable[[], TrainerTrainable]] = {
    "plain": setup,
    "weight decay, clipping, fused": lambda: setup(
        args=arguments(weight_decay=0.1, max_grad_norm=0.1, optim="adamw_torch_fused", learning_rate=1e-3)
    ),
    "accumulation": lambda: setup(args=arguments(gradient_accumulation_steps=3, per_device_train_batch_size=2)),
    "a scheduler with warm-up": lambda: setup(args=arguments(lr_scheduler_type="cosine", warmup_steps=3)),
    "bfloat16": lambda: setup(args=arguments(bf16=True)),
    "label smoothing": lambda: setup(args=arguments(label_smoothing_factor=0.2)),
    "a model": lambda: setup(model=seeded(new_bert)),
    "language model": lambda: setup(
        model_init=gpt, data_collator=text, compute_metrics=None, args=arguments(gradient_accumulation_steps=2)
    ),
    "a subclass": lambda: setup(
        trainer_class=functools.partial(Weighted, power=1.5), args=WithWeight(**with_weight), callbacks=[Shrinking()]
    ),
    "activation checkpointing": lambda: setup(args=arguments(activation_checkpointing=True)),
    "a subclass that prepares its data": lambda: setup(
        trainer_class=Filtering,
        args=ChoosingPrecision(
            output_dir=OUTPUT, use_cpu=True, bf16=False, max_steps=STEPS, lr_scheduler_type="linear"
        ),
    ),
    "an order of its own": lambda: setup(
        trainer_class=OwnOrder, args=arguments(gradient_accumulation_steps=3, dataloader_drop_last=True)
    ),
    "adafactor": lambda: setup(args=arguments(optim="adafactor", learning_rate=1e-3)),
}
SAMPLER = "_get_train_sampler"
ELSEWHERE = ("accumulation", "a scheduler with warm-up", "a subclass")
"""Cases that are also continued in another process."""
with_weight: dict[str, Any] = {
    "output_dir": OUTPUT,
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.05,
    "weight": 0.5,
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


def fresh(trainable: TrainerTrainable, hp: Mapping[str, Any]) -> Any:
    adapter = as_trainable(trainable)
    adapter.setup(hp)
    return adapter


def trained(adapter: Any, hp_at: Callable[[int], Mapping[str, Any]], start: int, stop: int) -> Any:
    for step in range(start, stop):
        with suppress(StopTraining):  # the end that TrainingArguments state
            adapter.train(step, hp_at(step))
    return adapter


def outcome(adapter: Any) -> list[object]:
    metrics = dict(adapter.evaluate())
    return [digest(adapter.state_dict()), metrics]


def weights(adapter: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in adapter.subject.trainer.model.state_dict().items()}


def forks_at_every_step(make: Callable[[], TrainerTrainable], steps: int = STEPS) -> None:
    """Each continues in the process that trained straight through, and one of them in a new object."""
    hp = {"seed": 42}
    at = lambda step: hp  # noqa: E731
    adapter, states = fresh(make(), hp), []
    for step in range(steps):
        states.append(clone(adapter.state_dict()))
        trained(adapter, at, step, step + 1)
        adapter.evaluate()
    straight = outcome(adapter)
    for step in reversed(range(steps)):
        adapter.load_state_dict(states[step])
        assert outcome(trained(adapter, at, step, steps)) == straight, step
    adapter.close()
    adapter = fresh(make(), hp)
    adapter.load_state_dict(states[steps // 2])
    assert outcome(trained(adapter, at, steps // 2, steps)) == straight
    adapter.close()


class Rekeyed(TrainerCallback):
    """The randomness of each step, as hpstage keys it; and the learning rate, as a schedule would set it."""

    def __init__(self, seed: int, rates: Callable[[int], float] | None) -> None:
        self.seed, self.rates = seed, rates

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        rekey(self.seed, state.global_step)
        if self.rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.rates(state.global_step)


class Ordered:
    """A sampler that gives the order of hpstage."""

    def __init__(self, population: int, seed: int, *, endless: bool) -> None:
        self.order, self.seed, self.epoch = SampleOrder(population), seed, -1
        self.count = 10**6 if endless else population

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        self.epoch += 1
        for position in range(self.count):
            yield int(self.order.take(self.seed, self.epoch * self.count + position, 1)[0])


def alone(
    given: TrainerTrainable, seed: int, rates: Callable[[int], float] | None = None, *, by_epoch: bool = False
) -> dict[str, torch.Tensor]:
    """Train by ``Trainer.train()`` itself, in the order of hpstage unless the Trainer has one of its own."""
    make: Any = given.trainer_class
    kind, others = (make.func, make.keywords) if isinstance(make, functools.partial) else (make, {})

    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Ordered(len(self.train_dataset), seed, endless=not by_epoch)

    args = given.arguments.made({})
    args.save_strategy, args.logging_strategy = "no", "no"
    setup = {**given.given, "callbacks": [Rekeyed(seed, rates), *given.given.get("callbacks", ())]}
    source = {"model_init": given.model_init} if given.pretrained is None else {"model": given.pretrained}
    own = any(getattr(kind, name) is not getattr(Trainer, name) for name in ("get_train_dataloader", SAMPLER))
    trainer = (kind if own else InOrder)(args=args, train_dataset=given.train_dataset, **source, **setup, **others)
    trainer.train()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "learning_rate": s.multistep(
            trial.suggest_float("rate", 1e-3, 1e-2), [trial.suggest_categorical("drop", [3, 5])]
        ),
        "per_device_train_batch_size": 4,
        "seed": 1,
    }


def search(trainable: object, store: object, **options: Any) -> hpstage.Result:
    study = options.pop("study", None) or optuna.create_study(
        study_name="study", sampler=optuna.samplers.RandomSampler(seed=0)
    )
    given = {"n_trials": 3, "steps": STEPS, "executor": hpstage.InlineExecutor(), "metric": "eval_loss", **options}
    return hpstage.optimize(study, trainable, given.pop("space", space), store=store, **given)
