"""Checks whether the first steps of trials learn anything, and for how many steps the user's code is configured."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpstage.execution.flight import Flight
from hpstage.plan.messages import Noticed
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable

logger = logging.getLogger("hpstage")

_RATE = re.compile(r"(^|_)lr(_|$)|learning_rate")
_LEAST, _MOST = 4, 32
"""Step after which learning is judged, and step up to which learning rates are checked, since a warm-up may start at
0."""
_UNSTEPPED = 128
"""After this many training steps without an optimizer step, gradient accumulation is ruled out as the cause."""
_SAMPLE = 4096
"""Number of elements of each weight that are compared one by one."""
_CHAINS = 4
"""Number of trials whose weights are compared, which costs a pass over the weights in each."""

RATES = (
    "every learning rate is 0 or NaN from the first step on, so that nothing is learned. Check the optimizer's "
    "learning rate, and the number of steps given to its scheduler (is it infinite or -1?)"
)
STEPPED = (
    "no weight has changed from the first step on, though the optimizer takes steps. Check its learning rate, whether "
    "its weights get gradients from the loss, and whether the weights are clipped"
)
UNSTEPPED = (
    "no weight has changed from the first step on: no optimizer has taken a step. Call step() of the "
    "optimizer that has this model's parameters. If gradients are accumulated over even more steps, ignore this"
)
STILL = (
    "training changes nothing: the state is the same some steps later, bit for bit. Make state_dict() return what "
    "train() changes"
)


class FirstSteps:
    """Observes the first steps of a worker's trials. It compares sums over the bits of weights after the first step and
    at a boundary. It copies only a small sample of each weight, and waits for the device once per comparison."""

    def __init__(self, trainable: Trainable, *, bundled: bool) -> None:
        self._trainable = trainable
        # Stacked chains of a bundle are not trained in the members' own weights.
        self._optimizers: Callable[[], list[Any]] | None = None if bundled else getattr(trainable, "optimizers", None)
        self._left = _CHAINS
        self._noticed: list[Noticed] = []
        self._known: set[object] = set()
        self._flight: Flight | None = None
        self._rates_are_zero = False
        self._weights: _Weights | None = None

    def see(self, flight: Flight, hp: Mapping[str, Scalar]) -> None:
        """Observe the result of the step before ``flight.step``, which was trained under ``hp``."""
        if flight.step > _MOST or flight.chain.source is not None or self._optimizers is None:
            return
        with self._looking():
            self._see(flight, hp)

    def _see(self, flight: Flight, hp: Mapping[str, Scalar]) -> None:
        assert self._optimizers is not None
        if flight.step == 1:
            self._flight, self._rates_are_zero, self._weights = flight, True, None
            if self._left:
                self._left -= 1
                self._weights = _Weights(self._optimizers())
        elif flight.step == 2 and self._weights is not None and self._weights.differ(_Weights(self._optimizers())):
            self._weights = None  # they do change; later they might have these values again
        if is_still_by_intent(hp):
            self._flight = None
        elif self._flight is flight and self._rates_are_zero and self._see_rates():
            self._notice(RATES)  # a NaN rate stays NaN, and training may end in the next step

    def take(self, flight: Flight) -> tuple[Noticed, ...]:
        """Judge the steps before a boundary. Return what was noticed since the last call."""
        horizon = getattr(self._trainable, "horizon", None)
        if horizon is not None and horizon not in self._known:
            self._known.add(horizon)
            self._noticed.append(Noticed(str(horizon), horizon.steps, horizon.sizes))
        if self._flight is flight and flight.step >= _LEAST:
            with self._looking():
                self._judge(flight)
        noticed, self._noticed = tuple(self._noticed), []
        return noticed

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Stop observing after an error: tensors may have no values, as on the meta device, or a rate may be no
        number."""
        try:
            yield
        except Exception:
            logger.debug("the first steps of trials are not observed any more", exc_info=True)
            self._flight = self._optimizers = None

    def _see_rates(self) -> bool:
        """Check whether learning rates are 0 or NaN. Return whether all are NaN."""
        assert self._optimizers is not None
        found = [group.get("lr") for one in self._optimizers() for group in one.param_groups]
        rates = [math.inf if rate is None else float(rate) for rate in found]  # some optimizers choose their own
        self._rates_are_zero = bool(rates) and all(rate == 0 or math.isnan(rate) for rate in rates)
        return self._rates_are_zero and all(map(math.isnan, rates))

    def _judge(self, flight: Flight) -> None:
        """Decide whether anything was learned. Postpone this during a warm-up at 0, or while gradients may
        accumulate."""
        assert self._optimizers is not None
        step = flight.step
        if self._rates_are_zero:
            self._see_rates()  # a warm-up may raise the rate only after an epoch
        text = ""
        if self._rates_are_zero:
            chain = flight.chain
            if step < min(_MOST, chain.stages[-1].stop if chain.end is None else chain.end.step):
                return
            text = RATES
        elif self._weights is not None and self._weights.sums:
            now = _Weights(self._optimizers())
            if not self._weights.differ(now):
                if now.versions == self._weights.versions and step < _UNSTEPPED:
                    return
                text = UNSTEPPED if now.versions == self._weights.versions else STEPPED
        self._flight = None
        self._notice(text)

    def _notice(self, text: str) -> None:
        if text and text not in self._known:
            self._known.add(text)
            self._noticed.append(Noticed(text))


def is_still_by_intent(hp: Mapping[str, Scalar]) -> bool:
    """Whether a hyperparameter of the trial sets a learning rate to 0 at this step, so that weights stay the same."""
    return any(value == 0 and _RATE.search(name) is not None for name, value in hp.items())


class _Weights:
    """The comparable properties of the weights that optimizers train: their versions, sums over their bits, and a
    sample of each, since permuted weights have the same sum."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        torch: Any = sys.modules.get("torch")  # not loaded if there is no optimizer
        trained = [
            weight.detach()
            for one in optimizers
            for group in one.param_groups
            for weight in group["params"]
            if weight.requires_grad and weight.is_floating_point() and weight.layout is torch.strided
        ]
        self.versions = [weight._version for weight in trained]
        sums = [_sum(torch, weight) for weight in trained]
        self.samples = [_bits(torch, weight).flatten()[:_SAMPLE].clone() for weight in trained]
        self.sums = [int(value) for value in sums]  # after all are queued, so that the device is waited for once

    def differ(self, other: _Weights) -> bool:
        """Whether the values of any weight have changed."""
        if self.sums != other.sums:
            return True
        return not all(bool((a == b).all()) for a, b in zip(self.samples, other.samples, strict=True))


def _sum(torch: Any, weight: Any) -> Any:
    """Return the sum of the bits of a tensor. All but the last few elements are summed as 8-byte integers, since torch
    would copy shorter integers to 8 bytes each before it adds them."""
    if not weight.is_contiguous():
        return _bits(torch, weight).sum(dtype=torch.int64)
    flat = weight.view(-1)
    whole = weight.numel() - weight.numel() % (8 // weight.element_size())
    return _bits(torch, flat[:whole]).sum(dtype=torch.int64) + _bits(torch, flat[whole:]).sum(dtype=torch.int64)


def _bits(torch: Any, weight: Any) -> Any:
    """Return the bits of a tensor as integers, of 8 bytes if possible, which are summed ten times as fast."""
    size = weight.element_size()
    if weight.is_contiguous() and all(count * size % 8 == 0 for count in (weight.numel(), weight.storage_offset())):
        return weight.view(-1).view(torch.int64)
    return weight.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
