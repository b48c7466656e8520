"""What a state may bring of functions, files and weights, and what it may not."""

from __future__ import annotations

import argparse
import colorsys
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import sympy
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from hpstage.errors import StateError
from hpstage.training.capture.allowed import creatable, pure_function
from hpstage.training.capture.decoding import Decoder
from hpstage.training.capture.derived import reached_by_gradients, without_graph
from hpstage.training.capture.generators import Generators
from hpstage.training.capture.on_disk import opened_file, opened_map, where_file_is, where_map_is
from hpstage.training.capture.survey import Survey
from hpstage.training.capture.surveyor import Surveyor


def decoded(plain: Any) -> Any:
    return Decoder(Survey(), []).value(plain)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "open"),
        ("builtins", "getattr"),
        ("operator", "call"),
        ("operator", "setitem"),
        ("operator", "iadd"),
        ("torch", "load"),
        ("torch", "from_file"),
        ("torch", "set_num_threads"),
        ("torch.nn.functional", "importlib"),
        ("torch.nn.functional", "boolean_dispatch"),
        ("torch.optim.swa_utils", "SWALR.__init__"),
        ("numpy", "load"),
        ("numpy", "save"),
        ("numpy", "copyto"),
        ("functools", "partial"),
    ],
)
def test_a_state_that_names_a_function_with_side_effects_is_refused(module: str, name: str) -> None:
    assert pure_function(module, name) is None
    with pytest.raises(StateError, match=r"which is not available here"):
        decoded(("pure", module, name))


def test_a_state_may_not_bind_arguments_to_a_function_that_it_may_not_name() -> None:
    base = Survey()
    base.named["os", "system"] = os.system
    with pytest.raises(StateError, match=r"no state may provide them"):
        Decoder(base, []).value(("partial", 0, ("named", "os", "system"), ["true"], [], []))


def test_a_state_may_not_bind_arguments_to_a_function_that_calls_its_arguments() -> None:
    assert decoded(("pure", "builtins", "max")) is max
    assert decoded(("partial", 0, ("pure", "operator", "mul"), [2], [], []))(3) == 6
    for module, name in (("builtins", "max"), ("builtins", "next"), ("numpy", "piecewise"), ("functools", "reduce")):
        with pytest.raises(StateError, match=r"no state may provide them"):
            decoded(("partial", 0, ("pure", module, name), [1], [], []))


def test_a_state_may_name_only_builtin_methods_without_side_effects() -> None:
    holder = "dict", 0, [(1, 2)], []
    assert decoded(("slot", holder, "__contains__"))(1)
    assert decoded(("slot", holder, "get"))(1) == 2
    for owner, name in ((holder, "__reduce_ex__"), (holder, "__dir__"), ("{}", "format"), ("{}", "format_map")):
        with pytest.raises(StateError, match=rf"names a method {name} of \w+, which is not available here"):
            decoded(("slot", owner, name))


def test_a_state_may_call_a_method_by_name_only_if_the_code_names_that_method() -> None:
    base = Survey()
    base.mentioned = frozenset(("count", "__reduce_ex__"))
    call = Decoder(base, []).value(("rebuilt", 0, "methodcaller", ["count", ("tuple", [1]), ("tuple", [])]))
    assert call([1, 2, 1]) == 2
    for name in ("tofile", "__reduce_ex__", ["count"]):
        with pytest.raises(StateError, match=r"^the state holds "):
            Decoder(base, []).value(("rebuilt", 0, "methodcaller", [name, ("tuple", [2]), ("tuple", [])]))


def test_a_state_may_name_ufuncs_only_of_modules_that_the_code_names() -> None:
    base = Survey()
    base.named["scipy.special", ""] = scipy.special
    assert Decoder(base, []).value(("pure", "scipy.special", "expit")) is scipy.special.expit
    for module, name in (("scipy.special", "logsumexp"), ("scipy.special._ufuncs", "expit"), ("os", "system")):
        with pytest.raises(StateError, match=r"which is not available here"):
            Decoder(base, []).value(("pure", module, name))


@pytest.mark.parametrize(
    "plain",
    [
        (),
        ([],),
        ("unknown",),
        ("again", 7),
        ("tuple", 5),
        ("builtin", "eval"),
        ("descriptor", 5, "x"),
        ("numpy dtype", "bogus"),
        ("numpy dtype", "(2,"),
        ("numpy time", "bogus", 1),
        ("pattern", "(" * 5000, 0),
        ("dtype", ["float32"]),
        ("set", 0, [("list", 1, [], None)], None),
        ("generator of process", 0, "mine", ()),
        ("generator of process", 0, "NumPy", ()),
        ("rebuilt", 0, "methodcaller", ["system"]),
        ("rebuilt", 0, "methodcaller", ["system", ("tuple", ["true"]), ("tuple", [])]),
        ("rebuilt", 0, "attrgetter", ["a.__class__"]),
        ("rebuilt", 0, "union", [1, 2]),
        ("rebuilt", 0, "typing", ["sys"]),
        ("rebuilt", 0, "numpy.finfo", ["|O"]),
        ("module", "os"),
        ("module", "builtins"),
        ("filled", 0, "builtins", "dict", [], []),
        ("bytearray", 0, 10**12, None),
        ("objects", 0, [], [10**12], "C", True),
    ],
    ids=lambda plain: str(plain)[:30],
)
def test_a_malformed_state_is_refused(plain: Any) -> None:
    with pytest.raises(StateError, match=r"^the state (holds|names)"):
        decoded(plain)


def test_the_error_for_a_malformed_state_names_its_malformed_part() -> None:
    for plain in (("tuple", [("unknown",)]), ("list", 0, [("tuple", [("unknown",)])], None)):
        with pytest.raises(
            StateError, match=r"^the state holds a 'unknown', which this version of hpstage does not know"
        ):
            decoded(plain)


@pytest.mark.parametrize("tag", ["constant", "dtype"])
def test_a_state_that_names_a_missing_attribute_of_torch_imports_no_module(tag: str) -> None:
    lazy = [name for name in ("_inductor", "onnx", "_export") if f"torch.{name}" not in sys.modules]
    before = set(sys.modules)
    for name in lazy or ["nn"]:
        with pytest.raises(StateError, match=r"this version of torch does not know"):
            decoded((tag, name))
    assert set(sys.modules) == before


def test_a_random_generator_of_a_library_module_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    held, own = random.Random(3), random.Random(3)
    monkeypatch.setattr(colorsys, "NUMBERS", (held,), raising=False)
    monkeypatch.setattr(sys.modules[__name__], "OWN", own, raising=False)
    generators = Generators()
    assert generators.named("self.noise", own) is None
    assert generators.named("self.noise", torch.default_generator) == "torch"
    with pytest.raises(StateError, match=r"^self\.noise holds the random generator colorsys\.NUMBERS of a library"):
        generators.named("self.noise", held)


@pytest.mark.parametrize(("module", "name"), [("subprocess", "Popen"), ("torch.hub", "_Faketqdm"), ("os", "system")])
def test_a_state_that_names_a_class_it_may_not_instantiate_is_refused(module: str, name: str) -> None:
    with pytest.raises(StateError, match=r"which is not available here"):
        decoded(("nameable", module, name))


def test_a_struct_time_with_too_few_items_in_a_state_is_refused() -> None:
    with pytest.raises(StateError, match=r"the state's struct_time of 2 items cannot be restored"):
        decoded(("instance", 0, "time", "struct_time", [1, 2], []))


def test_a_state_cannot_import_a_module_by_its_name() -> None:
    assert "this" not in sys.modules
    assert creatable(Survey(), "torch.nn.utils.no_such", "A") is None
    assert creatable(Survey(), "this", "A") is None
    assert "this" not in sys.modules
    assert creatable(Survey(), "torch.nn.utils.prune", "L1Unstructured") is not None


def test_a_tensor_of_an_earlier_step_can_be_read_but_gradients_through_it_are_refused() -> None:
    values = torch.ones(2, 3)
    kept = without_graph(values, "model.0.weight", [])
    assert torch.equal(kept, values)
    assert kept.requires_grad
    assert not kept.is_leaf
    with pytest.raises(StateError, match=r"gradients through model\.0\.weight, a tensor of an earlier step"):
        (kept * nn.Parameter(values)).sum().backward()  # type: ignore[no-untyped-call]


def test_gradients_through_a_tensor_of_an_earlier_step_are_refused_for_each_leaf() -> None:
    leaf = nn.Parameter(torch.ones(2, 3))
    weight = leaf * torch.ones(2, 3)
    kept = without_graph(weight.detach(), "model.0.weight", reached_by_gradients(weight, ()))
    with pytest.raises(StateError, match=r"gradients through model\.0\.weight, a tensor of an earlier step"):
        torch.autograd.grad((kept + leaf).sum(), leaf)


def test_gradients_reach_the_leaves_of_a_tensor_until_a_backward_pass_frees_its_graph() -> None:
    leaf = nn.Parameter(torch.ones(2))
    first = leaf.exp()
    second = 2 * first
    assert reached_by_gradients(second, ()) == [leaf]
    assert reached_by_gradients(second, {first.grad_fn}) == [first.grad_fn]
    second.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert reached_by_gradients(second, ()) == [leaf]
    second.sum().backward()  # type: ignore[no-untyped-call]
    assert reached_by_gradients(second, ()) == []
    restored = without_graph(second.detach(), "second", [])
    assert reached_by_gradients(restored, ()) == []
    assert reached_by_gradients(leaf + restored, ()) == [leaf]


def test_a_file_is_reopened_at_its_position_and_refused_if_its_content_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    np.arange(9.0).tofile(path)
    with path.open("rb") as file:
        file.read(11)
        where = where_file_is(file)
    array = np.memmap(path, "f8", mode="r", offset=8)
    mapped = where_map_is(array)
    assert where is not None
    assert mapped is not None
    with opened_file(*where) as again:
        assert again.tell() == 11
    assert np.array_equal(opened_map(*mapped, np.dtype("f8"), [8]), array)

    other = tmp_path / "other"
    np.arange(1.0, 10).tofile(other)
    for found, open_again in ((where, opened_file), (mapped, lambda *given: opened_map(*given, np.dtype("f8"), [8]))):
        for place in (other, tmp_path / "gone", tmp_path):
            with pytest.raises(StateError, match=r"it cannot be opened as it was"):
                open_again(str(place), *found[1:])


def test_a_file_that_was_replaced_after_it_was_opened_cannot_be_reopened(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(b"12")
    with path.open("rb") as file:
        path.rename(tmp_path / "moved")
        path.write_bytes(b"12")
        assert where_file_is(file) is None


def test_a_state_may_hold_classes_of_packages_whose_objects_the_trainable_holds() -> None:
    data = TensorDataset(torch.arange(3.0))
    base = Surveyor().survey([("self.data", data), ("self.arguments", argparse.Namespace())])
    assert creatable(base, "torch.utils.data.dataset", "Subset") is Subset
    assert creatable(base, "argparse", "ArgumentParser") is argparse.ArgumentParser
    assert creatable(Survey(), "torch.utils.data.dataset", "Subset") is None
    assert creatable(base, "torch.hub", "_Faketqdm") is None
    assert creatable(base, "collections", "ChainMap") is None


def test_a_state_may_hold_instances_of_a_class_that_the_code_names() -> None:
    def code() -> object:
        return np.polynomial.Polynomial, np.random.Generator

    base = Surveyor().survey([("self.code", code)])
    assert creatable(base, "numpy.polynomial.polynomial", "Polynomial") is np.polynomial.Polynomial
    assert creatable(base, "numpy.polynomial.chebyshev", "Chebyshev") is None
    assert creatable(base, "numpy.random._generator", "Generator") is None


def test_a_state_may_not_create_instances_of_a_class_with_one_object_per_value() -> None:
    """A library may compare its instances by identity, as there is one of each value."""
    base = Surveyor().survey([("self.tree", sympy.Function("f")(sympy.Symbol("x")))])
    assert creatable(base, "sympy.core.numbers", "Zero") is None
    assert creatable(base, "sympy.core.symbol", "Symbol") is None
