"""sentence-transformers' trainer under hpstage trains as it does alone, in the order of its own samplers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")

from datasets import Dataset, DatasetDict
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel

from hpstage.torch.transformers import TrainerTrainable
from tests.torch.hugging_face import OUTPUT, STEPS, alone, forks_at_every_step, fresh, seeded, trained, weights
from tests.torch.test_trl import text, tokenizer

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    seeded(lambda: BertModel(BertConfig(vocab_size=24, max_position_embeddings=32, **size))).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def pairs() -> Dataset:
    """Some anchors are there several times."""
    return Dataset.from_list([{"anchor": text(i % 7, 3, 1), "positive": text(i % 7, i + 5)} for i in range(22)])


def scored() -> Dataset:
    rows = [{"sentence1": text(i, 3 * i), "sentence2": text(i, i + 5), "score": (i % 5) / 4} for i in range(22)]
    return Dataset.from_list(rows)


def setup(folder: Path, data: Any, loss: Any, **fields: Any) -> TrainerTrainable:
    words = Transformer(str(folder))
    model = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension(), "mean")], device="cpu")
    given = {"max_steps": STEPS, "per_device_train_batch_size": 4, "lr_scheduler_type": "constant", **fields}
    return TrainerTrainable(
        model=model,
        args=SentenceTransformerTrainingArguments(output_dir=OUTPUT, use_cpu=True, report_to="none", **given),
        train_dataset=data,
        eval_dataset=data,
        trainer_class=functools.partial(SentenceTransformerTrainer, loss=loss(model)),
    )


CASES = {
    "no duplicates": lambda folder: setup(
        folder, pairs(), MultipleNegativesRankingLoss, batch_sampler="no_duplicates", learning_rate=1e-2
    ),
    "a schedule, accumulated": lambda folder: setup(
        folder,
        scored(),
        CosineSimilarityLoss,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        gradient_accumulation_steps=2,
    ),
    "two data sets": lambda folder: setup(
        folder,
        DatasetDict({"pairs": pairs(), "scored": scored()}),
        lambda model: {"pairs": MultipleNegativesRankingLoss(model), "scored": CosineSimilarityLoss(model)},
        multi_dataset_batch_sampler="round_robin",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_of_trainer_train_and_every_step_forks_exactly(name: str, folder: Path) -> None:
    here = weights(trained(fresh(CASES[name](folder), {"seed": 42}), lambda step: {"seed": 42}, 0, STEPS))
    expected = alone(CASES[name](folder), 42)
    assert here.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(here[key], value)] == []
    forks_at_every_step(lambda: CASES[name](folder))
