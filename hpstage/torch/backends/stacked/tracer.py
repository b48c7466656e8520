"""Traces of one trainable's steps, each made once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpstage.schedule import Scalar
from hpstage.torch.backends.stacked.one_step import OneStep
from hpstage.torch.backends.stacked.refusal import NeedsPython
from hpstage.torch.backends.stacked.signature import Signature, shape_key
from hpstage.torch.backends.stacked.stand_ins import StandInValues
from hpstage.torch.backends.stacked.tracing import Effects, Trace, trace
from hpstage.torch.trainable import TorchTrainable


class Tracer:
    """Traces steps of ``subject``, and gives the same trace again where it would be equal.

    Args:
        subject: whose ``update()`` is traced.
        effects: watches what a step could change besides tensors, to refuse those that do.
    """

    def __init__(self, subject: TorchTrainable, effects: Effects | None = None) -> None:
        self.subject = subject
        self._effects = effects
        self._traces: dict[object, list[tuple[StandInValues, Trace | str, Signature]]] = {}
        """What steps have read, with their trace or the reason why there is none, which takes as long to determine."""
        self.traced = 0
        """Number of traces made."""

    def trace(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, hp: Mapping[str, Scalar]) -> Trace:
        """Return the trace of a step. Raises :class:`NotStackable`."""
        signature = Signature(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = tuple(tuple(names.get(id(p)) for p in group["params"]) for group in optimizer.param_groups)
        floats = frozenset(name for name, value in hp.items() if type(value) is float)
        key = (signature.text, groups, floats, shape_key(batch))
        known = self._traces.setdefault(key, [])
        for read, found, _ in known:
            if read.fits(hp):
                if isinstance(found, str):
                    raise NeedsPython(found)
                found.check_constants()
                return found
        one = OneStep(self.subject, model, optimizer, batch, hp)
        try:
            made = trace(one, self._effects)
        except NeedsPython as error:
            known.append((one.read, str(error), signature))
            raise
        self.traced += 1
        # Two models with objects of their own may still take the same step: then there is one trace of both.
        all_known = (other for others in self._traces.values() for _, other, _ in others)
        same = next((other for other in all_known if isinstance(other, Trace) and made.same(other)), made)
        known.append((one.read, same, signature))
        return same
