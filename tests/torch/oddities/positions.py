"""Objects that have a position: counts, generators, locks, loaders; tables and estimators of other libraries."""

from __future__ import annotations

import collections
import io
import itertools
import logging
import sys
import threading
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import SGDClassifier
from sklearn.tree import DecisionTreeClassifier
from torch import nn
from torch.utils.data import DataLoader

from tests.torch.oddities.oddity import Odd, odd

# --- objects that have a position


@odd("a count", itertools.count, refused=r"self\.kept is a itertools\.count that has moved on")
def _(kept: Any, self: Odd) -> float:
    return next(kept)


@odd(
    "a dict that numbers its keys by a count",
    lambda: collections.defaultdict(itertools.count().__next__),
    refused=r"self\.kept\.default_factory.* has moved on .*by its length: `d\.default_factory = d\.__len__`",
)
def _(kept: Any, self: Odd) -> float:
    return kept[self.steps % 4]


def numbering() -> Any:
    kept: collections.defaultdict[int, int] = collections.defaultdict()
    kept.default_factory = kept.__len__
    return kept


@odd("a dict that numbers its keys by its length", numbering)
def _(kept: Any, self: Odd) -> float:
    return kept[self.steps * 5 % 7]


@odd("a generator", lambda: (n for n in range(99)), refused=r"self\.kept is a generator that has moved on")
def _(kept: Any, self: Odd) -> float:
    return next(kept)


@odd("iterators that never move", lambda: [iter({1, 2, 3}), iter({1: [1]}.items()), iter({2: 3}), iter([[1]])])
def _(kept: Any, self: Odd) -> float:
    self.first = kept[0]
    return self.steps


@odd("what an iterator of a dict gives", lambda: [values := [0], iter({1: values}.values())])
def _(kept: Any, self: Odd) -> float:
    kept[0][0] += 1
    return kept[1].__reduce__()[1][0][0][0]


@odd("an iterator of a set", lambda: iter({*range(99)}), refused=r"self\.kept is a set_iterator that has moved on")
def _(kept: Any, self: Odd) -> float:
    return next(kept)


@odd(
    "an iterator of a dict",
    lambda: iter({n: n for n in range(99)}.items()),
    refused=r"dict_itemiterator that has moved",
)
def _(kept: Any, self: Odd) -> float:
    return next(kept)[1]


@odd("an iterator of a list that moves", lambda: iter([*range(99)]), refused=r"self\.kept is a list_iterator that has")
def _(kept: Any, self: Odd) -> float:
    return next(kept)


@odd("a file in memory", lambda: io.StringIO("0"), refused=r"self\.kept is a _io\.StringIO that has been read or wri")
def _(kept: Any, self: Odd) -> float:
    kept.seek(0)
    kept.write(str(self.steps % 10))
    kept.seek(0)
    return int(kept.getvalue())


@odd("a lock that is held", threading.Lock, refused=r"self\.kept is a _thread\.lock that has changed")
def _(kept: Any, self: Odd) -> float:
    return kept.acquire(blocking=False)


@odd("locks, loggers and counters of one owner", lambda: Owner())
def _(kept: Any, self: Odd) -> float:
    with kept.lock:
        kept.log.debug("a step")
        kept.n += 1
    return kept.n


class Owner:
    def __init__(self) -> None:
        self.lock, self.event, self.log = threading.RLock(), threading.Event(), logging.getLogger("hpstage.tests")
        self.function, self.kind, self.module = nn.functional.relu, nn.Linear, sys
        self.n = 0


@odd("a DataLoader", lambda: DataLoader(torch.arange(8.0), batch_size=2, shuffle=True))
def _(kept: Any, self: Odd) -> float:
    return sum(float(batch.sum()) * index for index, batch in enumerate(kept))


@odd("an iterator of a DataLoader", lambda: iter(DataLoader(torch.arange(50.0))), refused=r"self\.kept\._")
def _(kept: Any, self: Odd) -> float:
    return float(next(kept))


# --- other libraries


@odd("a table that is read", lambda: pd.DataFrame({"a": [0.0, 1.0]}))
def _(kept: Any, self: Odd) -> float:
    return float(kept["a"].sum())


@odd("a column with names that is read", lambda: pd.Series([0.0, 1.0], index=pd.Index(["a", "b"], name="n")))
def _(kept: Any, self: Odd) -> float:
    return float(kept.iloc[1] + kept.mean())


@odd("a table that is written to", lambda: pd.DataFrame({"a": [0.0, 1.0]}), refused=r"self\.kept\._mgr ")
def _(kept: Any, self: Odd) -> float:
    kept.loc[0, "a"] += 1
    return float(kept["a"].sum())


@odd("an estimator that is used", lambda: DecisionTreeClassifier(random_state=0).fit(np.eye(3), [0, 1, 2]))
def _(kept: Any, self: Odd) -> float:
    return float(kept.predict(np.eye(3)).sum())


@odd("an estimator that is trained", lambda: SGDClassifier(random_state=0), refused=r"self\.kept\._")
def _(kept: Any, self: Odd) -> float:
    kept.partial_fit(np.eye(3), [0, 1, 2], classes=[0, 1, 2])
    return float(kept.coef_.sum()) / 1000
