"""The clock of a host that is wrong, for a process that has this folder on its PYTHONPATH."""

import os
import time

_shift = float(os.environ["HPSTAGE_TEST_CLOCK"])
_time, _time_ns = time.time, time.time_ns

time.time = lambda: _time() + _shift
time.time_ns = lambda: _time_ns() + int(_shift * 1e9)
