"""PyTorch models as trainables: the user describes model, optimizer, data, loss and metrics; hpstage runs the loop."""

from hpstage.torch import measure
from hpstage.torch.loading.mixture import Mixture
from hpstage.torch.loop import TorchLoop
from hpstage.torch.trainable import TorchTrainable

__all__ = ["Mixture", "TorchLoop", "TorchTrainable", "measure"]


def __dir__() -> list[str]:
    return __all__
