"""CIFAR-10 from its binary files, with the standard augmentation: shared by the image classifiers of this folder.

The files ("CIFAR-10 binary version" on https://www.cs.toronto.edu/~kriz/cifar.html) contain records of 3,073 bytes: a
label, then 32 x 32 values of red, of green and of blue. In memory they stay bytes, a quarter of the size of floats;
only batches are converted to floats.

Augmentation works on a whole batch, in ``loss``, on the device of the batch. It draws from torch's generator, which
hpstage seeds from the hyperparameter ``seed`` and the step. So a trial forked at any step crops the same pixels as a
trial trained straight through, and no generator is part of its state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hpstage

TRAINING = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST = ["test_batch.bin"]
RECORD = 1 + 3 * 32 * 32
REMEDY = (
    "unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz again, and give its folder cifar-10-batches-bin as "
    "`folder` or in the environment variable CIFAR10"
)


def read(folder: str, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return images, uint8 of shape (n, 3, 32, 32), and labels, int64 of shape (n,), from files of equal length.

    Raises:
        hpstage.errors.UsageError: a file is missing, cut off, or not of this format.
    """
    contents: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    for name in names:
        path = Path(folder, name)
        if not path.is_file():
            raise hpstage.errors.UsageError(f"there is no file {path}: {REMEDY}")
        content = np.fromfile(path, dtype=np.uint8)
        if not content.size or content.size % RECORD or (contents and content.size != contents[0].size):
            raise hpstage.errors.UsageError(f"{path} has a wrong size, {content.size:,} bytes: {REMEDY}")
        if content[::RECORD].max() > 9:
            raise hpstage.errors.UsageError(f"{path} is damaged: it has labels above 9; {REMEDY}")
        contents.append(content)
    records = torch.from_numpy(np.concatenate(contents)).view(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def augment(images: Tensor, padding: int = 4) -> Tensor:
    """Pad images with black, crop them at random, and flip half of them (arXiv 1512.03385, section 4.2). Any dtype."""
    count, _, height, width = images.shape
    at = images.device
    top, left = torch.randint(2 * padding + 1, (2, count), device=at)
    flipped = torch.rand(count, 1, 1, 1, device=at) < 0.5
    crops = nn.functional.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view of all crops
    chosen = crops[torch.arange(count, device=at), :, top, left]
    return torch.where(flipped, chosen.flip(3), chosen)


def scale(images: Tensor) -> Tensor:
    """Return bytes as floats of zero mean and unit variance over the training set, by channel."""
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=images.device).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616], device=images.device).view(3, 1, 1)
    return (images.float() / 255 - mean) / deviation


class Cifar10(hpstage.torch.TorchTrainable):
    """A classifier of CIFAR-10, trained by SGD. A step is an epoch. Subclasses define the model.

    Args:
        folder: the folder of the binary files; by default the environment variable CIFAR10, else
            ``cifar-10-batches-bin`` in the working directory.
    """

    step_unit = "epoch"
    nesterov = False

    def __init__(self, folder: str | None = None) -> None:
        self.folder = os.path.abspath(folder or os.environ.get("CIFAR10", "cifar-10-batches-bin"))

    def dataset(self) -> TensorDataset:
        self.test = read(self.folder, TEST)
        return TensorDataset(*read(self.folder, TRAINING))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(),
            lr=hp["lr"],
            momentum=hp["momentum"],
            weight_decay=hp["weight_decay"],
            nesterov=self.nesterov,
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(scale(augment(images))), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        at = next(model.parameters()).device
        right, loss = 0, 0.0
        for images, labels in zip(*(torch.split(part, 500) for part in self.test), strict=True):
            logits, truth = model(scale(images.to(at))), labels.to(at)
            right += int((logits.argmax(1) == truth).sum())
            loss += float(nn.functional.cross_entropy(logits, truth, reduction="sum"))
        return {"accuracy": right / len(self.test[1]), "loss": loss / len(self.test[1])}
