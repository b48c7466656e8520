"""What is put on sys, builtins, and modules and classes of libraries, before training or in it."""

# mypy: disable-error-code="attr-defined,name-defined"
from __future__ import annotations

import builtins
import collections
import ctypes
import json
import math
import sys
import types
from typing import Any

import torch
from torch import nn

from tests.torch.oddities.oddity import Odd, odd


class Box:
    def __init__(self) -> None:
        self.count = 0


sys.kept_table = {"count": 0}
builtins.KEPT_TABLE = {"count": 0}
json.kept_list = [0]
math.kept_box = Box()
nn.functional.kept_tensor = torch.zeros(1)
nn.functional.kept_counter = collections.Counter()
nn.Linear.kept_list = [0]


@odd("a number on sys")
def _(kept: Any, self: Odd) -> float:
    sys.made_count = getattr(sys, "made_count", 0) + 1
    return sys.made_count


@odd("a dict on sys, made in training")
def _(kept: Any, self: Odd) -> float:
    if not hasattr(sys, "made_table"):
        sys.made_table = {"count": 0}
    sys.made_table["count"] += 1
    return sys.made_table["count"]


@odd("a dict on sys")
def _(kept: Any, self: Odd) -> float:
    sys.kept_table["count"] += 1
    return sys.kept_table["count"]


@odd("a number on sys, through its names")
def _(kept: Any, self: Odd) -> float:
    vars(sys)["made_by_name"] = vars(sys).get("made_by_name", 0) + 1
    return sys.made_by_name


@odd("a dict among the builtins")
def _(kept: Any, self: Odd) -> float:
    KEPT_TABLE["count"] += 1  # noqa: F821
    return KEPT_TABLE["count"]  # noqa: F821


@odd("a number among the builtins")
def _(kept: Any, self: Odd) -> float:
    builtins.made_count = getattr(builtins, "made_count", 0) + 1
    return builtins.made_count


@odd("a function among the builtins, put there in training", refused=r"^builtins:\.made holds a function that training")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        builtins.made = lambda: 2.0
    return builtins.made() if self.steps > 2 else 1.0


@odd("a list on a module of Python's")
def _(kept: Any, self: Odd) -> float:
    json.kept_list[0] += 1
    return json.kept_list[0]


@odd("an object of the user's on a module written in C")
def _(kept: Any, self: Odd) -> float:
    math.kept_box.count += 1
    return math.kept_box.count


@odd("an object of the user's on a module, by its name as a string")
def _(kept: Any, self: Odd) -> float:
    getattr(math, "kept_box").count += 1  # noqa: B009
    return math.kept_box.count


@odd("a tensor on a module of torch's")
def _(kept: Any, self: Odd) -> float:
    nn.functional.kept_tensor.add_(1)
    return float(nn.functional.kept_tensor)


@odd("a Counter on a module of torch's")
def _(kept: Any, self: Odd) -> float:
    nn.functional.kept_counter["x"] += 1
    return nn.functional.kept_counter["x"]


@odd("a list on a class of torch's")
def _(kept: Any, self: Odd) -> float:
    nn.Linear.kept_list[0] += 1
    return nn.Linear.kept_list[0]


@odd("a number on a function of torch's")
def _(kept: Any, self: Odd) -> float:
    nn.functional.relu.calls = getattr(nn.functional.relu, "calls", 0) + 1
    return nn.functional.relu.calls


@odd("a module that training makes", refused=r"^sys:\.modules\['made_by_hand'\] holds a module that training has made")
def _(kept: Any, self: Odd) -> float:
    module = sys.modules.setdefault("made_by_hand", types.ModuleType("made_by_hand"))
    module.count = getattr(module, "count", 0) + 1
    return module.count


# --- pointers of ctypes


class Linked(ctypes.Structure):
    _fields_ = (("at", ctypes.POINTER(ctypes.c_int)), ("n", ctypes.c_int))


def linked() -> Linked:
    return Linked(ctypes.pointer(ctypes.c_int(0)), 0)


@odd("what a pointer points to", lambda: ctypes.pointer(ctypes.c_int(0)))
def _(kept: Any, self: Odd) -> float:
    kept.contents.value += 1
    return kept[0]


@odd("what a pointer in a structure points to", linked)
def _(kept: Any, self: Odd) -> float:
    kept.at[0] += 1
    return kept.at.contents.value


@odd("a number next to a pointer in a structure", linked, refused=r"Linked that has changed in training")
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


@odd("a number next to a pointer that is 0 in a structure", Linked)
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


@odd("another object for a pointer", lambda: ctypes.pointer(ctypes.c_int(0)), refused=r"that has changed in training")
def _(kept: Any, self: Odd) -> float:
    kept.contents = ctypes.c_int(kept[0] + 1)
    return kept[0]


def of_a_library(made: Any) -> Any:
    """A class of ctypes has the module of the code that first needed it, whosever that is."""
    made.__module__ = "tqdm.utils"
    return made


@odd("a pointer of a class that a library has made", lambda: POINTER(ctypes.c_ushort(0)))
def _(kept: Any, self: Odd) -> float:
    kept.contents.value += 1
    return kept[0]


@odd("an array of a class that a library has made", lambda: THREE())
def _(kept: Any, self: Odd) -> float:
    kept[1] += 1
    return kept[1]


POINTER = of_a_library(ctypes.POINTER(ctypes.c_ushort))
THREE = of_a_library(ctypes.c_ushort * 3)


@odd("an object of Python's in one of ctypes", lambda: ctypes.py_object([0]))
def _(kept: Any, self: Odd) -> float:
    kept.value[0] += 1
    return kept.value[0]


@odd("numbers in the memory of another object", lambda: (ctypes.c_int * 2).from_buffer(bytearray(8)))
def _(kept: Any, self: Odd) -> float:
    kept[1] += 1
    return kept[1]


@odd("a callback that is only kept", lambda: ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1))
def _(kept: Any, self: Odd) -> float:
    self.called = kept
    return kept()
