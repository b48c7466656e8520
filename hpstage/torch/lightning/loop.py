"""LightningLoop: trains a LightningTrainable through the Trainable port, exactly forkable at every step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from hpstage.errors import StopTraining
from hpstage.schedule import Scalar
from hpstage.torch import environment
from hpstage.torch.contents import DRAWS, Contents, contents_of, undone_in
from hpstage.torch.horizon import Horizon
from hpstage.torch.lightning.data import Data
from hpstage.torch.lightning.fit import Session, fit
from hpstage.torch.lightning.trainable import LightningTrainable
from hpstage.training.adapter import stateless_of
from hpstage.training.body import Body
from hpstage.training.capture.unwatched import world_of
from hpstage.training.function import FunctionTrainable
from hpstage.training.identity import accelerators
from hpstage.training.run import Run

_STATELESS = ("model._metric_attributes",)
"""Names of metrics by their object ids, which Lightning finds again in a fork."""


class LightningLoop(FunctionTrainable):
    """``Trainer.fit`` as a training function: paused whenever it requests the next batch, and called again for a fork.

    :mod:`hpstage.torch.lightning.progress` saves and restores Lightning's own objects; modules, optimizers, schedulers,
    callbacks and the DataModule are captured as in all training functions.
    """

    subject: LightningTrainable

    def __init__(self, subject: LightningTrainable) -> None:
        super().__init__(_not_loaded)
        self.subject = subject
        self._name = subject.name
        self._data: Data | None = None
        self._contents: Contents | None = None
        self._foreseen: frozenset[str] = frozenset()
        # The roots must not refer to self, as in FunctionTrainable. The model is first, since other roots lead to it.
        self._reached: dict[str, object] = {"module": subject.module, "callbacks": subject.callbacks}
        attached, reached = self._attached, self._reached
        self._world = world_of(
            (*_STATELESS, *stateless_of(subject)), lambda: (attached | {**reached, **attached}).items()
        )

    def announce(self, report: bool) -> None:
        """Do nothing: a state can be validated at any time."""

    def foresee(self, names: frozenset[str]) -> None:
        self._foreseen = names

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self._begun()
        session: Session = self._attached["fit"]
        session.refuse_scheduled_twice(self._foreseen)
        super().train(step, hp)
        if session.ended:
            raise StopTraining(f"{session.why()} in step {step}")

    def evaluate(self) -> Mapping[str, float]:
        body = self._begun()
        session: Session = self._attached["fit"]
        return body.in_its_thread(session.measured)

    @property
    def horizon(self) -> Horizon | None:
        """The end of training that the Trainer's arguments state, once training has begun."""
        return self._attached["fit"].horizon if self._body is not None else None

    def synchronize(self) -> None:
        accelerators.synchronize(self._device())

    def describe_data(self) -> str:
        """Return the data's part of the workload's key: the stated version, else a digest of what can be seen."""
        stated = self.subject.data_version
        return self.see_data().text if stated is None else f"version {stated}, {DRAWS}"

    def see_data(self) -> Contents:
        if self._contents is None:
            self._contents = self._seen(self._loaded())
        return self._contents

    def _seen(self, data: Data | None) -> Contents:
        if data is None:
            return Contents("of the module", f"made by each {self._name}", whole=False)
        batches = data.training
        undone = undone_in(self._world, self.subject, lambda: [("dataset", batches.dataset)])
        # Without a DataModule, no code of the user runs here.
        with nullcontext() if self.subject.datamodule is None else undone():
            validation = {"validation": data.of_validation()}
        return contents_of(batches, validation, owner=self.subject, undone=undone)

    def describe_environment(self) -> dict[str, str]:
        """Describe what decides the bits of training here (see :func:`hpstage.torch.environment.describe`)."""
        environment.warm_up()
        environment.pin()
        if self._device().type == "cuda":
            environment.use_deterministic_algorithms()
        return {**environment.describe(self._device()), "step": self.subject.step_unit}

    def _device(self) -> torch.device:
        return (
            torch.device("cpu") if self.subject.arguments.get("accelerator") == "cpu" else environment.default_device()
        )

    def _loaded(self) -> Data | None:
        if self._function is _not_loaded:
            if not self.subject.makes_data:
                self._data = Data(self.subject)
                self._reached["datamodule"] = self._data.datamodule
            self._function = partial(fit, self.subject, self._data, self._loaders)
        if self._data is not None:
            self._loaders["train"] = self._data.training  # closed with the last run
        return self._data

    def _run_to_loop(self, state: Mapping[str, Any] | None, *, measured: bool = False) -> Body:
        if (data := self._loaded()) is not None:
            data.training.settle()
        if self._device().type == "cuda":
            environment.use_deterministic_algorithms()
        return super()._run_to_loop(state, measured=measured)


def _not_loaded(run: Run) -> None:
    raise AssertionError("the data are loaded first")
