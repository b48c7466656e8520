"""A Hugging Face Trainer under hpstage trains as it does alone, bit for bit, and forks at any step."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import Client
from torch import nn

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.cluster import local_cluster
from hpstage.errors import UsageError
from hpstage.plan.facts import StateKey
from hpstage.testing import TrainableContract
from hpstage.training.identity.workload import code_identity
from hpstage.training.randomness import rekey
from hpstage.training.sample_order import SampleOrder
from hpstage.training.trainables import as_trainable

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hpstage.torch.transformers import TrainerTrainable  # noqa: E402

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
        """The head learns faster."""
        head = list(self.model.classifier.parameters())
        others = [p for p in self.model.parameters() if all(p is not one for one in head)]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": others, "weight_decay": self.args.weight_decay},
                {"params": head, "lr": 4 * self.args.learning_rate, "weight_decay": 0.0},
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
    "adafactor": lambda: setup(args=arguments(optim="adafactor", learning_rate=1e-3)),
}
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
        adapter.train(step, hp_at(step))
    return adapter


def outcome(adapter: Any) -> list[object]:
    metrics = dict(adapter.evaluate())
    return [digest(adapter.state_dict()), metrics]


def weights(adapter: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in adapter.subject.trainer.model.state_dict().items()}


# --- the same as Trainer alone


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
    """Train by ``Trainer.train()`` itself."""
    make: Any = given.trainer_class
    kind, others = (make.func, make.keywords) if isinstance(make, functools.partial) else (make, {})

    class Alone(kind):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Ordered(len(given.train_dataset), seed, endless=not by_epoch)

    args = given.arguments.made({})
    args.save_strategy, args.logging_strategy = "no", "no"
    setup = {**given.given, "callbacks": [Rekeyed(seed, rates), *given.given.get("callbacks", ())]}
    source = {"model_init": given.model_init} if given.pretrained is None else {"model": given.pretrained}
    trainer = Alone(args=args, train_dataset=given.train_dataset, **source, **setup, **others)
    trainer.train()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_trainer_alone(name: str) -> None:
    here = trained(fresh(CASES[name](), {"seed": 42}), lambda step: {"seed": 42}, 0, STEPS)
    expected = alone(CASES[name](), 42)
    found = weights(here)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_epochs_are_those_of_trainer_alone() -> None:
    """In epochs the last batch, and the last accumulation, are short. (Randomness is keyed once in an epoch.)"""
    args = arguments(gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2, weight_decay=0.1)
    here = setup(args=args, model_init=without_dropout)
    here.step_unit = "epoch"
    adapter = trained(fresh(here, {"seed": 42}), lambda step: {"seed": 42}, 0, 2)
    expected = alone(setup(args=args, model_init=without_dropout), 42, by_epoch=True)
    assert here.trainer.state.global_step == 8 and here.trainer.state.epoch == 2.0
    assert all(torch.equal(weights(adapter)[name], value) for name, value in expected.items())


def test_a_schedule_of_the_learning_rate_is_followed_at_every_step() -> None:
    rates = s.linear(2e-3, start_factor=0.0, end_factor=1.0, total_iters=5)
    hp_at = lambda step: {"seed": 42, "learning_rate": rates.value(step)}  # noqa: E731
    adapter = trained(fresh(setup(), hp_at(0)), hp_at, 0, STEPS)
    expected = alone(setup(), 42, lambda step: float(rates.value(step)))
    assert all(torch.equal(weights(adapter)[name], value) for name, value in expected.items())


# --- forks


def hp_at(step: int) -> dict[str, Any]:
    """Everything that may change at a step does, before and after the fork."""
    return {
        "seed": 3,
        "learning_rate": 1e-2 / (1 + step),
        "weight_decay": 0.1 if step < 5 else 0.02,
        "adam_beta1": 0.9 if step < 6 else 0.8,
        "adam_epsilon": 1e-8 if step < 2 else 1e-6,
        "per_device_train_batch_size": 3 if step < 3 else 4,
        "gradient_accumulation_steps": 1 if step < 5 else 2,
        "max_grad_norm": 1 if step < 6 else 0.05,
        "label_smoothing_factor": 0 if step < 3 else 0.1,
    }


class TestTrainerAsTrainable(TrainableContract):
    steps, fork = STEPS, FORK

    @pytest.fixture
    def make_trainable(self) -> Callable[[], object]:
        return setup

    @pytest.fixture
    def values_at(self) -> Callable[[int], dict[str, Any]]:
        return hp_at


@functools.cache
def state_of(name: str) -> tuple[Any, list[object]]:
    """The state of a case at the fork, and what comes of it straight through."""
    adapter = trained(fresh(CASES[name](), {"seed": 42}), lambda step: {"seed": 42}, 0, FORK)
    state = clone(adapter.state_dict())
    straight = outcome(trained(adapter, lambda step: {"seed": 42}, FORK, STEPS))
    adapter.close()
    return state, straight


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_a_fork_equals_training_straight_through(name: str) -> None:
    state, straight = state_of(name)
    adapter = fresh(CASES[name](), {"seed": 42})
    adapter.load_state_dict(state)
    assert outcome(trained(adapter, lambda step: {"seed": 42}, FORK, STEPS)) == straight


@pytest.mark.slow  # half a minute of imports
def test_a_fork_in_a_new_process_equals_training_straight_through(tmp_path: Path) -> None:
    store = FolderCheckpoints(str(tmp_path), "tests")
    for number, name in enumerate(ELSEWHERE):
        store.save(StateKey(f"case-{number}"), state_of(name)[0], step=FORK, parent=None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.test_transformers", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [state_of(name)[1] for name in ELSEWHERE]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    store, found = FolderCheckpoints(folder, "tests"), []
    for number, name in enumerate(ELSEWHERE):
        adapter = fresh(CASES[name](), {"seed": 42})
        adapter.load_state_dict(store.load(StateKey(f"case-{number}")))
        found.append(outcome(trained(adapter, lambda step: {"seed": 42}, FORK, STEPS)))
    print(json.dumps(found))  # noqa: T201


# --- searches


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "learning_rate": s.multistep(
            trial.suggest_float("rate", 1e-3, 1e-2), [trial.suggest_categorical("drop", [3, 5])]
        ),
        "per_device_train_batch_size": 4,
        "seed": 1,
    }


def search(trainable: object, store: object, **options: Any) -> hpstage.Result:
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))
    given = {"n_trials": 3, "steps": STEPS, "executor": hpstage.InlineExecutor(), "metric": "eval_loss", **options}
    return hpstage.optimize(study, trainable, given.pop("space", space), store=store, **given)


def test_a_search_gives_the_model_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainable = setup()
    result = search(trainable, tmp_path)
    assert [record for record in caplog.records if record.name == "hpstage"] == []  # nothing to warn of
    model = result.best_model()
    assert isinstance(model, BertForSequenceClassification) and not model.training
    loaded = result.load(result.best_trial)
    assert loaded.metrics is not None and {"eval_loss", "eval_accuracy"} == loaded.metrics.keys()
    again = loaded.trainable.trainer.evaluate()
    assert {name: again[name] for name in loaded.metrics} == loaded.metrics
    model.save_pretrained(tmp_path / "saved")
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in saved.state_dict().items())
    kept = result.trial(result.best_trial).weights()
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert trainable.trainer is None and not Path(OUTPUT).exists()


@pytest.mark.slow
def test_a_search_on_dask_gives_the_same(tmp_path: Path) -> None:
    """Trials fork on the way, and each worker continues what the other has kept."""
    here = search(setup(), tmp_path / "here", algorithm=SuccessiveHalving(2, 2), n_trials=4)
    with local_cluster(2, gpus=0) as cluster, Client(cluster, set_as_default=False) as client:
        there = search(setup(), tmp_path / "there", algorithm=SuccessiveHalving(2, 2), n_trials=4, executor=client)
    assert [trial.intermediate_values for trial in here.study.trials] == [
        trial.intermediate_values for trial in there.study.trials
    ]
    expected = here.best_model().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in there.best_model().state_dict().items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
def test_an_adapter_of_peft_has_small_states(tmp_path: Path) -> None:
    """What is frozen is in no state: neither of a model that was given, nor of one around a base made once."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    base = seeded(new_bert)
    whole = sum(value.numel() for value in base.state_dict().values())

    def around(hp: Mapping[str, Any]) -> Any:
        return peft.get_peft_model(base, peft.LoraConfig(r=hp["rank"], target_modules=["query"]))

    given = setup(model=peft.get_peft_model(seeded(new_bert), config))
    for trainable, hp, names in (
        (given, {"seed": 1}, {"lora_A", "lora_B", "modules_to_save"}),
        (setup(model_init=around), {"seed": 1, "rank": 2}, {"lora_A", "lora_B"}),
    ):
        at = functools.partial(lambda step, hp: hp, hp=hp)
        adapter = trained(fresh(trainable, hp), at, 0, FORK)
        state: Any = clone(adapter.state_dict())
        kept = state["model"]
        assert all(any(part in name for part in names) for name in kept if value_of(kept[name]) > 8), list(kept)
        assert sum(map(value_of, kept.values())) < whole / 4
        straight = outcome(trained(adapter, at, FORK, STEPS))
        adapter.close()
        adapter = fresh(trainable, hp)
        adapter.load_state_dict(state)
        assert outcome(trained(adapter, at, FORK, STEPS)) == straight
        adapter.close()
    result = search(given, tmp_path, n_trials=1)
    assert isinstance(result.best_model(), peft.PeftModel)
    assert all(
        not p.is_inference() and p.requires_grad == ("lora" in n or "save" in n)
        for n, p in given.pretrained.named_parameters()
    )


def value_of(tensor: torch.Tensor) -> int:
    return tensor.numel()


def test_hyper_parameters_go_to_model_init_and_to_fields_of_the_users_own() -> None:
    def hp(step: int) -> dict[str, Any]:
        return {"width": 8, "weight": 1 if step < 2 else 0.25, "optim": "sgd", "seed": 1}

    trainable = setup(model_init=bert, trainer_class=Weighted, args=WithWeight(**with_weight))
    adapter = trained(fresh(trainable, hp(0)), hp, 0, 4)
    assert trainable.trainer.model.config.hidden_size == 8
    assert trainable.trainer.args.weight == 0.25
    assert trainable.trainer.computed == 4
    adapter.close()


def test_a_tokenizer_pads_the_batches(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, **{str(i): i for i in range(2, 40)}}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")

    class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
        """Tokenized when they are asked for."""

        def __init__(self, samples: list[dict[str, Any]]) -> None:
            self.texts = [" ".join(map(str, sample["input_ids"])) for sample in samples]
            self.labels = [sample["label"] for sample in samples]

        def __len__(self) -> int:
            return len(self.texts)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**tokenizer(self.texts[index], truncation=True, max_length=5), "label": self.labels[index]}

    trainable = setup(
        data_collator=None,
        processing_class=tokenizer,
        train_dataset=Sentences(sentences(SAMPLES, 0)),
        eval_dataset={"one": Sentences(sentences(5, 1)), "two": Sentences(sentences(5, 2))},
    )
    result = search(trainable, tmp_path, metric="eval_two_accuracy", n_trials=1)
    metrics = result.load(0).metrics
    assert metrics is not None
    assert metrics.keys() == {f"eval_{name}_{metric}" for name in ("one", "two") for metric in ("accuracy", "loss")}


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"args": {"deepspeed": None, "push_to_hub": True}}, "push_to_hub"),
        ({"args": {"resume_from_checkpoint": "folder"}}, "resume_from_checkpoint"),
        ({"args": {"load_best_model_at_end": True, "save_strategy": "best"}}, r"result.load\(trial, 'best'\)"),
        ({"args": {"report_to": "tensorboard"}}, "report_to"),
        ({"args": {"neftune_noise_alpha": 5.0}}, "neftune_noise_alpha"),
        ({"args": {"auto_find_batch_size": True}}, "auto_find_batch_size"),
        ({"args": {"train_sampling_strategy": "group_by_length"}}, "train_sampling_strategy"),
        ({"args": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}}, "goes by metrics"),
        ({"args": {"optim": "galore_adamw_layerwise"}}, "backward pass"),
        ({"args": None}, "TrainingArguments"),
        ({"model_init": None}, "a model or a model_init"),
        ({"eval_dataset": None}, "eval_dataset"),
        ({"model_init": lambda hp, more: None}, "more than one argument"),
        ({"callbacks": [transformers.EarlyStoppingCallback()]}, "EarlyStoppingCallback has no meaning"),
        ({"callbacks": [transformers.PrinterCallback]}, "logging and saving"),
        ({"callbacks": [type("Mine", (TrainerCallback,), {"on_save": print})()]}, r"Mine\.on_save\(\)"),
        ({"trainer_class": type("Mine", (Trainer,), {"get_train_dataloader": print})}, r"Mine\.get_train_dataloader"),
        (
            {"trainer_class": functools.partial(type("Mine", (Trainer,), {"train": print}), power=1)},
            r"Mine\.train\(\) is not called",
        ),
    ],
)
def test_what_has_no_meaning_in_a_search_is_refused_by_name(given: dict[str, Any], told: str) -> None:
    if isinstance(given.get("args"), dict):
        given = {**given, "args": TrainingArguments(output_dir=OUTPUT, use_cpu=True, **given["args"])}
    with pytest.raises(UsageError, match=told):
        setup(**given)


@pytest.mark.parametrize(
    ("hp", "told"),
    [
        ({"lr": 0.1}, r"nothing reads the hyper-parameter 'lr'.*did you mean 'learning_rate'"),
        ({"batch_size": 4}, "per_device_train_batch_size"),
        ({"max_steps": 4}, "steps= of optimize"),
        ({"logging_steps": 4}, "decides nothing"),
        ({"per_device_train_batch_size": 2.5}, "whole number"),
        ({"optim": "sgd", "adam_beta1": 0.8}, "SGD has no such field"),
    ],
)
def test_a_hyper_parameter_that_nothing_reads_is_refused_by_name(hp: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        trained(fresh(setup(), hp), lambda step: hp, 0, 1)


@pytest.mark.parametrize(
    ("make", "hp_at", "told"),
    [
        (setup, lambda step: {"warmup_steps": step}, "read only when a trial begins"),
        (lambda: setup(model_init=bert), lambda step: {"width": 8 * (1 + step)}, "read only when a trial begins"),
        (lambda: setup(args=arguments(max_steps=2)), lambda step: {}, "scheduler of TrainingArguments has 2 steps"),
        (lambda: setup(callbacks=[Stopping("epoch")]), lambda step: {}, "should_epoch_stop in on_step_end"),
        (
            lambda: setup(trainer_class=Weighted),
            lambda step: {"learning_rate": 0.01 * step},
            "learning_rate is 0 at first",
        ),
    ],
)
def test_what_cannot_go_on_is_said(make: Callable[[], Any], hp_at: Callable[[int], dict[str, Any]], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        trained(fresh(make(), hp_at(0)), hp_at, 0, 4)


class Stopping(TrainerCallback):
    def __init__(self, what: str) -> None:
        self.what = f"should_{what}_stop"

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        setattr(control, self.what, state.global_step == 3)


def test_a_callback_may_end_a_trial(tmp_path: Path) -> None:
    result = search(setup(callbacks=[Stopping("training")]), tmp_path, n_trials=2)
    assert [trial.state for trial in result.study.trials] == [optuna.trial.TrialState.COMPLETE] * 2
    assert [result.load(number).step for number in range(2)] == [3, 3]


def test_a_scheduler_that_is_not_used_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        fresh(setup(args=arguments(lr_scheduler_type="cosine")), {"learning_rate": 0.1}).evaluate()
    assert "lr_scheduler_type='cosine' of TrainingArguments is not used" in caplog.text


def identity(**given: Any) -> object:
    return code_identity(setup(**given))


def test_the_key_is_that_of_what_decides_training() -> None:
    usual = identity()
    assert usual == identity()
    assert usual == identity(
        args=arguments(logging_steps=7, save_strategy="no", run_name="mine", eval_strategy="epoch")
    )
    for other in (
        {"args": arguments(weight_decay=0.1)},
        {"args": arguments(per_device_eval_batch_size=3)},
        {"eval_dataset": sentences(9, 2)},
        {"train_dataset": sentences(SAMPLES, 2)},
        {"data_collator": text},
        {"model_init": gpt},
        {"compute_metrics": None},
        {"trainer_class": Weighted},
        {"callbacks": [Shrinking()]},
        {"model": seeded(new_bert)},
    ):
        assert identity(**other) != usual, other
    assert identity(model=seeded(new_bert)) == identity(model=seeded(new_bert)) != identity(model=new_bert())


if __name__ == "__main__":
    main(sys.argv[1])
