"""scripts/gpu_check.py at its smallest size, so that the first run on a GPU meets no error of the script's own. Parts
that start processes are left out: they would not have the fake device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch.test_gpu_check import flags, script

__all__ = ["script"]


@pytest.mark.parametrize("part", ["forks", "costs", "steps", "fused"])
def test_each_check_of_the_gpu_script_runs_without_error(part: str, script: Any) -> None:
    found = script.check(torch.device("cuda"), script.SMALL, (part,))
    assert "error" not in found["parts"][part], found["parts"][part]["traceback"]
    assert all(flags(found["parts"][part]["found"]))
