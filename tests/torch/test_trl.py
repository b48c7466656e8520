"""TRL's trainers under hpstage train as TRL trains, bit for bit.

Skipped where TRL is not installed: with datasets, which it brings, importing transformers starts threads, so that no
process that has imported it is forked.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from hpstage import schedule as s
from hpstage.errors import UsageError

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from hpstage.torch.transformers import TrainerTrainable
from tests.torch.hugging_face import (
    OUTPUT,
    STEPS,
    alone,
    forks_at_every_step,
    fresh,
    search,
    seeded,
    trained,
    weights,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


SIZE = {"vocab_size": 24, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}


def gpt() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**SIZE, bos_token_id=2, eos_token_id=2))


def tokenizer() -> Any:
    special = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2}
    rust = Tokenizer(WordLevel({**special, **{f"w{i}": i + 3 for i in range(20)}}, unk_token="[UNK]"))
    rust.pre_tokenizer = Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    return PreTrainedTokenizerFast(tokenizer_object=rust, **names)


def text(*numbers: int) -> str:
    return " ".join(f"w{number % 20}" for number in numbers)


def fields(**more: Any) -> dict[str, Any]:
    given = {"max_length": 16, "per_device_train_batch_size": 4, "max_steps": STEPS, "lr_scheduler_type": "constant"}
    return {"output_dir": OUTPUT, "use_cpu": True, "bf16": False, "report_to": "none", **given, **more}


def sft() -> TrainerTrainable:
    """It tokenizes, truncates and masks the data when it is made, and adds the adapters."""
    rows = Dataset.from_list([{"text": text(*range(7 * i, 7 * i + 3 + i % 4))} for i in range(30)])
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], task_type="CAUSAL_LM")
    return TrainerTrainable(
        model=seeded(gpt),
        args=SFTConfig(**fields()),
        train_dataset=rows.select(range(20)),
        eval_dataset=rows.select(range(20, 30)),
        processing_class=tokenizer(),
        trainer_class=functools.partial(SFTTrainer, peft_config=lora),
    )


def pairs() -> Any:
    return Dataset.from_list(
        [{"prompt": text(i, 3 * i), "chosen": text(7 * i, i + 1), "rejected": text(5 * i)} for i in range(20)]
    )


def dpo() -> TrainerTrainable:
    """Activation checkpointing is on by default, and off for the reference in each step."""
    rows, model = pairs(), seeded(gpt)
    return TrainerTrainable(
        model=model,
        args=DPOConfig(**fields(sync_ref_model=True, ref_model_sync_steps=2)),
        train_dataset=rows.select(range(12)),
        eval_dataset=rows.select(range(12, 20)),
        processing_class=tokenizer(),
        trainer_class=functools.partial(DPOTrainer, ref_model=copy.deepcopy(model)),
    )


def reward() -> TrainerTrainable:
    rows = pairs().remove_columns("prompt")
    return TrainerTrainable(
        model=seeded(lambda: GPT2ForSequenceClassification(GPT2Config(**SIZE, pad_token_id=0, num_labels=1))),
        args=RewardConfig(**fields()),
        train_dataset=rows.select(range(12)),
        eval_dataset=rows.select(range(12, 20)),
        processing_class=tokenizer(),
        trainer_class=RewardTrainer,
    )


class Reward:
    """Of letters; it grows with each call."""

    __name__ = "letters"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], **others: Any) -> list[float]:
        self.calls += 1
        return [sum(map(ord, one)) % 7 + 0.01 * self.calls for one in completions]


def grpo() -> TrainerTrainable:
    """Completions are generated every other step, and used for two steps of two batches, twice."""
    rows = Dataset.from_list([{"prompt": text(i, 3 * i, i + 1)} for i in range(10)])
    args = fields(max_completion_length=5, num_generations=2, gradient_accumulation_steps=2, steps_per_generation=4)
    del args["max_length"]
    return TrainerTrainable(
        model=seeded(gpt),
        args=GRPOConfig(**args, num_iterations=2, learning_rate=1e-2, per_device_eval_batch_size=4),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        processing_class=tokenizer(),
        trainer_class=functools.partial(GRPOTrainer, reward_funcs=Reward()),
    )


MAKERS = [sft, dpo, *(pytest.param(make, marks=pytest.mark.ci) for make in (reward, grpo))]


@pytest.mark.ci
@pytest.mark.parametrize("make", MAKERS)
def test_weights_equal_those_of_trainer_train(make: Any) -> None:
    here = weights(trained(fresh(make(), {"seed": 42}), lambda step: {"seed": 42}, 0, STEPS))
    expected = alone(make(), 42)
    assert here.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(here[name], value)] == []


@pytest.mark.ci
@pytest.mark.parametrize("make", [sft, dpo, reward, grpo])
def test_a_fork_at_every_step_equals_training_straight_through(make: Any) -> None:
    forks_at_every_step(make)


def streamed(**shuffled: int) -> TrainerTrainable:
    rows = Dataset.from_list([{"text": text(*range(7 * i, 7 * i + 3 + i % 4))} for i in range(40)])
    stream = rows.to_iterable_dataset()
    return TrainerTrainable(
        model=seeded(gpt),
        args=SFTConfig(**fields()),
        train_dataset=stream.shuffle(seed=0, **shuffled) if shuffled else stream,
        eval_dataset=rows.select(range(5)),
        processing_class=tokenizer(),
        trainer_class=SFTTrainer,
    )


@pytest.mark.ci
def test_training_on_a_stream_equals_that_of_trl_and_forks_at_every_step() -> None:
    here = weights(trained(fresh(streamed(), {"seed": 42}), lambda step: {"seed": 42}, 0, STEPS))
    expected = alone(streamed(), 42)
    assert [name for name, value in expected.items() if not torch.equal(here[name], value)] == []
    forks_at_every_step(streamed)


def test_a_shuffle_buffer_missing_from_the_state_of_a_stream_is_refused() -> None:
    with pytest.raises(UsageError, match="has a shuffle buffer, which its state_dict"):
        trained(fresh(streamed(buffer_size=5), {"seed": 42}), lambda step: {"seed": 42}, 0, 1)


def space(trial: optuna.Trial) -> dict[str, object]:
    drop = trial.suggest_categorical("drop", [3, 5])
    return {"learning_rate": s.multistep(3e-3, [drop]), "seed": 1}


@pytest.mark.ci
@pytest.mark.parametrize("make", [sft, dpo])
def test_a_search_shares_steps_and_each_trial_has_the_metrics_of_a_separate_run(make: Any, tmp_path: Path) -> None:
    drops = optuna.samplers.GridSampler({"drop": [3, 5]})
    study = optuna.create_study(sampler=drops)
    result = search(make(), tmp_path, space=space, study=study, n_trials=2)
    assert result.savings.steps_trained == 2 * STEPS - 3
    for trial in result.study.trials:
        rate = s.multistep(3e-3, [trial.params["drop"]])
        hp_at = lambda step, rate=rate: {"learning_rate": rate.value(step), "seed": 1}  # noqa: E731
        own = trained(fresh(make(), hp_at(0)), hp_at, 0, STEPS)
        assert dict(own.evaluate()) == result.load(trial.number).metrics
