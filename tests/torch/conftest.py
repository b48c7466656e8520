"""One thread, as on a worker: the number of threads changes bits. What a test sets for the process ends with it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hpstage.torch.environment import pin
from hpstage.training.code import patches
from tests.conftest import TRAINING
from tests.in_place import _forks_are_verified_in_place as _forks_are_verified_in_place

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
pin()
assert torch.get_num_threads() == 1


@pytest.fixture(scope="package", autouse=True)
def _libraries_are_looked_through() -> Iterator[None]:
    passed_by = patches._WITHOUT_TRAINING
    patches._WITHOUT_TRAINING -= {*TRAINING.split()}
    yield
    patches._WITHOUT_TRAINING = passed_by


@pytest.fixture
def reruns_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can be forked, whatever other tests have imported, such as JAX: it is not used here. Nor does it
    matter how loaded the machine is, and how much of its memory is in use."""
    monkeypatch.setattr("hpstage.execution.untrained.obstacle", lambda trainable: "")
    monkeypatch.setattr("hpstage.execution.rerun_queue.RerunQueue.has_room", lambda self: True)
    monkeypatch.setattr("hpstage.execution.rerun._PATIENCE", 300.0)  # a search would end before


@pytest.fixture(autouse=True)
def _settings_end_with_their_test() -> Iterator[None]:
    dtype, errors = torch.get_default_dtype(), np.geterr()
    yield
    torch.set_default_dtype(dtype)
    np.seterr(**errors)
