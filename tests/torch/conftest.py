"""One thread, as on a worker: the number of threads changes bits."""

from __future__ import annotations

import torch

from hpstage.torch.environment import pin

pin()
assert torch.get_num_threads() == 1
