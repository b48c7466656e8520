"""A Hugging Face Trainer's setup as a trainable: model, TrainingArguments, collator and metrics stay as they are."""

from hpstage.torch.transformers.trainable import TrainerTrainable

__all__ = ["TrainerTrainable"]
