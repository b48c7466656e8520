"""Checks before a search whether a GPU has memory for all models that will share it, and refuses the search if not."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from hpstage.checkpoints.on_device import is_out_of_memory
from hpstage.errors import UsageError
from hpstage.errors.text import count_of, size
from hpstage.execution.bundle import slots_in
from hpstage.execution.device_memory import DeviceMemory
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable, is_bundling

logger = logging.getLogger("hpstage")

SHARERS = "HPSTAGE_WORKERS_SHARING_A_GPU"
"""Environment variable of a worker and its training process: the number of workers that share its device."""


def sharers() -> int:
    """Return how many workers share the device of this process."""
    return int(os.environ.get(SHARERS, "1"))


def see_room(trainable: Trainable, initial: Mapping[str, Scalar], memory: DeviceMemory | None = None) -> None:
    """Train a step and measure its memory, if several workers share the device, or several models are trained as one.

    Args:
        memory: memory of the device; by default that of the GPU. Without a GPU, nothing is trained.

    Raises:
        UsageError: the device has no memory for that many workers. The message gives the number that fits.
    """
    workers = sharers()
    if workers == 1 and slots_in(trainable) == 1:
        return
    if memory is None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return
        memory = DeviceMemory()
    memory.reset_peak()
    free = memory.free_bytes()
    fits = True
    try:
        _train_a_step(trainable, initial)
    except UsageError:
        raise  # a misuse that training cannot fix
    except Exception as error:
        fits = not is_out_of_memory(error)  # training will report any other error
        logger.debug("the step that measures memory has failed", exc_info=True)
    taken = memory.taken_bytes()
    if fits and workers * taken <= free:
        return
    fitting = free // taken if fits else 0
    slots = slots_in(trainable)
    raise UsageError(
        f"{count_of(workers, 'worker')} on a GPU with {size(free)} free, but each"
        f"{f', training {slots} models together,' if slots > 1 else ''} needs {size(taken)}"
        f"{'' if fits else ' and more'} to train a step: "
        f"{f'at most {fitting} fit' if fitting else 'not even one fits'}. Give fewer workers per GPU"
        f"{', or a smaller max_stacked' if slots > 1 else ', or smaller batches'}"
    )


def _train_a_step(trainable: Trainable, initial: Mapping[str, Scalar]) -> None:
    members = trainable.members() if is_bundling(trainable) else [trainable]
    for member in members:
        member.setup(initial)
    if is_bundling(trainable):
        trainable.train_together(dict.fromkeys(range(len(members)), (0, initial)))
    for member in members:
        member.train(0, initial)
        member.evaluate()
