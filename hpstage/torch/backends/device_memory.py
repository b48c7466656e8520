"""The reaction of a process's slots to a device without enough memory for a step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpstage.checkpoints.on_device import is_out_of_memory
from hpstage.errors import DeviceFull

logger = logging.getLogger("hpstage")


class DeviceMemory:
    """Memory of the device on which several models are trained. The first time that it runs out, states that are kept
    there leave it; then half as many models are trained as one, each time. A step of one that finds none has failed.

    Args:
        who: the trainable's class, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._ran_out = False
        self.most = sys.maxsize
        """Maximum number of models that are stacked."""

    @contextmanager
    def tried(self, outcomes: Sequence[list[Exception | None]]) -> Iterator[None]:
        """Try a step of several slots. What finds no memory is tried again, if there is more then.

        Args:
            outcomes: of each slot, the last one that of this step; a slot without has the error that ends it.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for of in outcomes:
                if not of:
                    of.append(error)
        short = [of for of in outcomes if is_out_of_memory(of[-1])]
        if not short or self.most == 1:
            return
        if self._ran_out:
            self.most = max(1, len(short) // 2)
            as_many = "one at a time" if self.most == 1 else f"at most {self.most} at a time"
            logger.warning("The memory of the device is short: models of %s are trained %s.", self._who, as_many)
        self._ran_out = True
        for of in short:
            of[-1] = DeviceFull(str(of[-1]))
