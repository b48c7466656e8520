"""What a state may hold, and that its copy and its digest depend on nothing but its values."""

from __future__ import annotations

import enum
import math
import random
import struct
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage.checkpoints.state_tree import MAX_DEPTH, clone, digest, flatten, nbytes
from hpstage.errors import StateError
from hpstage.testing.checkpoints import describe

Point = namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 1


class Weights(torch.Tensor):
    pass


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "\x00", "leaf"])
)
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)
STATES = st.recursive(
    SCALARS | st.binary() | st.lists(st.integers(0, 9), max_size=2).map(torch.Size),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@pytest.mark.ci
@settings(derandomize=True)
@given(STATES)
def test_a_copied_state_keeps_types_values_and_order(state: object) -> None:
    assert describe(clone(state)) == describe(state)
    assert digest(clone(state)) == digest(state)


@settings(derandomize=True)
@given(STATES, STATES)
def test_digests_are_equal_if_and_only_if_states_are_equal_up_to_dict_order(one: object, other: object) -> None:
    assert (digest(one) == digest(other)) == (_unordered(one) == _unordered(other))


def _unordered(state: object) -> object:
    if isinstance(state, dict):
        return type(state), frozenset((_unordered(k), _unordered(v)) for k, v in state.items())
    if isinstance(state, list | tuple):
        return type(state), tuple(map(_unordered, state))
    return type(state), struct.pack(">d", state) if isinstance(state, float) else state


def test_the_digest_does_not_depend_on_the_order_of_dicts() -> None:
    assert digest({"a": 1, 2: [torch.ones(2)]}) == digest({2: [torch.ones(2)], "a": 1})


def test_the_digest_is_the_same_in_every_process_and_release() -> None:
    # Digests are kept in journals and manifests: a change here needs a new format.
    state = {
        "w": np.arange(3, dtype="<f4"),
        "n": [1, 2**70, 0.5, None, True, "s", b"b", (1,)],
        1: OrderedDict(a=1),
    }
    assert digest(state) == "bc361afac5e824874557dbeb3dde38bf"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ((1,), torch.Size([1])),
        ({}, OrderedDict()),
        ({1: 0}, {"1": 0}),
        ({1: 0}, {True: 0}),
        ("a", b"a"),
        ([[1], [2]], [[1, 2]]),
        (["leaf", 0], ("leaf", 0)),
        (np.zeros(2, np.float32), torch.zeros(2)),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (np.zeros((2, 1)), np.zeros((1, 2))),
        (np.zeros(()), np.float64(0)),
        (np.float32(0), np.int32(0)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
        ({"a": torch.zeros(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.zeros(2)}),
    ],
)
def test_different_states_have_different_digests(one: object, other: object) -> None:
    assert digest(one) != digest(other)


def test_the_digest_ignores_memory_gaps_tied_tensors_and_requires_grad() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    spread = torch.zeros(3, 8)[:, ::2].copy_(weight)
    plain = digest([weight, weight.clone()])
    assert digest([weight, weight]) == plain
    assert digest([spread, weight.clone()]) == plain
    assert digest([torch.nn.Parameter(weight), weight.clone().requires_grad_()]) == plain
    assert digest(np.zeros((2, 8))[:, ::2]) == digest(np.zeros((2, 4)))


def test_the_memory_layout_of_a_tensor_is_copied_and_changes_the_digest() -> None:
    """Kernels pair values by their place in memory, and add in its order."""
    weight = torch.arange(24.0).reshape(1, 2, 3, 4)
    last = weight.to(memory_format=torch.channels_last)
    array = np.arange(12.0).reshape(3, 4)
    assert digest(last) != digest(weight)
    assert digest(np.asfortranarray(array)) != digest(array)
    copied: Any = clone([last, np.asfortranarray(array)])
    assert copied[0].stride() == last.stride()
    assert copied[0].equal(weight)
    assert copied[1].flags.f_contiguous
    assert np.array_equal(copied[1], array)


def test_negated_and_conjugated_views_have_the_digest_of_their_values() -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    assert digest(number.conj()) == digest(torch.tensor([1 - 2j, 3 + 4j]))
    assert digest(number.conj().imag) == digest(torch.tensor([-2.0, 4.0]))


def test_a_copied_nan_keeps_its_bits() -> None:
    (odd,) = struct.unpack(">d", bytes.fromhex("fff8000000000123"))
    copy = clone([odd, math.nan])
    assert isinstance(copy, list)
    assert struct.pack(">d", copy[0]).hex() == "fff8000000000123"
    assert digest([odd]) != digest([math.nan])


def test_a_copied_state_owns_its_memory() -> None:
    weight = torch.zeros(2)
    copy = clone({"a": weight, "b": weight, "n": np.zeros(2)})
    assert isinstance(copy, dict)
    copy["a"] += 1
    copy["n"] += 1
    assert weight.tolist() == copy["b"].tolist() == [0, 0]


def test_a_copied_state_dict_keeps_the_version_metadata_of_its_module() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    copy = clone(state)
    assert type(copy) is OrderedDict
    assert copy._metadata == state._metadata  # type: ignore[attr-defined]


def test_python_and_numpy_generators_can_be_restored_from_copied_states() -> None:
    source = random.Random(1)
    state = clone([source.getstate(), np.random.RandomState(1).get_state(), torch.random.get_rng_state()])
    assert isinstance(state, list)
    restored = random.Random()
    restored.setstate(state[0])
    assert restored.random() == source.random()
    legacy = np.random.RandomState()
    legacy.set_state(state[1])
    assert legacy.random_sample() == np.random.RandomState(1).random_sample()


def test_nbytes_counts_the_values_and_the_structure_of_a_state() -> None:
    assert nbytes({"w": torch.zeros(1000), "n": np.zeros(10)}) - 4080 in range(1, 100)
    assert nbytes("x" * 1000) >= 1000


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [0, object()]}, r"state\['a'\]\[1\] is a object; convert it in state_dict\(\)"),
        ({"a": 1j}, r"state\['a'\] is a complex"),
        ({"a": bytearray(b"x")}, "is a bytearray"),
        ({"a": Color.RED}, "is a Color"),
        ({"a": Point(1, 2)}, "is a Point"),
        ({"a": defaultdict(int)}, "is a defaultdict"),
        ({"a": torch.Generator()}, "is a Generator"),
        ({"a": Weights()}, "is a Weights, a tensor subclass"),
        ({"a": torch.zeros(2).to_sparse()}, "torch.sparse_coo"),
        ({"a": torch.zeros(2, device="meta")}, "on device meta"),
        ({"a": np.array(["x"])}, "an array of dtype <U1"),
        ({"a": np.array([None])}, "an array of dtype object"),
        ({"a": np.array([np.datetime64("2026-01-01")])}, r"an array of dtype datetime64\[D\]"),
        ({"a": np.ma.masked_array([1.0])}, "is a MaskedArray, an array subclass"),
        ({"a": np.str_("x")}, "is a str_"),
        ({"a": np.longdouble(1)}, "is a longdouble"),
        ({"a": {object(): 1}}, r"state\['a'\] has a key of type object"),
        ({(1, (b"x",)): 1}, "state has a key of type bytes"),
        ({np.int64(1): 1}, "state has a key of type int64"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_values_that_cannot_be_captured_exactly_are_refused_with_their_path(state: object, message: str) -> None:
    for function in (flatten, clone, digest, nbytes):
        with pytest.raises(StateError, match=message):
            function(state)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, object] = {}
    state["self"] = [state]
    with pytest.raises(StateError, match=r"state\['self'\]\[0\]\['self'\].*contains itself"):
        flatten(state)


def test_a_state_nested_too_deeply_is_refused() -> None:
    state: object = 0
    for _ in range(MAX_DEPTH):
        state = [state]
    assert clone(state) == state
    with pytest.raises(StateError, match="100 deep"):
        flatten([[state]])


def test_a_state_without_tensors_is_cached_without_importing_torch_or_numpy() -> None:
    code = (
        "import sys; from hpstage.checkpoints import LiveCache;"
        "from hpstage.checkpoints.state_tree import digest;"
        "cache = LiveCache(); cache.put('k', {'a': [1, b'x', 2.5]}); print(digest(cache.get('k')));"
        "sys.exit(bool({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest({"a": [1, b"x", 2.5]})
