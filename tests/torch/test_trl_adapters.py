"""A search over rank, alpha and rate of LoRA adapters: each trial is a run of SFTTrainer, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from distributed import Client

from hpstage import schedule as s
from hpstage.cluster import local_cluster

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer

from hpstage.torch.transformers import TrainerTrainable
from tests.torch.hugging_face import Ordered, Rekeyed, search, seeded
from tests.torch.test_trl import fields, gpt, text, tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

STEPS = 12
GRID = {"rate": [1e-3, 3e-3], "decay": [4, 8], "rank": [2, 4], "alpha": [4, 8]}


def lora(rank: int, alpha: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")


def rates(values: Mapping[str, Any]) -> s.Schedule:
    return s.wsd(values["rate"], STEPS, warmup=3, decay=values["decay"])


def space(trial: optuna.Trial) -> dict[str, Any]:
    values = {name: trial.suggest_categorical(name, choices) for name, choices in GRID.items()}
    return {"learning_rate": rates(values), "rank": values["rank"], "alpha": values["alpha"], "seed": 1}


def data() -> dict[str, Any]:
    rows = Dataset.from_list([{"text": text(*range(7 * i, 7 * i + 3 + i % 4))} for i in range(30)])
    return {
        "train_dataset": rows.select(range(20)),
        "eval_dataset": rows.select(range(20, 30)),
        "processing_class": tokenizer(),
    }


def separate(values: Mapping[str, Any]) -> SFTTrainer:
    """Train by TRL itself, with a ``peft_config``, on the same order of data."""

    class InOrder(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Ordered(len(self.train_dataset), 1, endless=True)

    args = SFTConfig(**fields(max_steps=STEPS, seed=1, save_strategy="no", logging_steps=1, disable_tqdm=True))
    schedule = rates(values)
    trainer = InOrder(
        model=seeded(gpt),
        args=args,
        peft_config=lora(values["rank"], values["alpha"]),
        callbacks=[Rekeyed(1, lambda step: float(schedule.value(step)))],
        **data(),
    )
    trainer.train()
    return trainer


def adapters(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of adapters by their places in the base, which they are injected into, whoever holds it."""
    return {name[name.index("transformer.") :]: value for name, value in weights.items() if "lora" in name}


@pytest.mark.slow
def test_a_search_over_adapters_equals_separate_runs_of_sft_trainer(tmp_path: Path) -> None:
    base = seeded(gpt)
    trainable = TrainerTrainable(
        model_init=lambda hp: get_peft_model(base, lora(hp["rank"], hp["alpha"])),
        args=SFTConfig(**fields(max_steps=STEPS)),
        trainer_class=SFTTrainer,
        **data(),
    )
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(GRID, seed=0))
    with local_cluster(2, gpus=0) as cluster, Client(cluster, set_as_default=False) as client:
        result = search(trainable, tmp_path, study=study, space=space, steps=STEPS, n_trials=12, executor=client)
    assert result.savings.steps_trained < 12 * STEPS
    for trial in result.study.trials:
        alone = separate(trial.params)
        logged = [entry["loss"] for entry in alone.state.log_history if "loss" in entry]
        assert [*result.log(trial.number).values["loss"].values()] == pytest.approx(logged, abs=0.0)
        expected = adapters(alone.model.state_dict())
        found = adapters(result.trial(trial).weights())
        assert expected.keys() == found.keys()
        assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
        assert trial.value == alone.evaluate()["eval_loss"]
