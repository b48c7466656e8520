"""The setup of a Hugging Face Trainer as a trainable, with its model, TrainingArguments, collator and metrics."""

from hpstage.torch.transformers.trainable import TrainerTrainable

__all__ = ["TrainerTrainable"]
