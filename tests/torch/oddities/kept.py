"""What libraries give and training keeps: named tuples, distributions, sparse matrices, functions and classes."""

from __future__ import annotations

import argparse
import collections
import operator
import re
import struct
import time
from typing import Any

import networkx
import numpy as np
import scipy.sparse
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.torch.oddities.oddity import Odd, odd

# --- tuples with named fields


@odd("a tuple with names that torch returns")
def _(kept: Any, self: Odd) -> float:
    before = 0.0 if kept is None else float(kept.values.sum() + kept.indices.sum())
    self.kept = (torch.arange(6.0).reshape(2, 3) * (self.steps % 2 - 0.5)).max(1)
    return before


@odd("several of them, in a list and by methods", lambda: [torch.eye(2).min(0)])
def _(kept: Any, self: Odd) -> float:
    kept[0].values.add_(1.0)
    kept.append(torch.linalg.slogdet(torch.eye(2) * self.steps))
    return float(kept[0].values.sum() + kept[-1].logabsdet)


@odd("a point in time, by its fields", lambda: time.gmtime(0))
def _(kept: Any, self: Odd) -> float:
    self.kept = time.struct_time((*kept[:5], kept.tm_sec + 1, *kept[6:], "ODD", kept.tm_gmtoff + 1))
    return float(kept.tm_sec + kept.tm_gmtoff + len(kept.tm_zone))


@odd("fields that are no items of a tuple", lambda: time.gmtime(0))
def _(kept: Any, self: Odd) -> float:
    self.kept = time.struct_time((*kept, "ODD", kept.tm_gmtoff + 1))
    return float(kept.tm_gmtoff)


@odd("a packed sequence")
def _(kept: Any, self: Odd) -> float:
    before = 0.0 if kept is None else float(kept.data.sum())
    self.kept = nn.utils.rnn.pack_sequence([torch.ones(3) * self.steps, torch.ones(2)])
    return before


# --- objects that are defined by their attributes


@odd("a distribution")
def _(kept: Any, self: Odd) -> float:
    before = 0.0 if kept is None else float(kept.log_prob(torch.zeros(2)).sum())
    self.kept = torch.distributions.Normal(torch.ones(2) * self.steps, 2.0)
    return before


@odd("distributions of distributions, which are sampled")
def _(kept: Any, self: Odd) -> float:
    before = 0.0 if kept is None else float(sum(one.sample().sum() for one in kept))
    means = torch.ones(2) * self.steps / 10
    normal = torch.distributions.Independent(torch.distributions.Normal(means, 1.0), 1)
    self.kept = [
        torch.distributions.Categorical(logits=means),
        torch.distributions.MultivariateNormal(means, torch.eye(2)),
        torch.distributions.TransformedDistribution(normal, [torch.distributions.TanhTransform(cache_size=1)]),
        torch.distributions.LogNormal(means, 0.1),
    ]
    return before


@odd("an attribute of a distribution that training makes")
def _(kept: Any, self: Odd) -> float:
    self.kept = torch.distributions.Normal(0.0, 1.0)
    self.kept.used = getattr(kept, "used", 0) + 1  # type: ignore[attr-defined]
    return float(self.kept.used)


class Shifted(torch.distributions.Normal):
    drawn = 0

    def sample(self, *args: Any) -> torch.Tensor:
        type(self).drawn += 1
        return super().sample(*args) + type(self).drawn


@odd("the user's own kind of a distribution, which counts", lambda: Shifted(0.0, 1.0))
def _(kept: Any, self: Odd) -> float:
    self.kept = Shifted(kept.loc + 1, 1.0)
    return float(kept.sample())


@odd("sparse matrices of SciPy's", lambda: [scipy.sparse.csr_matrix(np.eye(3))])
def _(kept: Any, self: Odd) -> float:
    kept[0].data += 1
    kept.append(scipy.sparse.coo_array(np.eye(3)[: 1 + self.steps % 2]).tolil())
    kept.append((kept[-1].tocsc() * self.steps).astype(np.float32))
    return float(sum(one.sum() for one in kept))


@odd("a handle of a hook that was removed")
def _(kept: Any, self: Odd) -> float:
    handles = [self.net.register_forward_hook(lambda *_: None) for _ in range(2)]
    handles[0].remove()
    if kept is not None:
        kept.remove()  # once more: no other hook may have its number
    count = len(self.net._forward_hooks)
    handles[1].remove()
    self.kept = handles[0]
    return float(count + self.kept.id)


# --- functions and classes, by their names


class Tool:
    made = 0

    @classmethod
    def another(cls) -> int:
        cls.made += 1
        return cls.made

    @staticmethod
    def doubled(x: float) -> float:
        return x * 2

    def method(self) -> float:
        return 3.0


@odd("functions of Python's own")
def _(kept: Any, self: Odd) -> float:
    self.kept = [max, operator.mul, divmod][self.steps % 3]
    return 0.0 if kept is None else float(np.sum(kept(3, 4)))


@odd("classes of libraries")
def _(kept: Any, self: Odd) -> float:
    self.kept = [nn.ReLU, nn.Tanh, nn.Identity, collections.Counter, np.float32, torch.distributions.Normal][
        self.steps % 6
    ]
    return 0.0 if kept is None else float(len(kept.__name__) + hasattr(kept, "forward"))


@odd("class methods and functions of classes")
def _(kept: Any, self: Odd) -> float:
    self.kept = [Tool.another, Tool.doubled, Tool.method, dict.fromkeys, nn.Embedding.from_pretrained, str.upper][
        self.steps % 6
    ]
    return float(Tool.another() + Tool().method()) if kept is None else float(len(kept.__name__))


@odd("methods in C of what training keeps", lambda: [0.0])
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.append, self.add = kept.append, torch.zeros(2).add_
    if self.steps < 2:
        return 0.0
    self.append(1.0)
    return float(len(kept) + self.add(1.0).sum())


@odd("a method in C of an operator", lambda: {0: 1})
def _(kept: Any, self: Odd) -> float:
    self.has = kept.__contains__
    kept[self.steps] = 1
    return float(self.has(2))


@odd("the class of None")
def _(kept: Any, self: Odd) -> float:
    self.kept = type(None)
    return float(isinstance(kept, type))


@odd("forms of memory")
def _(kept: Any, self: Odd) -> float:
    self.kept = [torch.channels_last, torch.contiguous_format, torch.strided][self.steps % 3]
    return float(len(str(kept)))


@odd("descriptions of data and of texts")
def _(kept: Any, self: Odd) -> float:
    count = 0 if kept is None else len(kept)
    self.kept = [np.dtype("f4"), np.dtype([("a", "i2"), ("b", "f8", 3)]), re.compile("a+", re.I), struct.Struct("<d")]
    return float(count + self.kept[0].itemsize)


@odd("a dtype whose description says less than it is", refused=r"self\.kept holds a numpy\.dtypes\.VoidDType")
def _(kept: Any, self: Odd) -> float:
    self.kept = np.dtype([("a", "i1"), ("b", "f8")], align=True, metadata={"a": 1})
    return 0.0


@odd("a dtype of fields with metadata", refused=r"self\.kept holds a numpy\.dtypes\.VoidDType")
def _(kept: Any, self: Odd) -> float:
    self.kept = np.dtype([("a", np.dtype("i4", metadata={"a": 1}))])
    return 0.0


OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]})


@odd("a dtype whose fields overlap", refused=r"self\.kept holds a numpy\.dtypes\.VoidDType")
def _(kept: Any, self: Odd) -> float:
    self.kept = OVERLAPPING
    return 0.0


@odd("an array of fields that overlap", refused=r"self\.kept is a numpy\.ndarray \(.*'offsets'")
def _(kept: Any, self: Odd) -> float:
    self.kept = np.zeros(2, OVERLAPPING)
    return 0.0


@odd("an operator that changes an argument", refused=r"self\.kept holds a builtin_function_or_method that training")
def _(kept: Any, self: Odd) -> float:
    self.kept = operator.iadd
    return 0.0


@odd("the format of a text", refused=r"self\.kept holds a builtin_function_or_method that training has made")
def _(kept: Any, self: Odd) -> float:
    self.kept = "{:.3f}".format
    return 0.0


@odd("a function that opens files", refused=r"self\.kept holds a builtin_function_or_method that training has made")
def _(kept: Any, self: Odd) -> float:
    self.kept = open
    return 0.0


def part_of(data: TensorDataset, count: int) -> Subset[Any]:
    return Subset(data, range(count))


@odd("a part of the data that training chooses again", lambda: part_of(TensorDataset(torch.arange(9.0)), 1))
def _(kept: Any, self: Odd) -> float:
    self.kept = part_of(kept.dataset, self.steps + 1)
    return sum(float(x) for (x,) in self.kept)


@odd("a loader that training makes again", lambda: DataLoader(part_of(TensorDataset(torch.arange(9.0)), 2)))
def _(kept: Any, self: Odd) -> float:
    if self.steps % 2:
        self.kept = DataLoader(part_of(kept.dataset.dataset, self.steps + 1), batch_size=2, shuffle=True)
    return sum(float(x[0]) * (index + 1) for index, (x,) in enumerate(self.kept))


@odd("arguments that training makes again", lambda: argparse.Namespace(rate=1.0, widths=[1]))
def _(kept: Any, self: Odd) -> float:
    self.kept = argparse.Namespace(**{**vars(kept), "rate": kept.rate * 0.9})
    self.kept.widths.append(1)
    return self.kept.rate + len(self.kept.widths)


@odd("a chain of dicts that training makes longer", lambda: collections.ChainMap({"rate": 1.0}))
def _(kept: Any, self: Odd) -> float:
    self.kept = kept.new_child({"rate": kept["rate"] * 0.9})
    return self.kept["rate"] + len(self.kept.maps)


@odd("views that a graph makes where they are first used", lambda: networkx.path_graph(4))
def _(kept: Any, self: Odd) -> float:
    kept.add_edge(self.steps, self.steps + 4)
    for node in kept.nodes:
        kept.nodes[node]["weight"] = kept.nodes[node].get("weight", 0.0) + node
    return sum(kept.nodes[node]["weight"] * degree for node, degree in kept.degree)
