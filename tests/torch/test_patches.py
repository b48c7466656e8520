"""A process that unpacks a trainable has the settings of the one that has packed it, and its patches, or refuses."""

from __future__ import annotations

import builtins
import ctypes
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

import hpstage.torch
from hpstage.cluster.shipping import pack
from hpstage.errors import StateError, UsageError
from hpstage.training.capture import world
from hpstage.training.code import patches as patches_module
from hpstage.training.code.patches import lacking, look_ahead, patches, standing
from hpstage.training.code.tables import listed
from hpstage.training.identity import environment, settings
from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import Small

pytestmark = pytest.mark.sampled(2)

LIBRARIES = ("torch",)
unpack = cloudpickle.loads


def mine(*given: Any) -> Any:
    return given[0]


class Mine(nn.Module):
    pass


class Callable_:
    def __call__(self, x: Any) -> Any:
        return x


PATCHES: dict[str, tuple[Any, str, object]] = {
    "torch.nn.functional.relu": (torch.nn.functional, "relu", mine),
    "torch.nn.modules.linear.Linear.forward": (nn.Linear, "forward", mine),
    "torch.nn.modules.linear.Linear.extra": (nn.Linear, "extra", property(mine)),
    "torch.nn.modules.linear.Linear.made": (nn.Linear, "made", staticmethod(mine)),
    "torch.nn.Dropout": (nn, "Dropout", Mine),
    "torch.relu": (torch, "relu", functools.partial(mine, 1)),
    "torch.tanh": (torch, "tanh", Callable_()),
    "builtins.mine": (builtins, "mine", mine),
    "json.dumps": (json, "dumps", mine),
}


@pytest.mark.parametrize("place", PATCHES)
def test_a_patch_of_a_library_is_refused_by_name_in_a_process_without_it(place: str) -> None:
    owner, name, value = PATCHES[place]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value, raising=False)
        packed = pack(Small(), LIBRARIES)
        assert type(unpack(packed)) is Small
    with pytest.raises(UsageError, match=rf"^your code has set {place} in the search's process, but not in .*\. .*"):
        unpack(packed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *given: given[-1], raising=False)  # patched, too, but by other code
        with pytest.raises(UsageError, match=f"^your code has set {place} "):
            unpack(packed)


@pytest.mark.parametrize(
    ("place", "register"),
    [
        ("torch.nn.modules.module._global_forward_hooks", register_module_forward_hook),
        ("torch.optim.optimizer._global_optimizer_post_hooks", register_optimizer_step_post_hook),
    ],
)
def test_global_hooks_of_modules_and_optimizers_count_as_patches(place: str, register: Callable[..., Any]) -> None:
    handle = register(mine)
    packed = pack(Small(), LIBRARIES)
    unpack(packed)
    handle.remove()
    with pytest.raises(UsageError, match=f"^your code has set {place} "):
        unpack(packed)


def test_patches_by_other_libraries_and_of_modules_outside_training_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = patches()
    monkeypatch.setattr("sys.excepthook", mine)
    monkeypatch.setattr("warnings.showwarning", mine)
    monkeypatch.setattr(hpstage, "mine", mine, raising=False)
    monkeypatch.setattr(nn.functional, "relu", torch.tanh)
    assert patches() == before


def test_a_ctypes_pointer_type_is_not_a_patch_whichever_module_created_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes keeps it, and gives it to its own modules that are imported later."""
    wintypes = importlib.import_module("ctypes.wintypes")
    pointer = ctypes.POINTER(type("Point", (ctypes.Structure,), {}))
    assert pointer.__module__ == __name__
    monkeypatch.setattr(wintypes, "LPPOINT", pointer)
    assert not [place for place in patches() if place.startswith("ctypes")]


def test_patches_of_libraries_that_a_worker_has_not_imported_are_ignored() -> None:
    assert lacking({"not_imported:dumps": "mine", "json:dumps": "mine"}) == ["json:dumps"]


def test_unpacking_a_trainable_applies_the_settings_of_the_process_that_packed_it() -> None:
    before = settings.read_all()
    try:
        torch.set_default_dtype(torch.float64)
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.set_num_threads(2)
        packed, without = pack(Small(), LIBRARIES), pack(Small(), ())
        settings.write_all(before)
        unpack(without)
        assert settings.read_all() == before
        unpack(packed)
        assert torch.get_default_dtype() is torch.float64
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert torch.get_num_threads() == before["threads"]
    finally:
        settings.write_all(before)


def test_a_setting_that_cannot_be_applied_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)
    packed = pack(Small(), LIBRARIES)
    torch.set_default_dtype(torch.float32)

    def fails(dtype: object) -> None:
        raise RuntimeError("no such dtype")

    known = settings._all(*settings._imported())
    monkeypatch.setitem(known, "default dtype", (torch.get_default_dtype, fails))
    with pytest.raises(UsageError, match=r"default dtype cannot be set to torch.float64: no such dtype"):
        unpack(packed)


class Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_torch_mode_that_is_open_around_a_search_is_refused_by_name() -> None:
    with Mode(), pytest.raises(StateError, match=r"test_patches\.Mode, a mode of torch, is open"):
        pack(Small(), LIBRARIES)


def test_code_that_reads_a_setting_of_a_torch_backend_can_be_packed() -> None:
    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec("def precision():\n    return torch.backends.mkldnn.matmul.fp32_precision", names)
    assert unpack(pack(names["precision"], LIBRARIES))() == torch.backends.mkldnn.matmul.fp32_precision


class PatchingData(Small):
    """Puts a function of its own into torch where it makes its data."""

    def dataset(self) -> Any:
        torch.nn.functional.made_with_data = mine  # type: ignore[attr-defined]
        return super().dataset()


def test_a_patch_made_in_dataset_is_in_the_key_from_the_first_search_on() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "made_with_data", None, raising=False)
        first, second = (describe(as_trainable(PatchingData())).identity for _ in range(2))
    assert first == second


def test_libraries_are_searched_for_patches_once_for_the_key_and_the_first_setup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    for module in (environment, world):
        monkeypatch.setattr(module, "standing", lambda: looks.append(1) or standing())

    def train(run: hpstage.Run) -> None:
        for _ in run.steps():
            run.report(loss=run.hp["lr"])

    trainable = as_trainable(train)
    describe(trainable)
    trainable.setup({"lr": 0.1})
    assert looks == [1]


holding: Any = nn.Identity()
holding.made = mine
ENTRIES: dict[str, tuple[object, object]] = {
    "function": ("mine", mine),
    "class": ("mine", Mine),
    "method": ("mine", Callable_().__call__),
    "in a tuple": ("mine", ("what it is", mine)),
    "in a dict": ("mine", {"made": mine}),
    "in an object": ("mine", holding),
    "as a key": (Mine, "the library's"),
    "by a name": ("mine", f"{__name__}:Mine"),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_users_entry_in_a_library_registry_is_refused_in_processes_without_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, entry = ENTRIES[kind]
    table: dict[object, object] = {"theirs": torch.relu}
    monkeypatch.setattr(nn.functional, "registry", table, raising=False)

    def places() -> list[str]:
        return [place for place in patches() if place.startswith("torch.nn.functional:registry[")]

    assert places() == []
    assert "torch.nn.functional" in patches_module._clean
    table[key] = entry
    (place,) = places()
    packed = pack(Small(), LIBRARIES)
    assert type(unpack(packed)) is Small
    del table[key]
    assert places() == []
    with pytest.raises(UsageError, match=f"^your code has set {re.escape(place.replace(':', '.'))} "):
        unpack(packed)


def test_models_and_numbers_in_library_dicts_and_entries_of_caches_are_not_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = patches()
    monkeypatch.setattr(nn.functional, "seen", {"model": Mine(), "n": 1, "text": "no:module"}, raising=False)
    monkeypatch.setattr(nn.functional, "relu_cache", {Mine: mine}, raising=False)
    monkeypatch.setitem(nn.Module.__annotations__, "mine", Mine)
    assert patches() == before


@pytest.mark.ci
def test_unchanged_modules_are_not_searched_again_and_new_patches_are_found() -> None:
    assert [*standing()] == [*standing()]
    before = dict(patches_module._clean)
    assert "torch.nn.functional" in before
    for holder, name, value in PATCHES.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, name, value, raising=False)
            assert value in [found for _, found in standing()], name
        assert value not in [found for _, found in standing()], name
    assert all(
        patches_module._clean[name] is known for name, known in before.items() if name.startswith("transformers")
    )


LATECOMER = """
import functools
def function(x): return x
class Class:
    def __call__(self, x): return x
wrapper, part, instance = property(function), functools.partial(function, 1), Class()
"""


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["function", "Class", "wrapper", "part", "instance"])
def test_a_patch_is_found_as_soon_as_its_module_is_imported_as_user_code(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another module that comes or goes changes nothing: libraries are not looked through again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("latecomer", "bystander"):
        (tmp_path / f"{name}.py").write_text(LATECOMER)
    module = importlib.import_module("latecomer")
    monkeypatch.delitem(sys.modules, "latecomer")
    monkeypatch.setattr(nn.functional, "relu", value := vars(module)[kind])
    assert value not in [found for _, found in standing()]
    before = patches_module._clean["torch.nn.functional"]
    importlib.import_module("bystander")
    assert value not in [found for _, found in standing()]
    monkeypatch.delitem(sys.modules, "bystander")
    assert value not in [found for _, found in standing()]
    assert patches_module._clean["torch.nn.functional"] is before
    monkeypatch.setitem(sys.modules, "latecomer", module)
    assert value in [found for _, found in standing()]
    monkeypatch.delitem(sys.modules, "latecomer")
    assert value not in [found for _, found in standing()]


def test_a_patch_by_an_object_whose_class_becomes_callable_later_is_found() -> None:
    class Later:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "later", later := Later(), raising=False)
        assert later not in [found for _, found in standing()]
        Later.__call__ = mine  # type: ignore[attr-defined]
        assert later in [found for _, found in standing()]


def test_a_dict_that_changes_while_it_is_listed_is_listed_again() -> None:
    """As by another thread, for which what is listed stands here: it adds a pair while the first pairs are given."""
    table = {n: n for n in range(3000)}

    class Pairs:
        def __iter__(self) -> Iterator[tuple[int, int]]:
            for key, value in table.items():
                if len(table) < 3003 and key == 2000:
                    table[len(table)] = value
                yield key, value

    assert listed(Pairs()) == [*table.items()]
    assert len(table) == 3003


@pytest.mark.ci
def test_modules_searched_in_advance_are_skipped_and_later_patches_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "entered.py").write_text("def make(): return 1\n")
    monkeypatch.setattr(nn.functional, "registry", {"theirs": "entered:make"}, raising=False)
    patches_module._clean.clear()
    look_ahead()
    assert "entered" not in sys.modules, "code of the user's is imported"
    assert "torch.nn.functional" not in patches_module._clean, "the text would never be read"
    assert (clean := patches_module._clean["torch.nn.modules.linear"]) is not None
    monkeypatch.setattr(nn.Linear, "forward", mine)
    found = dict(standing())
    assert found["torch.nn.modules.linear:Linear.forward"] is mine
    assert found["torch.nn.functional:registry['theirs']"][0] == "entered:make"
    monkeypatch.undo()
    sys.modules.pop("entered", None)
    look_ahead()
    assert patches_module._clean["torch.nn.modules.linear"] is not clean
