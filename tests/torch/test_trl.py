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

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from hpstage.torch.transformers import TrainerTrainable
from tests.torch.hugging_face import OUTPUT, STEPS, alone, fresh, search, seeded, trained, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def gpt() -> GPT2LMHeadModel:
    size = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 2, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=24, **size))


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


def dpo() -> TrainerTrainable:
    pairs = [{"prompt": text(i, 3 * i), "chosen": text(7 * i, i + 1), "rejected": text(5 * i)} for i in range(20)]
    rows = Dataset.from_list(pairs)
    model = seeded(gpt)
    return TrainerTrainable(
        model=model,
        args=DPOConfig(**fields(activation_checkpointing=False)),
        train_dataset=rows.select(range(12)),
        eval_dataset=rows.select(range(12, 20)),
        processing_class=tokenizer(),
        trainer_class=functools.partial(DPOTrainer, ref_model=copy.deepcopy(model)),
    )


@pytest.mark.parametrize("make", [sft, dpo])
def test_weights_are_those_of_trainer_train(make: Any) -> None:
    here = weights(trained(fresh(make(), {"seed": 42}), lambda step: {"seed": 42}, 0, STEPS))
    expected = alone(make(), 42)
    assert here.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(here[name], value)] == []


def space(trial: optuna.Trial) -> dict[str, object]:
    drop = trial.suggest_categorical("drop", [3, 5])
    return {"learning_rate": s.multistep(3e-3, [drop]), "seed": 1}


@pytest.mark.ci
@pytest.mark.parametrize("make", [sft, dpo])
def test_a_search_shares_and_each_trial_has_the_metrics_of_its_own_run(make: Any, tmp_path: Path) -> None:
    drops = optuna.samplers.GridSampler({"drop": [3, 5]})
    study = optuna.create_study(sampler=drops)
    result = search(make(), tmp_path, space=space, study=study, n_trials=2)
    assert result.savings.steps_trained == 2 * STEPS - 3
    for trial in result.study.trials:
        rate = s.multistep(3e-3, [trial.params["drop"]])
        hp_at = lambda step, rate=rate: {"learning_rate": rate.value(step), "seed": 1}  # noqa: E731
        own = trained(fresh(make(), hp_at(0)), hp_at, 0, STEPS)
        assert dict(own.evaluate()) == result.load(trial.number).metrics
