"""A linear probe of a ResNet on CIFAR-10, or fine-tuning of its last blocks.

The network is that of ``resnet.py``. Frozen batch normalisation keeps its statistics. A step is an epoch.

    export CIFAR10=path/to/cifar-10-batches-bin
    hpstage run hpstage.workloads.tuned_resnet:TunedResNet hpstage.workloads.tuned_resnet:space \
        --metric accuracy --direction maximize --steps 20 --n-trials 24

``TunedResNet(part=3)`` trains the last three blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hpstage.workloads.cifar import Cifar10
from hpstage.workloads.fine_tuning import FineTuned, space
from hpstage.workloads.resnet import Block, resnet

__all__ = ["TunedResNet", "space"]


class TunedResNet(FineTuned, Cifar10):
    """A ResNet of ``depth`` layers; ``base``: see :class:`FineTuned`.

    Args:
        folder: the folder of CIFAR-10; see :class:`Cifar10`.
        part: number of last blocks that are trained besides the last layer.
    """

    def __init__(
        self,
        folder: str | None = None,
        *,
        part: int = 0,
        base: str | None = None,
        depth: int = 20,
        width: int = 16,
    ) -> None:
        Cifar10.__init__(self, folder)
        FineTuned.__init__(self, part, base)
        self.depth, self.width = depth, width
        self.trained = (str(3 + 3 * (depth // 6) + 2),)  # the layer after the first layers, the blocks and the pooling

    def whole(self) -> nn.Module:
        return resnet(self.depth, self.width)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return [module for module in model if isinstance(module, Block)]
