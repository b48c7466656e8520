"""One thread, as on a worker: the number of threads changes bits. What a test sets for the process ends with it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hpstage.torch.environment import pin

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
pin()
assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True)
def _settings_end_with_their_test() -> Iterator[None]:
    dtype, errors = torch.get_default_dtype(), np.geterr()
    yield
    torch.set_default_dtype(dtype)
    np.seterr(**errors)
