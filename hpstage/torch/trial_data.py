"""TrialData: the data on which the trials of a TorchTrainable are trained."""

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
    """The data set, made once for all trials, and the data that a trial prepares for itself (the Trainer of a
    TrainerTrainable may tokenize them).

    Args:
        user: the object with ``dataset()``.
        device: the device that batches are moved to.
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
        """The data set, which training may change; ``None`` before it is made, and for a stream, which reports its
        position itself."""
        return self._given.dataset if isinstance(self._given, Batches) else None

    @property
    def collate(self) -> Any:
        """What makes a batch from samples, which training may change; ``None`` before the data set is made."""
        return self._given.samples.collate if isinstance(self._given, Batches) else None

    @property
    def is_made(self) -> bool:
        return self._given is not None

    def given(self) -> Batches | StreamBatches:
        """Return the batches of the data set, which the first call makes."""
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
        """Use the data set of another TrialData of the same object."""
        self._given, self._made = other.given(), other._made

    def of_trial(self, built: object) -> Batches | StreamBatches:
        """Return the batches to train on: those that the present trial has prepared, or else those of the data set.

        ``built``: the model and optimizer of the trial. For each new one, the trial prepares its data again.
        """
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
        """End the processes that load, and forget the data that a trial has prepared."""
        for batches in (self._given, self._prepared):
            if batches is not None:
                batches.close()
        self._prepared = self._prepared_with = None

    def contents(self, undone: Undone) -> Contents:
        """Return the identity of the data: of the data set and of attributes that ``dataset()`` has set. ``undone``:
        see :func:`hpstage.torch.contents.undone_in`."""
        if self._contents is None:
            data = self.given()
            with self._without_values("the data set", "set data_version, since its samples need hyperparameters"):
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
    """Disallow access to hyperparameters in a process that loads ahead: its values would be those of the step in which
    it was started."""
    why = "processes that load data know no values; read them in loss() or update(), or load with num_workers = 0"
    set_hp(user, NoValues(f"{type(user).__name__}'s data set or collate()", why))


def set_hp(user: TorchTrainable, values: Any) -> None:
    object.__setattr__(user, "hp", values)  # a frozen dataclass, too, is trained under changing values
