"""Modules of the user's that training loads and its code does not name count as files that it reads."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import pydoc
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

import hpstage
from hpstage.errors import StoreError
from hpstage.training.identity import watching
from tests.torch.test_inputs import Tiny, in_loss, search

pytestmark = pytest.mark.sampled(16)

NAMES = ["scaling", "scalings.first"]
OUTER = """
import importlib
def computed(name): return importlib.import_module(f"scalings.{name}").scale()
"""
TEXT = "!!python/name:scaling.scale"


def by_path(path: str) -> float:
    spec = importlib.util.spec_from_file_location("scaling_by_path", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return float(module.scale())


def by_pickle(name: str) -> float:
    return float(pickle.loads(b"c" + f"{name}\nscale\n.".encode())())  # noqa: S301


def by_statement() -> float:
    import scaling  # type: ignore[import-not-found]

    return float(scaling.scale())


LOADED: dict[str, Callable[[], float]] = {
    "by its path": lambda: by_path(f"{NAMES[0]}.py"),
    "by a library": lambda: float(pydoc.locate(f"{NAMES[0]}.scale")()),  # type: ignore[operator]
    "in a package": lambda: float(pydoc.locate(f"{NAMES[1]}.scale")()),
    "by a pickle": lambda: by_pickle(NAMES[0]),
    "by a text in YAML": lambda: float(yaml.unsafe_load(TEXT)()),
    "run": lambda: float(runpy.run_module(NAMES[0])["scale"]()),
    "from the hub": lambda: float(torch.hub.load(".", "small", source="local")),  # type: ignore[no-untyped-call]
    "by a module that is": lambda: float(pydoc.locate("outer_scaling.computed")("first")),  # type: ignore[operator]
}


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("scaling", "scalings", "outer_scaling")]:
        del sys.modules[name]
    watching.imported.clear()
    importlib.invalidate_caches()


def write(scale: float) -> None:
    """Write the modules, which another process would then load."""
    forget()
    text = f"def scale(): return {scale}\n"
    Path("scalings").mkdir(exist_ok=True)
    Path("scalings/__init__.py").touch()
    for name in ("scaling.py", "scalings/first.py"):
        Path(name).write_text(text)
    Path("outer_scaling.py").write_text(OUTER)
    Path("hubconf.py").write_text(f"dependencies = []\ndef small(): return {scale}\n")
    shutil.rmtree("__pycache__", ignore_errors=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write(1.0)
    yield tmp_path
    forget()


@pytest.mark.parametrize("load", LOADED.values(), ids=LOADED)
def test_a_store_is_refused_if_a_module_that_training_loads_has_changed(
    load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = search(in_loss(load))
    assert caplog.text.count("Training reads") == 1
    forget()
    assert search(in_loss(load)) == before
    write(2.0)
    with pytest.raises(StoreError, match=r"scaling|hubconf"):
        search(in_loss(load))


class InDataset(Tiny):
    """Its data, which are digested, are the same; the module that has made them is loaded when it is used again."""

    def dataset(self) -> Any:
        LOADED["by a library"]()
        return TensorDataset(torch.ones(8, 1))

    def scale(self) -> float:
        return LOADED["by a library"]()


class Versioned(InDataset):
    data_version = "1"


@pytest.mark.parametrize("make", [InDataset, Versioned])
def test_a_store_is_refused_if_a_module_that_creates_the_data_has_changed(make: Any) -> None:
    search(make())
    write(2.0)
    with pytest.raises(StoreError, match="training reads the module scaling, which changed"):
        search(make())


def test_a_module_loaded_from_bytecode_is_recorded_by_its_source_file() -> None:
    load = LOADED["by a library"]
    LOADED["by a library"]()
    assert [*Path("__pycache__").glob("scaling*")] or sys.dont_write_bytecode
    forget()
    search(in_loss(load))
    assert [*watching.imported] == [str(Path("scaling.py").absolute())]


def test_a_module_loaded_by_an_earlier_search_counts_as_loaded_and_not_as_its_file_is_now() -> None:
    load = LOADED["by a library"]
    search(in_loss(load), store="one")
    Path("scaling.py").write_text("def scale(): return 2.0\n")  # not loaded again
    search(in_loss(load), store="another")
    write(2.0)
    with pytest.raises(StoreError, match="training reads the module scaling, which changed"):
        search(in_loss(load), store="another")


def test_a_module_moved_to_another_folder_is_the_same_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = search(in_loss(LOADED["by a library"]))
    forget()
    for name in ("scaling.py", "outer_scaling.py"):
        (folder / "elsewhere").mkdir(exist_ok=True)
        Path(name).rename(folder / "elsewhere" / name)
    monkeypatch.syspath_prepend(folder / "elsewhere")
    assert search(in_loss(LOADED["by a library"])) == before


class Answering(Tiny):
    version = "1"

    def scale(self) -> float:
        return LOADED["by a library"]()


class Ignoring(Answering):
    version = None
    stateless = ("scaling",)


class Writing(Tiny):
    """Loads what it has written."""

    def scale(self) -> float:
        Path("generated_scaling.py").write_text("def scale(): return 1.0")
        return by_path("generated_scaling.py")


COVERED: dict[str, Callable[[], Any]] = {
    "by a statement": lambda: in_loss(by_statement),
    "answered for by a version": Answering,
    "answered for by stateless": Ignoring,
    "written by training": Writing,
}


@pytest.mark.parametrize("make", COVERED.values(), ids=COVERED)
def test_modules_covered_by_key_version_or_stateless_or_written_by_training_are_not_inputs(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    search(make())
    assert "Training reads" not in caplog.text


@pytest.mark.ci
def test_workers_report_modules_that_they_have_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    with hpstage.local_cluster(1, gpus=0) as workers:
        before = search(InDataset(), executor=workers)
        assert "Training reads the module scaling" in caplog.text
        assert search(InDataset(), executor=workers) == before
        write(2.0)
        with pytest.raises(StoreError, match="training reads the module scaling, which changed"):
            search(InDataset(), executor=workers)
