"""PyTorch models as trainables: describe model, optimizer, data, loss and metrics; hpstage owns the loop."""

from hpstage.torch.loop import TorchLoop
from hpstage.torch.trainable import TorchTrainable

__all__ = ["TorchLoop", "TorchTrainable"]
