"""A checkpoint with the right checksums that describes no state is damage to whoever loads or verifies it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import optuna
import pytest
import torch
import xxhash

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import FolderCheckpoints, Manifest
from hpstage.checkpoints import format as files
from hpstage.checkpoints.leaves import Leaf
from hpstage.checkpoints.state_tree import FlatState, digest_of
from hpstage.driver.places import open_existing
from hpstage.errors import CheckpointCorrupt
from hpstage.plan.facts import StateKey
from hpstage.testing.toys import Tape
from tests.faults.spoiling import spoil

KEY = StateKey("0" * 31 + "a")
pytestmark = pytest.mark.usefixtures("own_files")

STATE = {"w": torch.arange(5.0), "step": 7}


@pytest.fixture
def store(tmp_path: Path) -> FolderCheckpoints:
    return FolderCheckpoints(tmp_path / "checkpoints", "workload")


def saved(store: FolderCheckpoints) -> Path:
    store.save(KEY, STATE, step=7, parent=None)
    return store.path / KEY[:2] / KEY


def seal(folder: Path, manifest: Manifest) -> None:
    (folder / files.MANIFEST).write_bytes(files.encode_manifest(manifest))


def refused(store: FolderCheckpoints) -> None:
    """A damaged checkpoint is sound for nobody, and saving its state again mends it."""
    for read in (store.load, store.verify):
        with pytest.raises(CheckpointCorrupt, match=KEY):
            read(KEY)
    store.save(KEY, STATE, step=7, parent=None)
    store.verify(KEY)


def forged(
    store: FolderCheckpoints, tree: object, leaf: Mapping[str, object] = types.MappingProxyType({}), size: int = 4
) -> None:
    """Write a checkpoint whose checksums, lengths and header are right, of one leaf of ``size`` bytes."""
    folder = saved(store)
    parts = (Leaf(**{"name": "a", "kind": "torch", "dtype": "float32", "shape": (1,), **leaf}),)  # type: ignore[arg-type]
    header = files._layout(parts)[0]
    (folder / files.TENSORS).write_bytes(header + bytes(size))
    (folder / files.STRUCTURE).write_bytes(msgspec.json.encode({"tree": tree, "leaves": parts}))
    checksums = {
        name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes()) for name in (files.TENSORS, files.STRUCTURE)
    }
    digest = digest_of(FlatState(["leaf", 0], parts, ()), [xxhash.xxh3_128_hexdigest(bytes(size))])
    with suppress(Exception):
        digest = digest_of(FlatState(tree, parts, ()), [xxhash.xxh3_128_hexdigest(bytes(size))])
    manifest = store.manifest(KEY)
    length = sum((folder / name).stat().st_size for name in checksums)
    seal(folder, msgspec.structs.replace(manifest, files=checksums, bytes=length, digest=digest))


def test_a_valid_checkpoint_written_by_another_program_is_loaded(store: FolderCheckpoints) -> None:
    forged(store, ["leaf", 0])
    store.verify(KEY)
    assert store.load(KEY) == torch.zeros(1)


@pytest.mark.parametrize(
    "tree",
    [
        ["float", "00"],
        ["float", ""],
        ["leaf", 1],
        ["leaf", "a"],
        ["leaf"],
        ["str", "ff"],
        ["int", "0x" + "f" * 9 + "g"],
        ["jax", ["array", "float32", False], ["leaf", 0]],
        ["jax", ["array", "object", False], ["leaf", 0]],
        ["jax", ["key", "threefry2x32"], ["leaf", 0]],
        ["jax", ["key", "threefry2x32", False], ["list", []]],
        ["scalar", "<f8", "00"],
        ["odict", [], [[["list", []], 1]]],
    ],
)
def test_a_structure_that_describes_no_state_is_refused_as_corrupt(store: FolderCheckpoints, tree: object) -> None:
    forged(store, tree)
    refused(store)


@pytest.mark.parametrize(
    ("leaf", "size"),
    [
        ({"shape": (2, 2), "strides": (10**12, 1)}, 16),  # 4 TB in memory
        ({"shape": (1, 1), "strides": (2**64, 1)}, 4),
        ({"shape": (1, 1), "strides": (-1, 1)}, 4),
        ({"shape": (1,), "strides": (1, 1)}, 4),
        ({"shape": (2**62, 2**62, 0)}, 0),
        ({"shape": (10**20, 0)}, 0),
        ({"shape": (-1, -1)}, 4),
        ({"kind": "numpy", "dtype": "<f4", "shape": (2**62, 2**62, 0)}, 0),
        ({"kind": "numpy", "dtype": "<f4", "shape": (1,) * 100}, 4),
    ],
)
def test_a_tensor_whose_declared_shape_does_not_match_its_data_is_refused_as_corrupt(
    store: FolderCheckpoints, leaf: dict[str, object], size: int
) -> None:
    forged(store, ["leaf", 0], leaf, size)
    refused(store)


@pytest.mark.parametrize("size", [10**12, 0, -1])
def test_a_manifest_with_a_wrong_length_is_refused_as_corrupt(store: FolderCheckpoints, size: int) -> None:
    folder = saved(store)
    seal(folder, msgspec.structs.replace(store.manifest(KEY), bytes=size))
    refused(store)


def test_a_state_that_does_not_match_its_manifest_is_refused_as_corrupt(store: FolderCheckpoints) -> None:
    folder = saved(store)
    seal(folder, msgspec.structs.replace(store.manifest(KEY), digest="0" * 32))
    refused(store)


def test_a_state_with_an_undecodable_checkpoint_is_trained_again_once_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = (1, 2, 3, 4, 5, 6)
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"late": late}))

    def search() -> None:
        hpstage.optimize(
            study,
            Tape(),
            lambda trial: {"lr": s.piecewise({0: 1, 5: trial.suggest_categorical("late", late)})},
            metric="score",
            steps=12,
            n_trials=2,
            executor=hpstage.InlineExecutor(),
            store=tmp_path,
            verify="off",
        )

    search()
    for folder in (tmp_path / "checkpoints").glob("*/*/"):
        spoil(folder, "undecodable", 0)
    search()
    search()
    with ExitStack() as closing:
        plan, _ = open_existing(tmp_path, None, closing=closing, read_only=True)
    assert plan.totals.steps_trained == 5 + 6 * 7 + 5
    lost = [record.message for record in caplog.records if "cannot be used" in record.message]
    assert len(lost) == 1
    assert "does not describe a state" in lost[0]
