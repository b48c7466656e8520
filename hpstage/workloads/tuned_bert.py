"""A BERT of transformers, fine-tuned to classify sentences: LoRA by hand or by PEFT, the last layers, or a probe.

The file is that of ``bert.py``: each line is a label, a tab and a sentence. A step is a batch. To fine-tune a model
from the hub, return it from ``whole()``, and use its tokenizer.

    export BERT_SENTENCES=sentences.tsv
    hpstage run hpstage.workloads.tuned_bert:TunedBert hpstage.workloads.tuned_bert:space \
        --metric accuracy --direction maximize --steps 1000 --n-trials 24
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from hpstage.workloads.bert import Line, read, tokenizer_of
from hpstage.workloads.fine_tuning import FineTuned, Part, space

__all__ = ["TunedBert", "space"]


class TunedBert(FineTuned):
    """The fine-tuned model; ``part`` and ``base``: see :class:`FineTuned`.

    Args:
        sentences: the file; by default the environment variable BERT_SENTENCES, else ``sentences.tsv`` in the working
            directory.
        length: number of words to which sentences are padded or cut.
        dropout: dropout probability, in frozen layers, too.
    """

    trained = ("classifier",)
    adapted = ("query", "value")

    def __init__(
        self,
        sentences: str | None = None,
        *,
        part: Part = "lora",
        base: str | None = None,
        layers: int = 6,
        heads: int = 4,
        width: int = 256,
        length: int = 64,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(part, base)
        self.sentences = os.path.abspath(sentences or os.environ.get("BERT_SENTENCES", "sentences.tsv"))
        training, validation = read(self.sentences)
        self.labels = sorted({label for label, _ in training + validation})
        self.sizes = {
            "vocab_size": len(tokenizer_of(training)),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "max_position_embeddings": length,
            "num_labels": len(self.labels),
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
        }

    def dataset(self) -> TensorDataset:
        training, validation = read(self.sentences)
        tokenizer = tokenizer_of(training)

        def encoded(lines: Sequence[Line]) -> tuple[Tensor, ...]:
            texts: Any = tokenizer(
                [sentence for _, sentence in lines],
                padding="max_length",
                truncation=True,
                max_length=self.sizes["max_position_embeddings"],
                return_tensors="pt",
            )
            labels = torch.tensor([self.labels.index(label) for label, _ in lines])
            # transformers reads no value of a mask with four dimensions, so that backends can record a step.
            return texts["input_ids"], texts["attention_mask"].bool()[:, None, None], labels

        self.test = encoded(validation)
        return TensorDataset(*encoded(training))

    def whole(self) -> nn.Module:
        model: nn.Module = BertForSequenceClassification(BertConfig(**self.sizes))
        return model

    def blocks(self, model: BertForSequenceClassification) -> Sequence[nn.Module]:
        return [*model.bert.encoder.layer]

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        words, mask, labels = batch
        return functional.cross_entropy(model(words, attention_mask=mask).logits, labels)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        words, mask, labels = self.test
        logits = model(words, attention_mask=mask).logits
        loss = functional.cross_entropy(logits, labels)
        return {"accuracy": (logits.argmax(1) == labels).double().mean().item(), "loss": loss.item()}
