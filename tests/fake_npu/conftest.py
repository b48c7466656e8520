"""Leaves out these tests where the fake device is not loaded, for the whole process."""

from __future__ import annotations

import os

if "HPSTAGE_FAKE_NPU" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
