"""Names that the code of a trainable mentions."""

from __future__ import annotations

from hpstage.torch.trainable import TorchTrainable
from hpstage.training.code.graph import functions_reached
from hpstage.training.code.names import names_in

_MODES = {"no_grad", "enable_grad", "set_grad_enabled", "requires_grad", "requires_grad_", "is_grad_enabled"}


def names_gradients(code: type) -> bool:
    """Return whether the user's code mentions gradients, so that their values may matter."""
    names = {name for function in functions_reached(code) for name in names_in(function.__code__)}
    return any("grad" in name for name in names - _MODES)


def read_in_training(code: type[TorchTrainable]) -> list[str]:
    """Return the attributes meant only for speed that the user's code reads during training, so that they may
    matter."""
    before = {"__init__", "dataset"}  # which set them, or decide by them only what the data's key has
    functions = [function for function in functions_reached(code) if function.__name__ not in before]
    read = {name for function in functions for name in names_in(function.__code__)}
    return sorted(read.intersection(code._without_keys))
