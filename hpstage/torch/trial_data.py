"""TrialData: what the trials of a TorchTrainable train on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hpstage.torch.contents import Contents, NoValues, Undone, contents_of
from hpstage.torch.data import Batches, batches_of
from hpstage.torch.loading.streams import StreamBatches
from hpstage.torch.loading.taken_over import Workers
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.adapter import stateless_of
from hpstage.training.identity.values import NOT_STATE
from hpstage.training.randomness import Purpose, rekey


class TrialData:
    """The data set, made once for all trials, and what a trial prepares of its own (Lightning's, by its model).

    Args:
        user: whose ``dataset()`` it is.
    """

    def __init__(self, user: TorchTrainable, device: torch.device) -> None:
        self._user, self._device = user, device
        self._given: Batches | StreamBatches | None = None
        self._made: dict[str, object] = {}  # attributes that dataset() has set
        self._prepared: Any = None  # batches that the present trial has prepared
        self._prepared_with: object = None
        self._contents: Contents | None = None

    @property
    def dataset(self) -> Any:
        """The data set, which training may change; None before it is made, and of a stream, which keeps its position
        itself."""
        return self._given.dataset if isinstance(self._given, Batches) else None

    @property
    def is_made(self) -> bool:
        return self._given is not None

    def given(self) -> Batches | StreamBatches:
        """Return the batches of the data set; it is made with the first call."""
        if self._given is None:
            user = self._user
            before = dict(vars(user))
            rekey(0, 0, Purpose.DATA)
            with self._without_values(
                f"{type(user).__name__}.dataset()",
                "the data set is made once, for all trials; read hyperparameters in collate(), loss() or model()",
            ):
                dataset = user.dataset()
            self._made = {
                name: value
                for name, value in vars(user).items()
                if name not in NOT_STATE and (name not in before or value is not before[name])
            }
            self._given = self._batches_of(dataset)
        return self._given

    def take_over(self, other: TrialData) -> None:
        """Use the data set of another one, of the same object of the user's."""
        self._given, self._made = other.given(), other._made

    def of_trial(self, built: object) -> Batches | StreamBatches:
        """Return the batches to train on: those that the trial has prepared, once for each that is ``built``, or those
        of the data set."""
        given = self.given()
        if self._prepared_with is not built:
            if self._prepared is not None:
                self._prepared.close()
            prepared = self._user._prepared_data()
            batches = prepared is None or hasattr(prepared, "of_step")
            self._prepared = prepared if batches else self._batches_of(prepared)
            self._prepared_with = built
        return given if self._prepared is None else self._prepared

    def end_trial(self) -> None:
        self._prepared_with = None

    def close(self) -> None:
        """End the processes that load; what a trial has prepared is forgotten."""
        for batches in (self._given, self._prepared):
            if batches is not None:
                batches.close()
        self._prepared = self._prepared_with = None

    def contents(self, undone: Undone) -> Contents:
        """Return what can be seen of the data, in the data set and in attributes that ``dataset()`` has set; what that
        changes is ``undone``."""
        if self._contents is None:
            data = self.given()
            with self._without_values("the data set", "set data_version, since it cannot be looked at without"):
                self._contents = contents_of(data, self._made, owner=self._user, undone=undone)
        return self._contents

    def _batches_of(self, dataset: Any) -> Batches | StreamBatches:
        user = self._user
        own = type(user).collate is not TorchTrainable.collate
        workers = Workers(
            *(user.num_workers, user.prefetch_factor, user.pin_memory),
            prepare=partial(_without_hp, user),
            owner=user,
            stateless=stateless_of(user),
        )
        who, by_epoch = f"{type(user).__name__}.dataset()", user.step_unit == "epoch"
        return batches_of(dataset, user.collate if own else None, self._device, workers, by_epoch=by_epoch, who=who)

    @contextmanager
    def _without_values(self, who: str, why: str) -> Iterator[None]:
        """Disallow access to hyperparameters by user code that must not depend on them."""
        before = self._user.hp
        set_hp(self._user, NoValues(who, why))
        try:
            yield
        finally:
            set_hp(self._user, before)


def _without_hp(user: TorchTrainable) -> None:
    """Disallow access to hyperparameters in a process that loads ahead: there they are of the step it started in."""
    why = "processes that load data know no values; read them in loss() or update(), or load with num_workers = 0"
    set_hp(user, NoValues(f"{type(user).__name__}'s data set or collate()", why))


def set_hp(user: TorchTrainable, values: Any) -> None:
    object.__setattr__(user, "hp", values)  # a frozen dataclass, too, is trained under changing values
