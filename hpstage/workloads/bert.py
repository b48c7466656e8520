"""A small BERT that learns to classify sentences, through Hugging Face's Trainer.

It is an ordinary setup of transformers: a tokenizer, a model, TrainingArguments, metrics over predictions.
``TrainerTrainable`` takes the arguments of ``Trainer``; schedules replace ``lr_scheduler_type``. To fine-tune a model
from the hub, return it from ``new_model`` and use its tokenizer.

Each line of the file is a label, a tab and a sentence. The model begins with random weights.

    export BERT_SENTENCES=sentences.tsv
    hpstage run hpstage.workloads.bert:Bert hpstage.workloads.bert:space \
        --metric eval_accuracy --direction maximize --steps 2000 --n-trials 12
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, TrainingArguments

import hpstage
from hpstage import schedule as s
from hpstage.torch.transformers import TrainerTrainable

if TYPE_CHECKING:
    import optuna

Line = tuple[str, str]


def read(file: str) -> tuple[list[Line], list[Line]]:
    """Return label and sentence of each line: every tenth line for validation, the others for training.

    Returns:
        The lines for training, and those for validation.

    Raises:
        hpstage.errors.UsageError: there is no such file, or it has fewer than 10 sentences.
    """
    remedy = "give a file of lines LABEL<tab>SENTENCE, or its name in the environment variable BERT_SENTENCES"
    if not Path(file).is_file():
        raise hpstage.errors.UsageError(f"there is no file {file}: {remedy}")
    lines = [line.split("\t", 1) for line in Path(file).read_text().splitlines() if "\t" in line]
    pairs = [(label, sentence) for label, sentence in lines]
    if len(pairs) < 10:
        raise hpstage.errors.UsageError(f"{file} has {len(pairs)} sentences; at least 10 are needed: {remedy}")
    return [pair for number, pair in enumerate(pairs) if number % 10], pairs[::10]


def tokenizer_of(lines: Sequence[Line]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows the words of these sentences."""
    words = sorted({word for _, sentence in lines for word in sentence.split()})
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def new_model(config: BertConfig, hp: Mapping[str, Any]) -> BertForSequenceClassification:
    """Return a model with random weights. ``hp`` has the values at the first step."""
    config.hidden_dropout_prob = hp["dropout"]
    return BertForSequenceClassification(config)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Bert(TrainerTrainable):
    """The setup. A step is an update of the weights; the metrics are ``eval_accuracy`` and ``eval_loss``.

    Args:
        sentences: the file; by default the environment variable BERT_SENTENCES, else ``sentences.tsv`` in the working
            directory.
        length: maximum number of words read from a sentence.
    """

    def __init__(
        self, sentences: str | None = None, *, layers: int = 4, heads: int = 4, width: int = 256, length: int = 128
    ) -> None:
        training, validation = read(sentences or os.environ.get("BERT_SENTENCES", "sentences.tsv"))
        tokenizer = tokenizer_of(training)
        labels = sorted({label for label, _ in training + validation})

        def encoded(lines: Sequence[Line]) -> list[dict[str, Any]]:
            texts = tokenizer([sentence for _, sentence in lines], truncation=True, max_length=length)["input_ids"]
            return [
                {"input_ids": ids, "label": labels.index(label)} for ids, (label, _) in zip(texts, lines, strict=True)
            ]

        config = BertConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            hidden_size=width,
            intermediate_size=4 * width,
            max_position_embeddings=length,
            num_labels=len(labels),
            pad_token_id=tokenizer.pad_token_id,
        )
        super().__init__(
            model_init=partial(new_model, config),
            args=TrainingArguments(weight_decay=0.01, lr_scheduler_type="constant", per_device_eval_batch_size=64),
            train_dataset=encoded(training),
            eval_dataset=encoded(validation),
            processing_class=tokenizer,  # pads batches
            compute_metrics=accuracy,
        )


def space(trial: optuna.Trial, steps: int = 2000) -> dict[str, s.Schedule | s.Scalar]:
    """For each peak, trials share a warm-up and a plateau, and branch into decays of three lengths."""
    peak = trial.suggest_categorical("learning_rate", [3e-4, 1e-4])
    decay = steps * trial.suggest_categorical("decay_percent", [20, 40, 60]) // 100
    rate = s.wsd(peak, steps, warmup=max(1, steps // 20), decay=decay)
    return {"learning_rate": rate, "per_device_train_batch_size": 32, "dropout": 0.1, "seed": 0}
