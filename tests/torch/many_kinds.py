"""Objects of many kinds, and a step that changes them all and makes more."""

from __future__ import annotations

import array
import collections
import decimal
import functools
import operator
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.torch.oddities.ordinary import Logged, Path


class Trained:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.names: dict[Any, Any] = {"a": 1}
        self.queue: Any = collections.deque([1, 2], maxlen=3)
        self.members = {1, 2}
        self.raw = bytearray(b"ab")
        self.numbers = array.array("d", [1.0])
        self.values = np.zeros(3)
        self.objects = np.array([None, [1]], dtype=object)
        self.noise = np.random.default_rng(3)
        self.new: dict[str, Any] = {}

    def step(self) -> None:
        self.model[0] = nn.Linear(2, 1, bias=False)
        self.model[1].eval()
        self.names[("b", 1.5)] = self.names
        self.queue.append([3])
        self.members.add(7)
        self.raw += b"c"
        self.numbers[0] = 2
        self.values += 1
        self.objects[0] = self.queue
        self.noise.random()
        logged = Logged()
        logged["a"] = 1
        base = torch.arange(4.0)
        made = np.empty(2, dtype=object)
        made[:] = ["a", None]
        self.new |= {
            "tensor": torch.ones(2),
            "views": [base, base[1:]],
            "parameter": nn.Parameter(torch.ones(1)),
            "array": np.array(["a", "bc"]),
            "views of arrays": [self.values[:2], self.values[::2]],
            "objects": made,
            "containers": [
                {1, 2},
                frozenset("a"),
                bytearray(b"a"),
                collections.OrderedDict(a=1),
                collections.Counter("a"),
            ],
            "default": collections.defaultdict(list, {"a": []}),
            "instances": [logged, Path([1.0]), nn.ReLU()],
            "functions": [
                max,
                np.add,
                np.mean,
                functools.partial(operator.mul, 2),
                self.names.get,
                operator.itemgetter(1),
            ],
            "plain": [1j, range(3), slice(1), decimal.Decimal("1.5"), 2**70, np.float32(1), np.str_("a"), list[int]],
            "torch": [torch.float32, torch.device("cpu"), torch.Size([1]), torch.strided, torch.finfo(torch.half)],
            "generators": [random.Random(1), torch.Generator(), np.random.default_rng(1)],
        }
