"""Selects the loop that trains a TorchTrainable. Adapters of other objects: :mod:`hpstage.training.trainables`."""

from __future__ import annotations

from hpstage.torch.backends.lookup import AUTO, backend_named
from hpstage.torch.loop import TorchLoop
from hpstage.torch.trainable import TorchTrainable


def loop_of(subject: TorchTrainable) -> TorchLoop:
    """Return the loop that trains an object: the loop for virtual nodes, for several siblings at a time, or for one
    trial at a time.

    Raises:
        UsageError: there is no step backend named like ``numerics``, or attributes contradict each other.
    """
    if subject.virtual_nodes != 1:
        from hpstage.torch.elastic.loop import ElasticLoop

        return ElasticLoop(subject)
    if subject.numerics == AUTO or backend_named(subject.numerics).several:
        from hpstage.torch.backends.siblings import StackedLoop

        return StackedLoop(subject)
    return TorchLoop(subject)
